"""Batches of samples by name: workers stack what they can, and draw the noise and the quantiles of times (law 1).

Values that all samples have as tensors of one shape are stacked in ``values`` of a `Batch`, those in a module's `pads`
padded, with ``NAME.length``. Of everything else ``host`` has a list with a value per sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.batch import LENGTH, Batch
from sd3_light.data.batch import pad_rows
from sd3_light.data.slots import AllocateTensor, replace_items
from sd3_light.data.stream import CachedBatch
from sd3_light.flow.timesteps import drawn_quantiles, open_interval
from sd3_light.model.device_copy import to_device
from sd3_light.randomness import fill_rows, occurrence_words

SAMPLES = "samples"
"""In ``host`` of a batch of a custom forward, and in what is read: the items of the dataset."""
STORED = "load_from_cache"
"""Beside it: whether the items are what the module returned in a first stage."""
WORDS = "sample.words"
POINT = "sample.point"
QUANTILE = "quantile"
"""In ``host``: the `occurrence_words`, the point of a validation (None in training), and the quantiles of the times."""
RESERVED = ("noisy", "t", "target", "weight")
"""Names of a batch that are not a sample's own values."""

Sample = Mapping[str, Any]
"""An item of the dataset with its identity: ``{"data": item, "data_id": int, "epoch": int, "repeat": int}``."""


class Missing(Enum):
    """Stands for a value that a sample does not have; it is the same object in all processes."""

    VALUE = 0


def rows_of(samples: Sample | Sequence[Sample]) -> CachedBatch:
    """Return samples as a dataset's batch; a bare item, from a manual call, becomes sample 0."""
    given = [samples] if isinstance(samples, Mapping) else samples
    bare = {"data_id": 0, "epoch": 0, "repeat": 0}
    whole = [sample if "data_id" in sample and "data" in sample else {"data": sample, **bare} for sample in given]
    index = {"sample_id": "data_id", "epoch": "epoch", "repeat": "repeat"}
    tensors = {name: torch.tensor([sample[key] for sample in whole]) for name, key in index.items()}
    return {SAMPLES: [sample["data"] for sample in whole], STORED: False, **tensors}


@dataclass(frozen=True)
class ItemPreparer:
    """Passes the items of the dataset to a module with a custom forward."""

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Batch:
        """Return a batch without values."""
        host = {SAMPLES: batch[SAMPLES], STORED: batch[STORED], **identities(batch, timestep_quantile)}
        return Batch(len(host[WORDS]), {}, host)

    def prepare_into(
        self, batch: CachedBatch, allocate: AllocateTensor, timestep_quantile: float | None = None
    ) -> Batch:
        """Return a batch without values."""
        return self.prepare_inputs(batch, timestep_quantile)


@dataclass(frozen=True)
class SamplePreparer(ItemPreparer):
    """Stacks samples in a worker.

    ``names`` are the values to keep, and ``latents`` the one that the loss compares with. Values in ``pads`` have
    unequal lengths. ``pin`` is for a trainer without workers.
    """

    seed: int
    names: frozenset[str]
    latents: str
    pads: tuple[str, ...] = ()
    pin: bool = False

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Batch:
        """Return the batch, stacked in new memory."""
        return self.prepare_into(batch, self._allocate, timestep_quantile)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.pin)

    def prepare_into(
        self, batch: CachedBatch, allocate: AllocateTensor, timestep_quantile: float | None = None
    ) -> Batch:
        """Return the batch, stacked in memory that ``allocate`` returns; without items only what is drawn for it."""
        host = identities(batch, timestep_quantile)
        host[QUANTILE] = self._quantiles(host)
        prepared = Batch(len(host[WORDS]), {}, host)
        if batch[SAMPLES] is None:
            return prepared
        prepared = self.stacked(prepared, batch[SAMPLES], allocate)
        clean = prepared.get(self.latents)
        if clean is None or not clean.is_floating_point():
            return prepared
        noise = allocate(tuple(clean.shape), torch.float32)
        fill_noise(noise, self.seed, "noise", host)
        return prepared.with_values({"noise": noise})

    def stacked(self, batch: Batch, items: Sequence[Sample], allocate: AllocateTensor, device: str = "cpu") -> Batch:
        """Return the batch with the values of items, stacked where all are tensors of one shape on a kind of device."""
        values = dict(batch.values)
        host = dict(batch.host)
        for name in dict.fromkeys(name for item in items for name in item if name in self.names):
            column = [item.get(name, Missing.VALUE) for item in items]
            if not _same(column, 1 if name in self.pads else 0, device):
                host[name] = column
            elif name in self.pads:
                values[name] = pad_rows(column, max(map(len, column)), allocate)
                host[name + LENGTH] = torch.tensor([len(text) for text in column])
            else:
                memory = allocate((len(column), *column[0].shape), column[0].dtype)
                values[name] = torch.stack(column, out=memory)
        return replace(batch, values=values, host=host)

    def _quantiles(self, host: Mapping[str, Any]) -> Tensor:
        words = host[WORDS]
        fixed = [host[POINT]] * len(words)
        drawn = drawn_quantiles(self.seed, words) if host[POINT] is None else list(map(open_interval, fixed))
        return torch.tensor(drawn, dtype=torch.float64)


def identities(batch: CachedBatch, point: float | None) -> dict[str, Any]:
    """Return what the draws of a batch depend on; in validation neither the epoch nor the repeat."""
    index = [batch[name].numpy() for name in ("epoch", "repeat", "sample_id")]
    words = occurrence_words(*index) if point is None else occurrence_words(0, 0, index[2])
    return {WORDS: words, POINT: point}


def fill_noise(rows: Tensor, seed: int, purpose: str, host: Mapping[str, Any]) -> None:
    """Fill rows on the host with the normals of a purpose, those of validation if ``host`` is of one."""
    fill_rows(seed, purpose if host[POINT] is None else f"eval-{purpose}", host[WORDS], rows.numpy())


def _same(column: Sequence[Any], from_dimension: int, device: str) -> bool:
    """Return whether all values are tensors on the device, of one dtype and one shape from a dimension on."""
    first = column[0]
    return all(
        type(value) is Tensor
        and value.layout == torch.strided
        and not value.requires_grad
        and value.device.type == device
        and value.dtype == first.dtype
        and value.dim() == first.dim() >= from_dimension
        and value.shape[from_dimension:] == first.shape[from_dimension:]
        for value in column
    )


# --- in the trainer ------------------------------------------------------------------------------


def samples_in(batch: Batch) -> list[dict[str, Any]]:
    """Return the samples of a batch of items."""
    occurrences, ids = batch.host[WORDS].T.tolist()
    rows = zip(batch.host[SAMPLES], occurrences, ids, strict=True)
    return [{"data": item, "data_id": at, "epoch": o >> 32, "repeat": o & 0xFFFFFFFF} for item, o, at in rows]


def sample_ids(batch: Batch) -> list[int]:
    """Return the samples' indices in the dataset."""
    ids: list[int] = batch.host[WORDS][:, 1].tolist()
    return ids


def common_names(batch: Batch) -> set[str]:
    """Return the values that all samples have."""
    lists = {name: column for name, column in batch.host.items() if isinstance(column, list)}
    whole = [name for name, column in lists.items() if not any(isinstance(value, Missing) for value in column)]
    return {*batch.values, *whole}


def sample_values(batch: Batch, at: int, device: torch.device) -> dict[str, Any]:
    """Return the values of one sample on the device, without padding."""
    values: dict[str, Any] = {}
    for name, stacked in batch.values.items():
        lengths = batch.lengths(name)
        values[name] = stacked[at] if lengths is None else stacked[at, : int(lengths[at])]
    for name, column in batch.host.items():
        if isinstance(column, list) and not isinstance(column[at], Missing):
            values[name] = _single(column[at], device)
    return values


def _single(value: Any, device: torch.device) -> Any:
    """Return a value on the device.

    Tensors inside lists and dicts are copied: a unit may send them to the device without waiting, but the memory of the
    workers is used again as soon as the batch is freed.
    """
    return to_device(value, device) if isinstance(value, Tensor) else replace_items(value, Tensor, Tensor.clone)


def batch_values(batch: Batch, name: str, pads: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return a value of all samples as `stack_column` does; nothing if no sample has it."""
    if name in batch.values:
        lengths = batch.lengths(name)
        stacked = batch.values[name]
        masks = {} if lengths is None else {f"{name}_mask": positions_below(lengths, stacked)}
        return {name: stacked, **masks}
    if name not in batch.host:
        return {}
    column = [item if isinstance(item, Missing) else _single(item, device) for item in batch.host[name]]
    return stack_column(name, column, pads)


def stack_column(name: str, column: Sequence[Any], pads: Sequence[str] = ()) -> dict[str, Any]:
    """Return a value of all samples: tensors stacked, anything else as a list.

    Unequal shapes are an error, except for the length of values in ``pads``, which get a mask ``NAME_mask``.
    """
    if all(isinstance(value, Missing) for value in column):
        return {}
    if any(isinstance(value, Missing) for value in column):
        raise UserError(f"some samples of a batch have {name!r} and others do not; give it to all or to none")
    if not isinstance(column[0], Tensor):
        return {name: torch.tensor(column) if isinstance(column[0], int | float) else list(column)}
    start = 1 if name in pads else 0
    shapes = sorted({tuple(tensor.shape)[start:] for tensor in column if isinstance(tensor, Tensor)})
    if len(shapes) > 1:
        raise UserError(
            f"samples of one batch have {name!r} of shapes {shapes[0]} and {shapes[1]}; name the samples of "
            "one shape with bucket_of, use batch_size=1, or name texts of unequal length in pads"
        )
    if name not in pads:
        return {name: torch.stack(list(column))}
    lengths = [len(text) for text in column]
    padded = pad_rows(column, max(lengths))
    return {name: padded, f"{name}_mask": positions_below(torch.tensor(lengths), padded)}


def positions_below(lengths: Tensor, padded: Tensor) -> Tensor:
    """Return the mask [B, L] of the real positions of texts with these lengths, on the device of ``padded``."""
    return torch.arange(padded.shape[1], device=padded.device) < to_device(lengths, padded.device)[:, None]
