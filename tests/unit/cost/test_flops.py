"""The FLOP formulas against torch's FLOP counter."""

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.config import SIZES, ModelSize
from sd3_light.config.schema_blocks import TokenRoute
from sd3_light.core.cost import Tokens
from sd3_light.cost.training_flops import step_flops, training_flops
from sd3_light.families.sd3.between_blocks import BetweenBlocks, BetweenOptions
from sd3_light.families.sd3.cost import SD3Cost, block_weights, forward_flops, image_tokens
from sd3_light.families.sd3.layers import build_layers, run_layers
from sd3_light.optim.groups import WeightKinds

BATCH = 2


def small(dual: tuple[int, ...] = ()) -> ModelSize:
    return ModelSize("small", 3, 2, 32, 48, 40, 8, 32, 0.125, True, dual)


def counted(size: ModelSize, height: int, width: int, text: int) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass as torch counts them, attention as matrix products."""
    transformer = SD3Transformer2DModel(**size.transformer_config()).train()
    latents, prompt = torch.randn(BATCH, 16, height, width), torch.randn(BATCH, text, size.text_width)
    inputs = (latents, prompt, torch.randn(BATCH, size.pooled_width), torch.rand(BATCH))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            result = transformer(*inputs, return_dict=False)[0]
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("size", [small(), small(dual=(0, 1)), SIZES["tiny2"]], ids=["plain", "dual", "tiny2"])
@pytest.mark.parametrize(("height", "width", "text"), [(8, 8, 7), (16, 8, 40)])
def test_flops_match_torchs_count(size: ModelSize, height: int, width: int, text: int) -> None:
    forward, backward = counted(size, height, width, text)
    tokens = Tokens(image_tokens(8 * width, 8 * height), text)
    assert BATCH * forward_flops(size, tokens) == forward
    assert BATCH * training_flops(SD3Cost(size), tokens).value == pytest.approx(forward + backward, rel=0.001)


@pytest.mark.parametrize("size", [small(), small(dual=(0, 1))], ids=["plain", "dual"])
def test_routed_flops_match_torchs_count(size: ModelSize) -> None:
    transformer, route = SD3Transformer2DModel(**size.transformer_config()).train(), TokenRoute(0.75, 2, 2)
    kinds, weights = WeightKinds(transformer), block_weights(size)
    matrices = sum(weight.numel() for weight in transformer.parameters() if kinds.is_block_matrix(weight))
    assert weights.image + weights.text + weights.sample == matrices
    kept = torch.tensor([[0, 1, 2, 3], [2, 5, 7, 9]])
    inputs = [torch.randn(BATCH, 16, 8, 8), torch.rand(BATCH), torch.randn(BATCH, 7, size.text_width)]
    inputs.append(torch.randn(BATCH, size.pooled_width))
    between = BetweenBlocks(BetweenOptions(route, None), kept, torch.sub)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            patches = run_layers(build_layers(transformer), inputs, between=between)[0]
        with FlopCounterMode(display=False) as backward:
            patches.sum().backward()
    assert BATCH * forward_flops(size, Tokens(16, 7), route) == forward.get_total_flops()
    cost = SD3Cost(size, route=route)
    routed = training_flops(cost, Tokens(16, 7))
    total = forward.get_total_flops() + backward.get_total_flops()
    assert BATCH * routed.value == pytest.approx(total, rel=0.001)
    assert step_flops(cost, {Tokens(16, 7): 1}) == routed.value
    assert "0.75·N in blocks 2 to 2" in routed.formula


def test_checkpointing_costs_one_more_forward_which_utilisation_does_not_count() -> None:
    size, tokens = SIZES["sd3.5_medium"], Tokens(256, 333)
    cost = SD3Cost(size)
    plain, checkpointed = (training_flops(cost, tokens, checkpointing) for checkpointing in (False, True))
    assert checkpointed.value - plain.value == forward_flops(size, tokens)
    half = training_flops(cost, tokens, 0.5).value
    assert half - plain.value == pytest.approx(forward_flops(size, tokens) / 2, abs=1)
    assert training_flops(cost, tokens, "selective") == plain, "it recomputes no product"
    assert step_flops(cost, {tokens: 1}) == plain.value
    assert "4·N²·D·13" in plain.formula


def test_a_step_counts_each_samples_own_tokens() -> None:
    cost = SD3Cost(SIZES["sd3_light"])
    padded = step_flops(cost, {Tokens(256, 333): 3})
    real = step_flops(cost, {Tokens(256, 20): 2, Tokens(256, 45): 1})
    assert padded == 3 * training_flops(cost, Tokens(256, 333)).value
    assert real == sum(training_flops(cost, Tokens(256, text)).value for text in (20, 45, 20))
    assert real < 0.6 * padded
