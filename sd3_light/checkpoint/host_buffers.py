"""Copies of live state in host memory, so that training can continue while they are written."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sd3_light.engines.protocol import TensorPiece

BLOCK_BYTES = 1 << 26  # a power of two: torch rounds pinned memory up to one
_ALIGNMENT = 64


class HostBuffers:
    """Host memory for the copies of one set of pieces, reused by each save; pinned if this process uses a GPU.

    It consists of equal blocks, so a long piece may be returned as several consecutive ones.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    @torch.no_grad()
    def copy(self, pieces: Iterable[TensorPiece]) -> list[TensorPiece]:
        """Return copies of the pieces that this rank writes, overwriting earlier copies; hosted ones as they are."""
        devices: set[torch.device] = set()
        copies: list[TensorPiece] = []
        position = 0
        for piece in pieces:  # one at a time: some are created on the fly and need not coexist
            if not piece.writes:
                continue
            if piece.hosted:
                copies.append(piece)
                continue
            if piece.values.is_cuda:
                devices.add(piece.values.device)
            for offset, target in self._targets(piece.values, position):
                target.copy_(piece.values[offset : offset + len(target)], non_blocking=True)
                copies.append(replace(piece, values=target, start=piece.start + offset))
            position += _aligned_bytes(piece)
        del self._blocks[-(-position // BLOCK_BYTES) :]
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def reserve(self, nbytes: int) -> None:
        """Allocate pinned memory ahead of the first copy, which takes seconds for many GB."""
        while len(self._blocks) * BLOCK_BYTES < nbytes:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))

    def _targets(self, values: Tensor, position: int) -> Iterable[tuple[int, Tensor]]:
        """Return memory for the values from byte ``position`` on: (index of the first element, buffer) pairs."""
        if not len(values):
            return [(0, torch.empty(0, dtype=values.dtype))]
        size = values.element_size()
        targets = []
        done = 0
        while done < len(values):
            number, offset = divmod(position + done * size, BLOCK_BYTES)
            if number == len(self._blocks):
                is_pinned = torch.cuda.is_initialized()
                self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_pinned))
            count = min(len(values) - done, (BLOCK_BYTES - offset) // size)
            targets.append((done, self._blocks[number][offset : offset + count * size].view(values.dtype)))
            done += count
        return targets


def copy_bytes(pieces: Iterable[TensorPiece]) -> int:
    """Return the bytes of host memory that copies of the written pieces take."""
    return sum(_aligned_bytes(piece) for piece in pieces if piece.writes and not piece.hosted)


def _aligned_bytes(piece: TensorPiece) -> int:
    return -(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT
