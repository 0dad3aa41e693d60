"""Joint attention that ignores padded text. diffusers' stock processor accepts a mask but does not apply it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.families.sd3.real_pipeline import RealTextAttention


def mask_attention(transformer: SD3Transformer2DModel) -> None:
    """Make every joint attention of a transformer mask text beyond ``text_lengths``, where it gets them."""
    # with a mask its backward pass gives NaN for some lengths (torch 2.11 to 2.13, pytorch issue 196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformer.set_attn_processor(RealTextAttention())


@contextmanager
def use_masked_attention(transformer: SD3Transformer2DModel) -> Iterator[None]:
    """Make the transformer mask padded text inside the context; restore its processors afterwards."""
    previous = dict(transformer.attn_processors)
    mask_attention(transformer)
    try:
        yield
    finally:
        transformer.set_attn_processor(previous)
