"""The cost formulas against what torch itself counts."""

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.config import SIZES, ModelSize
from sd3_light.model.cost import (
    Tokens,
    activation_bytes,
    forward_flops,
    gpu_memory,
    image_tokens,
    state_bytes,
    training_flops,
)


def small(qk_norm: bool = True, dual: tuple[int, ...] = (), layers: int = 3) -> ModelSize:
    return ModelSize("small", layers, 2, 32, 48, 40, 8, 32, qk_norm, dual)


def run(size: ModelSize, height: int, width: int, text: int, batch: int = 1) -> torch.Tensor:
    transformer = SD3Transformer2DModel(**size.transformer_config()).train()
    latents, prompt = torch.randn(batch, 16, height, width), torch.randn(batch, text, size.text_width)
    pooled, time = torch.randn(batch, size.pooled_width), torch.rand(batch)
    return transformer(latents, prompt, pooled, time, return_dict=False)[0]


@pytest.mark.parametrize("dual", [(), (0, 1)])
@pytest.mark.parametrize(("height", "width", "text"), [(8, 8, 7), (16, 8, 40), (32, 32, 5)])
def test_forward_flops_are_those_that_torch_counts(dual: tuple[int, ...], height: int, width: int, text: int) -> None:
    size = small(dual=dual)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run(size, height, width, text)
    tokens = Tokens(image_tokens(8 * width, 8 * height), text)
    assert forward_flops(size, tokens) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_training_costs_three_forwards_and_checkpointing_one_more() -> None:
    size, tokens = SIZES["sd3.5_medium"], Tokens(256, 333)
    forward = forward_flops(size, tokens)
    assert training_flops(size, tokens).value == 3 * forward
    assert training_flops(size, tokens, checkpointing=True).value == 4 * forward
    assert "4·N²·D·13" in training_flops(size, tokens).formula


def saved_bytes(size: ModelSize, height: int, text: int, batch: int) -> int:
    """What autograd keeps of a forward pass in float32, weights left out, each storage once."""
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, so that its place is not reused
        return tensor

    transformer = SD3Transformer2DModel(**size.transformer_config()).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in transformer.parameters()}
    prompt, pooled = torch.randn(batch, text, size.text_width), torch.randn(batch, size.pooled_width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        transformer(torch.randn(batch, 16, height, height), prompt, pooled, torch.rand(batch), return_dict=False)
    return sum(count for place, (count, _) in found.items() if place not in weights)


@pytest.mark.parametrize("dual", [(), (0, 1)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_activations_are_what_autograd_saves(qk_norm: bool, dual: tuple[int, ...]) -> None:
    size, batch, text = small(qk_norm, dual), 2, 40
    found = saved_bytes(size, 32, text, batch)
    formula = activation_bytes(size, Tokens(256, text), batch, compute="float32").value
    # on top of what autograd saves the formula counts target, loss and the bf16 text that came in
    assert found == pytest.approx(formula, rel=0.05)


def test_checkpointing_keeps_one_block_and_the_inputs_of_all() -> None:
    size, tokens = SIZES["sd3_light"], Tokens(256, 333)
    whole = activation_bytes(size, tokens, 8).value
    recomputed = activation_bytes(size, tokens, 8, checkpointing=True).value
    assert whole / size.num_layers < recomputed < whole / 4


def test_activations_grow_with_the_batch_and_shrink_in_bf16() -> None:
    size, tokens = SIZES["demo"], Tokens(16, 100)
    one, two = (activation_bytes(size, tokens, batch).value for batch in (1, 2))
    assert two == 2 * one
    assert one < activation_bytes(size, tokens, 1, compute="float32").value


def test_state_counts_every_copy_of_the_weights() -> None:
    size = SIZES["demo"]
    assert state_bytes(size, compute="float32").value == 16 * size.num_parameters()
    amount = state_bytes(size, ema_tracks=2)
    assert amount.value == (16 + 8 + 2) * size.num_parameters()
    assert amount.formula == "P·(weights 4 + gradients 4 + AdamW 8 + EMA 8 + bf16 copies 2)"


def test_gpu_memory_is_the_sum_of_its_parts() -> None:
    memory = gpu_memory(SIZES["sd3_light"], Tokens(256, 333), 64, ema_tracks=1)
    assert memory.total == memory.state.value + memory.activations.value + memory.context.value


def test_image_tokens_cover_sixteen_pixels_each_way() -> None:
    assert image_tokens(256, 256) == 256
    assert image_tokens(64, 48) == 12
