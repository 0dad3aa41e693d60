"""Half precision is close to float32, from the same noise, and the VAE stays in float32."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import ImageRequest, generate
from sd3_light.sample.precision import compute_in

REQUESTS = [ImageRequest("a red star", 3, 48, 32), ImageRequest("two blue squares", 4, 48, 32)]


def halved(pipe: Any) -> Any:
    half_pipe = copy.copy(pipe)
    for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        setattr(half_pipe, name, copy.deepcopy(getattr(pipe, name)))
    compute_in(half_pipe, torch.bfloat16)
    return half_pipe


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_half_precision_is_close(pipe: Any, text_tokens: Any) -> None:
    policy, half_pipe, seen = TextPolicy(12, "empty", text_tokens), halved(pipe), []
    half_pipe.transformer.pos_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    full = np.asarray(generate(pipe, REQUESTS, policy, (3, 1.0)), dtype=int)
    with pytest.MonkeyPatch.context() as patch:
        decode = half_pipe.vae.decode

        def spy(latents: Any, **rest: Any) -> Any:
            assert latents.dtype == torch.float32
            return decode(latents, **rest)

        patch.setattr(half_pipe.vae, "decode", spy)
        half = np.asarray(generate(half_pipe, REQUESTS, policy, (3, 1.0)), dtype=int)
    assert set(seen) == {torch.bfloat16}
    assert 0 < np.abs(full - half).mean() < 3
    assert half_pipe.vae.dtype == torch.float32


def test_float32_changes_nothing(pipe: Any) -> None:
    compute_in(pipe, torch.float32)
    assert not pipe.transformer._forward_hooks
    assert not pipe.transformer._forward_pre_hooks
