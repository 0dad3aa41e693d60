"""Copies of live state in host memory, so that training may go on while they are written."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sd3_light.engines.protocol import TensorPiece

BLOCK_BYTES = 1 << 26  # a power of two: torch rounds pinned memory up to one
_ALIGNED = 64


class HostBuffers:
    """Host memory for one set of pieces, kept from save to save; pinned where this process uses a GPU.

    It is made of equal blocks, so a long piece may come back as several that follow each other.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    @torch.no_grad()
    def take(self, pieces: Iterable[TensorPiece]) -> list[TensorPiece]:
        """Copies of the pieces that this rank writes; the last ones taken are overwritten."""
        devices: set[torch.device] = set()
        copies: list[TensorPiece] = []
        position = 0
        for piece in pieces:  # one after the other: some are made on the way, and need not lie side by side
            if not piece.writes:
                continue
            if piece.values.is_cuda:
                devices.add(piece.values.device)
            for at, place in self._places(piece.values, position):
                place.copy_(piece.values[at : at + len(place)], non_blocking=True)
                copies.append(replace(piece, values=place, start=piece.start + at))
            position += _room(piece)
        del self._blocks[-(-position // BLOCK_BYTES) :]
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def reserve(self, nbytes: int) -> None:
        """Make pinned room ahead of the first copy: the system takes seconds for many GB."""
        while len(self._blocks) * BLOCK_BYTES < nbytes:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))

    def _places(self, values: Tensor, position: int) -> Iterable[tuple[int, Tensor]]:
        """Where elements go from byte ``position`` of all blocks on: their first, and room for them."""
        if not len(values):
            return [(0, torch.empty(0, dtype=values.dtype))]
        size, places, at = values.element_size(), [], 0
        while at < len(values):
            number, offset = divmod(position + at * size, BLOCK_BYTES)
            if number == len(self._blocks):
                is_pinned = torch.cuda.is_initialized()
                self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_pinned))
            count = min(len(values) - at, (BLOCK_BYTES - offset) // size)
            places.append((at, self._blocks[number][offset : offset + count * size].view(values.dtype)))
            at += count
        return places


def room(pieces: Iterable[TensorPiece]) -> int:
    """Bytes of host memory that copies of the written pieces take."""
    return sum(_room(piece) for piece in pieces if piece.writes)


def _room(piece: TensorPiece) -> int:
    return -(-piece.values.nbytes // _ALIGNED) * _ALIGNED
