"""The image tokens after chosen blocks of a denoiser, kept while it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def tapped(
    blocks: Sequence[nn.Module], taps: Sequence[int], image_tokens: Callable[[Any], Tensor]
) -> Iterator[dict[int, Tensor]]:
    """Keep the tokens after the blocks ``taps``, counted from 1, in the dictionary that the block gets.

    ``image_tokens`` takes a block's output. A block that a backward pass computes again is kept once.
    """
    features: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            features.setdefault(number, image_tokens(output))

        return hook

    handles = [blocks[number - 1].register_forward_hook(keep(number)) for number in taps]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()
