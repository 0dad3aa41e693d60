"""Trained weights of blocks in host memory and their optimizer state, as an engine updates, saves and loads them."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from sd3_light.engines.protocol import norms
from sd3_light.model.block_swap import BlockSwap
from sd3_light.optim.build import Optimizer
from sd3_light.optim.chunks import Named, Tensors, WeightChunk


def by_block(named: Named, blocks: Sequence[nn.Module]) -> list[Named]:
    """Return the weights in their order, those of each block together."""
    numbers = {id(weight): number for number, block in enumerate(blocks) for weight in block.parameters()}
    runs = groupby(named.items(), key=lambda item: numbers.get(id(item[1])))
    return [dict(members) for _, members in runs]


class HostedBlocks(Tensors):
    """The live weights of a run by name. Those of swapped blocks are in host memory, complete when they are looked up.

    ``resident`` are all weights on the device, also those whose memory is only a buffer. Moves the optimizer state of
    the swapped ones to host memory.
    """

    def __init__(self, swap: BlockSwap, blocks: Sequence[nn.Module], resident: Named, optimizer: Optimizer) -> None:
        self._swap = swap
        self._weights = {name: weight.detach() for name, weight in resident.items()}
        self._blocks: dict[str, int] = {}
        self._norms: dict[str, Tensor] = {}
        names = {id(weight): name for name, weight in resident.items()}
        for index, block in enumerate(blocks):
            own = [names[id(weight)] for weight in block.parameters() if id(weight) in names]
            self._weights |= dict(zip(own, swap.views(index), strict=True))
            self._blocks |= dict.fromkeys(own, index)
            optimizer.move_state(own, swap.hold_state)
        swap.start_state()

    def __getitem__(self, name: str) -> Tensor:
        self._swap.settle()
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def holds(self, name: str) -> bool:
        """Whether a weight is in host memory."""
        return name in self._blocks

    def settle(self) -> None:
        """Complete weights and optimizer state in host memory."""
        self._swap.settle()

    def step(self, optimizer: Optimizer, skip: Tensor, chunk: WeightChunk) -> None:
        """Take the step of a chunk, whose weights are all of one block or of none that is swapped."""
        block = self._blocks.get(next(iter(chunk.weights)))
        if block is not None:
            self._swap.update(block)
        optimizer.step(skip, chunk)
        if block is not None:
            weights = [weight.detach() for weight in chunk.weights.values()]
            self._norms |= dict(zip(chunk.weights, norms(weights), strict=True))

    def norm(self, device: torch.device) -> Tensor:
        """Return the norm over all weights, on the device; those in host memory were measured in their last update."""
        resident = [name for name in self._weights if name not in self._blocks]
        found = dict(zip(resident, norms([self._weights[name] for name in resident]), strict=True)) | self._norms
        measure = partial(torch.linalg.vector_norm, dtype=torch.float32)
        each = [found[name] if name in found else measure(self[name]).to(device) for name in self._weights]
        return torch.stack(each).square().sum().sqrt()
