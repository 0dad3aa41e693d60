"""Micro-batches of samples: workers stack what they can, the trainer does the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.batch import BatchRecord
from sd3_light.data.slots import AllocateTensor, replace_items
from sd3_light.flow.timesteps import open_interval
from sd3_light.randomness import fill_normals, stream
from sd3_light.tasks.texts import pad_to_longest
from sd3_light.tasks.units import Values

Sample = Mapping[str, Any]
"""An item of the dataset with its identity: ``{"data": item, "data_id": int, "epoch": int, "repeat": int}``."""


@dataclass(frozen=True)
class StackedSamples(BatchRecord):
    """A micro-batch from a worker. It is not a container: DDP and FSDP would copy and cast the tensors of one.

    ``values`` [B, ...] are the tensors that all samples have in one shape, and ``samples`` hold everything else.
    ``noise`` belongs to the loss's latents; it is None if they are not among the values.
    """

    values: dict[str, Tensor]
    noise: Tensor | None
    quantiles: list[float]
    samples: list[dict[str, Any]]

    def map_tensors(self, function: Callable[[Tensor], Any]) -> "StackedSamples":
        """Return the batch with ``function`` applied to its values, the stacked ones and those of single samples."""

        def mapped(values: Values) -> dict[str, Any]:
            return {name: function(value) if _is_plain(value) else value for name, value in values.items()}

        noise = None if self.noise is None else function(self.noise)
        samples = [{**sample, "data": mapped(sample["data"])} for sample in self.samples]
        return replace(self, values=mapped(self.values), noise=noise, samples=samples)

    def common_names(self) -> set[str]:
        """Return the values that all samples have; none if samples differ in them, or if the noise is missing."""
        first, *others = (sample["data"].keys() for sample in self.samples)
        return set() if self.noise is None or any(other != first for other in others) else {*self.values, *first}

    def inputs(self, reads: Iterable[str], pads: Sequence[str]) -> dict[str, Any]:
        """Return the values in ``reads`` as a batch, with the noise and the quantiles."""
        rests = [self.rest(at) for at in range(len(self.samples))]
        single = stack_samples([{name: rest[name] for name in reads if name in rest} for rest in rests], pads)
        stacked = {name: self.values[name] for name in reads if name in self.values}
        quantile = torch.tensor(self.quantiles, dtype=torch.float64)
        return {**stacked, **single, "noise": self.noise, "quantile": quantile}

    def unstacked(self) -> list[Sample]:
        """Return the samples, with views of what is stacked, their ``noise`` and ``quantile``."""
        noise = [None] * len(self.samples) if self.noise is None else self.noise
        return [
            {
                **sample,
                "data": {name: value[at] for name, value in self.values.items()} | self.rest(at),
                "noise": noise[at],
                "quantile": self.quantiles[at],
            }
            for at, sample in enumerate(self.samples)
        ]

    def rest(self, at: int) -> dict[str, Any]:
        """Return the values of a sample that are not stacked.

        Tensors inside lists and dicts are copied: a unit may send them to the device without waiting, but the memory of
        the workers is used again as soon as the batch is freed.
        """
        data = self.samples[at]["data"]
        return {
            name: value if isinstance(value, Tensor) else replace_items(value, Tensor, Tensor.clone)
            for name, value in data.items()
        }


Batch = Sample | Sequence[Sample] | StackedSamples


def samples_of(batch: Batch) -> list[Sample]:
    """Return the samples of a batch; a bare item, from a manual call, becomes sample 0."""
    if isinstance(batch, StackedSamples):
        return batch.unstacked()
    samples = [batch] if isinstance(batch, Mapping) else batch
    bare = {"data_id": 0, "epoch": 0, "repeat": 0}
    return [sample if "data_id" in sample and "data" in sample else {"data": sample, **bare} for sample in samples]


@dataclass(frozen=True)
class SampleStacker:
    """Stacks samples in a worker, and draws the noise and the quantiles of their times there (law 1).

    ``names`` are the values to keep, and ``latents`` the one that the loss compares with. Values in ``pads`` have
    unequal lengths and are not stacked here. ``pin`` is for a trainer without workers.
    """

    seed: int
    names: frozenset[str]
    latents: str
    pads: tuple[str, ...] = ()
    pin: bool = False

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        """Return the batch, stacked in new memory."""
        return self.prepare_into(batch, lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=self.pin))

    def prepare_into(self, batch: Sequence[Sample], empty: AllocateTensor) -> Any:
        """Return the batch, stacked in memory that ``empty`` allocates."""
        items = [{name: value for name, value in sample["data"].items() if name in self.names} for sample in batch]
        names = [name for name in items[0] if name not in self.pads and _can_stack([item.get(name) for item in items])]
        values = {name: _stack([item.pop(name) for item in items], empty) for name in names}
        return StackedSamples(
            values,
            self._noise(batch, values.get(self.latents), empty),
            [draw_quantile(self.seed, sample) for sample in batch],
            [{**sample, "data": item} for sample, item in zip(batch, items, strict=True)],
        )

    def _noise(self, batch: Sequence[Sample], clean: Tensor | None, empty: AllocateTensor) -> Tensor | None:
        if clean is None or not clean.is_floating_point():
            return None
        noise = empty(tuple(clean.shape), torch.float32)
        rows = noise.numpy()
        for at, sample in enumerate(batch):
            fill_normals(sample_stream(self.seed, "noise", sample), rows[at])
        return noise


def sample_stream(seed: int, purpose: str, sample: Sample) -> np.random.Generator:
    """Return the generator of one purpose for a sample."""
    return stream(seed, purpose, sample["epoch"], sample["repeat"], sample["data_id"])


def draw_quantile(seed: int, sample: Sample) -> float:
    """Return the random quantile of a sample's time, in (0, 1)."""
    return open_interval(sample_stream(seed, "timestep", sample).random())


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad


def _can_stack(column: Sequence[Any]) -> bool:
    """Return whether all values are tensors on the host, of one shape and dtype."""
    first = column[0]
    return all(
        _is_plain(value) and value.device.type == "cpu" and value.shape == first.shape and value.dtype == first.dtype
        for value in column
    )


def _stack(column: list[Tensor], empty: AllocateTensor) -> Tensor:
    return torch.stack(column, out=empty((len(column), *column[0].shape), column[0].dtype))


def join_samples(
    batch: Batch, sources: Sequence[Sample], samples: Sequence[Values], pads: Sequence[str]
) -> dict[str, Any]:
    """Return the values of ``samples`` as a batch; a stacked one has those that are still as in ``sources``."""
    stacked = {**batch.values, "noise": batch.noise} if isinstance(batch, StackedSamples) else {}
    before = [{**source["data"], "noise": source.get("noise")} for source in sources]
    pairs = list(zip(samples, before, strict=True))
    kept = {
        name: tensor
        for name, tensor in stacked.items()
        if all(name in values and values[name] is views[name] for values, views in pairs)
    }
    rest = [{name: value for name, value in values.items() if name not in kept} for values in samples]
    return {**stack_samples(rest, pads), **kept}


def stack_samples(samples: Sequence[Values], pads: Sequence[str] = ()) -> dict[str, Any]:
    """Return one batch: tensors are stacked, other values become lists.

    Unequal shapes are an error, except for the length of values in ``pads``, which get a mask ``NAME_mask``.
    """
    names = list(samples[0])
    batch: dict[str, Any] = {}
    for name in names:
        column: list[Any] = [sample.get(name) for sample in samples]
        if any(name not in sample for sample in samples):
            raise UserError(f"some samples of a batch have {name!r} and others do not; give it to all or to none")
        if not isinstance(column[0], Tensor):
            batch[name] = torch.tensor(column) if isinstance(column[0], int | float) else column
            continue
        start = 1 if name in pads else 0
        shapes = sorted({tuple(tensor.shape)[start:] for tensor in column if isinstance(tensor, Tensor)})
        if len(shapes) > 1:
            raise UserError(
                f"samples of one batch have {name!r} of shapes {shapes[0]} and {shapes[1]}; name the samples of "
                "one shape with bucket_of, use batch_size=1, or name texts of unequal length in pads"
            )
        if name in pads:
            batch[name], batch[f"{name}_mask"] = pad_to_longest(column)
        else:
            batch[name] = torch.stack(column)
    return batch
