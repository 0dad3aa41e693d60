"""What an adapter on SD3 costs in memory. The stock denoiser is counted: what it saves depends on the layers chosen."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import diffusers
import torch
from torch import Tensor, nn

from sd3_light.config import ModelSize
from sd3_light.config.schema_blocks import TokenRoute
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Compute, SampleBytes, TextTokens, Tokens
from sd3_light.families.stock.cost import CountedCost


class CountedSD3(CountedCost):
    """The cost of SD3's stock denoiser, for any number of tokens."""

    compiled_share = (0.53, 0.69)
    text = TextTokens(0, True, "")

    def __init__(self, size: ModelSize) -> None:
        self._size = size
        with torch.device("meta"):
            super().__init__(diffusers.SD3Transformer2DModel(**size.transformer_config()), "SD3")

    def image_tokens(self, width: int, height: int) -> int:
        """Not known here: see `SD3Cost`."""
        raise NotImplementedError

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        """Not known here: see `SD3Cost`."""
        raise NotImplementedError

    def batch(self, rows: int, columns: int, text: int) -> Batch:
        """See `CountedCost.batch`."""
        size = self._size
        values = {
            "hidden_states": torch.zeros(1, size.latent_channels, size.patch_size * rows, size.patch_size * columns),
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.zeros(1, text, size.text_width, dtype=torch.bfloat16),
            "pooled_projections": torch.zeros(1, size.pooled_width, dtype=torch.bfloat16),
        }
        return Batch(1, values)

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """See `CountedCost.denoise`."""
        velocity: Tensor = denoiser(**batch.values, return_dict=False)[0]
        return velocity


@cache
def counted(size: ModelSize) -> CountedSD3:
    """Return the counted cost of a size."""
    return CountedSD3(size)


@cache  # `new` asks for it with many sizes of micro-batches
def adapter_bytes(size: ModelSize, route: TokenRoute | None, tokens: Tokens, compute: Compute) -> SampleBytes:
    """Return the GPU memory of one sample below an adapter; a ``route`` leaves tokens out of some blocks."""
    cost = counted(size)
    whole = cost.sample_bytes(tokens, compute)
    if route is None:
        return whole
    inside = [Tokens(route.tokens_in(block + 1, tokens.image), tokens.text) for block in range(size.num_layers)]
    blocks = [cost.sample_bytes(few, compute).blocks[block] for block, few in enumerate(inside)]
    return replace(whole, blocks=tuple(blocks))
