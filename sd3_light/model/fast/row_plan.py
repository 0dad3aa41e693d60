"""Where the tokens of a batch lie when samples stand one behind another without padding.

Both streams are matrices of rows [M, D], sample after sample; samples may differ in length. For attention the rows of
both streams are joined, each sample's image before its text. Everything is known on the host, so making a plan waits
for no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ROUND = 2048
"""Joined rows of real text on a GPU are a multiple of this."""


@dataclass(frozen=True)
class Rows:
    """The rows of one stream. ``starts`` [B + 1] (int32): where samples begin; ``owner`` [M]: the sample of a row;
    ``place`` [M]: its row among the joined ones. ``length`` is that of every sample, None where they differ."""

    starts: Tensor
    owner: Tensor
    place: Tensor
    longest: int
    length: int | None

    @property
    def samples(self) -> int:
        """B."""
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """M."""
        return len(self.owner)


@dataclass(frozen=True)
class Plan:
    """The rows of a batch: of both streams, and joined (``starts`` as cumulative lengths for attention)."""

    image: Rows
    text: Rows
    starts: Tensor
    longest: int
    length: int | None
    text_index: Tensor | None
    """Which rows of a padded [B x T] text are real, [M]; None where all of them are."""
    room: int
    """Rows that joined matrices have. On a GPU those of real text end with rows that mean nothing, so that attention
    meets few different sizes."""

    @property
    def samples(self) -> int:
        """B."""
        return len(self.starts) - 1


def make_plan(samples: int, num_image: int, num_text: int, lengths: Sequence[int] | None, device: torch.device) -> Plan:
    """A plan for B samples of ``num_image`` image tokens and ``num_text`` text tokens, or only the first ``lengths`` of
    these each."""
    if lengths is None:
        return _padded_plan(samples, num_image, num_text, device)
    return _plan(samples, num_image, num_text, torch.as_tensor(lengths, dtype=torch.int64), device)


@lru_cache(maxsize=32)
def _padded_plan(samples: int, num_image: int, num_text: int, device: torch.device) -> Plan:
    return _plan(samples, num_image, num_text, None, device)


def _plan(samples: int, num_image: int, num_text: int, lengths: Tensor | None, device: torch.device) -> Plan:
    image = torch.full((samples,), num_image, dtype=torch.int64)
    text = torch.full_like(image, num_text) if lengths is None else lengths
    assert len(text) == samples and int(text.min()) > 0 and int(text.max()) <= num_text, "text lengths"
    joined = _starts(image + text)
    image_rows = _rows(image, joined[:-1], device)
    text_rows = _rows(text, joined[:-1] + image, device)
    index = None
    if lengths is not None:
        first = torch.arange(samples) * num_text - _starts(text)[:-1]
        index = _sent(torch.arange(int(text.sum())) + first.repeat_interleave(text), device, torch.int64)
    longest, total = int((image + text).max()), int(joined[-1])
    uniform = text_rows.length is not None
    is_rounded = lengths is not None and device.type == "cuda"
    return Plan(
        image_rows,
        text_rows,
        _sent(joined, device),
        longest,
        longest if uniform else None,
        index,
        -(-total // ROUND) * ROUND if is_rounded else total,
    )


def _rows(lengths: Tensor, begin: Tensor, device: torch.device) -> Rows:
    """Rows of samples with these lengths, which begin at ``begin`` among the joined rows."""
    starts, longest = _starts(lengths), int(lengths.max())
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(int(starts[-1])) + (begin - starts[:-1]).repeat_interleave(lengths)
    length = longest if bool((lengths == longest).all()) else None
    return Rows(_sent(starts, device), _sent(owner, device), _sent(place, device), longest, length)


def _sent(values: Tensor, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    values = values.to(dtype)
    # from pageable memory the host would wait for all that the device has to do
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
