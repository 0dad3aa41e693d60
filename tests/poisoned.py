"""Prove that nothing reads the weights of a swapped block outside of its turn."""

import pytest

from sd3_light.model.block_swap import BlockSwap


def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill the buffers with NaN whenever another block is needed; return the blocks in the order of need."""
    order: list[int] = []
    need = BlockSwap.need

    def poisoned(swap: BlockSwap, index: int, step: int) -> None:
        if index != swap._current:
            order.append(index)
            swap.settle()
            for ring in (swap, swap._state):
                if ring is not None:
                    for buffer in ring._buffers:
                        buffer.fill_(255)
                    ring._holds = [None] * len(ring._holds)
        need(swap, index, step)

    monkeypatch.setattr(BlockSwap, "need", poisoned)
    return order
