"""A micro-batch by name: the same record from a worker to the loss."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sd3_light.core.columns import REFERENCE, reference_entry

LENGTH = ".length"
"""`NAME.length` in ``host`` is the number of rows of ``values[NAME]`` that are each sample's own."""


@dataclass(frozen=True)
class BatchRecord:
    """Base of dataclasses whose fields are packed like the items of a dict.

    It is neither a tuple nor a mapping, so that DDP, FSDP2 and DeepSpeed pass it to a module as it is, uncast.
    """


@dataclass(frozen=True)
class Batch(BatchRecord):
    """Values of ``size`` samples by name.

    ``values`` go to the device. Reserved names: ``noisy`` latents, times ``t`` from 0 to 1, the ``target`` velocity,
    ``mask`` and ``weight`` of a sample's loss. ``host`` values stay on the host: counts, as reading them back would
    wait for the device, and in tasks values of other types. A batch without values is a placeholder, for processes that
    need only its size.
    """

    size: int
    values: dict[str, Tensor] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def get(self, name: str) -> Tensor | None:
        """Return a value, or None if there is none of that name."""
        return self.values.get(name)

    def lengths(self, name: str) -> Tensor | None:
        """Return how many first rows of a value are each sample's own, on the host; None if all are."""
        return self.host.get(name + LENGTH)

    def with_values(self, values: Mapping[str, Tensor | None], without: Iterable[str] = ()) -> "Batch":
        """Return the batch with more values, those that are not None, and without some."""
        kept = {name: value for name, value in self.values.items() if name not in without}
        added = {name: value for name, value in values.items() if value is not None}
        return replace(self, values={**kept, **added})

    def select(self, names: Sequence[str]) -> "Batch":
        """Return the batch with some of its values, in this order; absent ones are left out."""
        return replace(self, values={name: self.values[name] for name in names if name in self.values})

    def tensors(self) -> list[Tensor]:
        """Return the values in their order, which is that of their insertion."""
        return list(self.values.values())

    def map_tensors(self, function: Callable[[Tensor], Any]) -> "Batch":
        """Return the batch with ``function`` applied to the values."""
        return replace(self, values={name: function(value) for name, value in self.values.items()})

    def shapes(self) -> tuple[Any, ...]:
        """Return what must be equal for two batches to run the same recorded work: shapes, and numbers of the host."""
        shapes = [(name, value.shape, value.dtype) for name, value in self.values.items()]
        return (*shapes, *((name, value) for name, value in self.host.items() if isinstance(value, int)))

    def split(self, pieces: int) -> "list[Batch]":
        """Split into equal batches; values with lengths are cut to each one's longest sample."""
        assert self.size % pieces == 0, (self.size, pieces)
        values = {name: value.chunk(pieces) for name, value in self.values.items()}
        host = {name: value.chunk(pieces) for name, value in self.host.items()}
        size = self.size // pieces
        return [
            Batch(size, _at(values, piece), _at(host, piece))._shortened() if values else Batch(size)
            for piece in range(pieces)
        ]

    def _shortened(self) -> "Batch":
        lengths = {name.removesuffix(LENGTH): counts for name, counts in self.host.items() if name.endswith(LENGTH)}
        cut = {name: self.values[name][:, : int(counts.max())] for name, counts in lengths.items()}
        return replace(self, values={**self.values, **cut})

    def padded_to(self, name: str, rows: int) -> "Batch":
        """Return the batch with a value [B, rows, ...] padded with rows of zeros."""
        value = self.values[name]
        missing = rows - value.shape[1]
        return self.with_values({name: pad(value, (0, 0) * (value.dim() - 2) + (0, missing))}) if missing else self

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its values on the device, copied on the current stream."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def references(batch: Batch) -> list[Tensor]:
    """Return the latents of the reference images, in their order."""
    count = sum(name.startswith(REFERENCE) for name in batch.values)
    return [batch[reference_entry(number)] for number in range(count)]


def _at(chunks: Mapping[str, Sequence[Tensor]], piece: int) -> dict[str, Tensor]:
    return {name: parts[piece] for name, parts in chunks.items()}
