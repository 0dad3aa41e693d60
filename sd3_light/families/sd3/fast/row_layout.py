"""The row layout of a batch whose samples are packed one after another without padding.

Both streams are matrices of rows [M, D], sample by sample; samples may differ in length. For attention the rows of both
streams are joined, each sample's image rows before its text rows. All sizes are known on the host, so building a layout
does not synchronize with the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sd3_light.model.device_copy import to_device

ROUND = 2048
"""On a GPU the number of joined rows of real text is a multiple of this."""


FILLED = 32
"""Samples with fixed rows per further one that only fills them up: there are this many numbers of rows, at most."""


class FixedText(NamedTuple):
    """Real text in a fixed number of ``rows``, for recorded work: ``lengths`` are on the device.

    The lengths of the samples come first, then those of fillers. A filler has no image, and nothing attends to it but
    itself, so no loss depends on it and its gradients are zeros.
    """

    lengths: Tensor
    rows: int


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
class RowLayout:
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
        """The number of samples, B, and of fillers."""
        return len(self.starts) - 1


def fill_rows(lengths: Tensor, num_text: int) -> FixedText:
    """Return the lengths of samples with up to ``num_text`` tokens, on the host, and of fillers up to a round number of
    rows."""
    fillers = -(-len(lengths) // FILLED)
    total = int(lengths.sum())
    rows = -(-total // (fillers * num_text)) * fillers * num_text
    full, rest = divmod(rows - total, num_text)
    added = [num_text] * full + [rest] + [0] * (fillers - full - 1)
    return FixedText(torch.cat([lengths, lengths.new_tensor(added)]), rows)


def make_layout(
    samples: int, num_image: int, num_text: int, lengths: Sequence[int] | FixedText | None, device: torch.device
) -> RowLayout:
    """Return the layout for ``num_image`` image and ``num_text`` text tokens per sample, or ``lengths`` text tokens."""
    if lengths is None:
        return _padded_layout(samples, num_image, num_text, device)
    if isinstance(lengths, FixedText):
        return _fixed_layout(samples, num_image, num_text, lengths)
    return _layout(samples, num_image, num_text, torch.as_tensor(lengths, dtype=torch.int64), device)


@cache  # unlimited: CUDA graphs read these tensors as long as a run lasts
def _padded_layout(samples: int, num_image: int, num_text: int, device: torch.device) -> RowLayout:
    return _layout(samples, num_image, num_text, None, device)


def _layout(samples: int, num_image: int, num_text: int, lengths: Tensor | None, device: torch.device) -> RowLayout:
    counts = torch.full((samples,), num_text, dtype=torch.int64) if lengths is None else lengths
    shortest = int(counts.min())
    longest = int(counts.max())
    num_rows = int(counts.sum())
    assert len(counts) == samples and shortest > 0 and longest <= num_text, "text lengths"
    text = to_device(counts, device)
    image = torch.full_like(text, num_image)
    joined = _starts(image + text)
    text_index = None
    if lengths is not None:
        first = torch.arange(samples, device=device) * num_text - _starts(text)[:-1]
        text_index = torch.arange(num_rows, device=device) + _repeat(first, text, num_rows)
    total = samples * num_image + num_rows
    length = longest if shortest == longest else None
    is_rounded = lengths is not None and device.type == "cuda"
    return RowLayout(
        _rows(image, joined[:-1], samples * num_image, num_image, num_image),
        _rows(text, joined[:-1] + image, num_rows, longest, length),
        joined.int(),
        num_image + longest,
        None if length is None else num_image + longest,
        text_index,
        -(-total // ROUND) * ROUND if is_rounded else total,
    )


def _fixed_layout(samples: int, num_image: int, num_text: int, fixed: FixedText) -> RowLayout:
    """Return the layout of text with fillers; the host reads no length, so its kernels can be recorded."""
    text = fixed.lengths
    number = torch.arange(len(text), device=text.device)
    image = num_image * (number < samples)
    joined = _starts(image + text)
    first = (number % samples) * num_text - _starts(text)[:-1]  # fillers repeat the tokens of some samples
    return RowLayout(
        _rows(image, joined[:-1], samples * num_image, num_image, None),
        _rows(text, joined[:-1] + image, fixed.rows, num_text, None),
        joined.int(),
        num_image + num_text,
        None,
        torch.arange(fixed.rows, device=text.device) + _repeat(first, text, fixed.rows),
        samples * num_image + fixed.rows,
    )


def _rows(lengths: Tensor, begin: Tensor, count: int, longest: int, length: int | None) -> Rows:
    """Return the ``count`` rows of samples of these lengths that begin at ``begin`` among the joined rows."""
    starts = _starts(lengths)
    sample_index = _repeat(torch.arange(len(lengths), device=lengths.device), lengths, count)
    joined_index = torch.arange(count, device=lengths.device) + _repeat(begin - starts[:-1], lengths, count)
    return Rows(starts.int(), sample_index.int(), joined_index.int(), longest, length)


def _repeat(values: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Repeat each value by its length; with the known ``count`` of results the host does not wait for the device."""
    return values.repeat_interleave(lengths, output_size=count)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
