"""The row layout of a batch whose samples are packed one after another without padding.

Both streams are matrices of rows [M, D], sample by sample; samples may differ in length. For attention the rows of both
streams are joined, each sample's image rows before its text rows. All sizes are known on the host, so building a plan
does not synchronize with the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ROUND = 2048
"""On a GPU the number of joined rows of real text is a multiple of this."""


@dataclass(frozen=True)
class Rows:
    """The rows of one stream.

    ``starts`` [B + 1] (int32): first row of each sample. ``sample_index`` [M]: each row's sample. ``joined_index`` [M]:
    its position among the joined rows. ``length``: rows per sample, None if they differ.
    """

    starts: Tensor
    sample_index: Tensor
    joined_index: Tensor
    longest: int
    length: int | None

    @property
    def samples(self) -> int:
        """The number of samples, B."""
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """The number of rows, M."""
        return len(self.sample_index)


@dataclass(frozen=True)
class RowPlan:
    """The rows of a batch, per stream and joined (``starts``: cumulative lengths for attention)."""

    image: Rows
    text: Rows
    starts: Tensor
    longest: int
    length: int | None
    text_index: Tensor | None
    """[M]: the real rows of a padded [B x T] text; None if all rows are real."""
    capacity: int
    """Number of rows of joined matrices. For real text on a GPU it includes undefined rows at the end, so that
    attention sees few different sizes."""

    @property
    def samples(self) -> int:
        """The number of samples, B."""
        return len(self.starts) - 1


def make_plan(
    samples: int, num_image: int, num_text: int, lengths: Sequence[int] | None, device: torch.device
) -> RowPlan:
    """Return the plan for ``num_image`` image and ``num_text`` text tokens per sample, or ``lengths`` text tokens."""
    if lengths is None:
        return _padded_plan(samples, num_image, num_text, device)
    return _plan(samples, num_image, num_text, torch.as_tensor(lengths, dtype=torch.int64), device)


@lru_cache(maxsize=32)
def _padded_plan(samples: int, num_image: int, num_text: int, device: torch.device) -> RowPlan:
    return _plan(samples, num_image, num_text, None, device)


def _plan(samples: int, num_image: int, num_text: int, lengths: Tensor | None, device: torch.device) -> RowPlan:
    image = torch.full((samples,), num_image, dtype=torch.int64)
    text = torch.full_like(image, num_text) if lengths is None else lengths
    assert len(text) == samples and int(text.min()) > 0 and int(text.max()) <= num_text, "text lengths"
    joined = _starts(image + text)
    image_rows = _rows(image, joined[:-1], device)
    text_rows = _rows(text, joined[:-1] + image, device)
    text_index = None
    if lengths is not None:
        first = torch.arange(samples) * num_text - _starts(text)[:-1]
        text_index = _to_device(torch.arange(int(text.sum())) + first.repeat_interleave(text), device, torch.int64)
    longest, total = int((image + text).max()), int(joined[-1])
    is_rounded = lengths is not None and device.type == "cuda"
    return RowPlan(
        image_rows,
        text_rows,
        _to_device(joined, device),
        longest,
        longest if text_rows.length is not None else None,
        text_index,
        -(-total // ROUND) * ROUND if is_rounded else total,
    )


def _rows(lengths: Tensor, begin: Tensor, device: torch.device) -> Rows:
    """Return the rows of samples of these lengths that begin at ``begin`` among the joined rows."""
    starts, longest = _starts(lengths), int(lengths.max())
    sample_index = torch.arange(len(lengths)).repeat_interleave(lengths)
    joined_index = torch.arange(int(starts[-1])) + (begin - starts[:-1]).repeat_interleave(lengths)
    length = longest if bool((lengths == longest).all()) else None
    return Rows(
        _to_device(starts, device), _to_device(sample_index, device), _to_device(joined_index, device), longest, length
    )


def _to_device(values: Tensor, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    values = values.to(dtype)
    # a copy from pageable memory would wait for all queued work of the device
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
