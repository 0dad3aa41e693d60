"""LoRA layers on the denoiser: their targets, training, loading and applied updates."""

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import LORA_TARGETS
from sd3_light.model.adapter_layers import add_adapter
from sd3_light.model.lora_layers import LoraModule, is_lora_name, load_lora, lora_modules, lora_scale
from tests.unit.model.test_adapter_layers import output, stock

pytestmark = pytest.mark.usefixtures("one_thread")

TARGETS = ("attn.to_q", "attn.add_k_proj", "ff.net.0.proj", "norm1.linear")
KINDS: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 6.0},
    "rslora": {"alpha": 6.0, "use_rslora": True},
    "dora": {"alpha": 6.0, "use_dora": True},
}


def add_lora(transformer: Any, rank: int, alpha: float, target_modules: tuple[str, ...], **keys: Any) -> Any:
    seed = keys.pop("seed", 0)
    return add_adapter(transformer, AdapterConfig(rank=rank, alpha=alpha, target_modules=target_modules, **keys), seed)


def lora_state(transformer: SD3Transformer2DModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in transformer.state_dict().items() if is_lora_name(name)}


def merged(transformer: SD3Transformer2DModel) -> SD3Transformer2DModel:
    """The stock model with the adapter's updates applied to its weights."""
    model = stock()
    with torch.no_grad():
        for name, update in lora_modules(transformer).items():
            weight = model.get_submodule(name).weight
            weight.copy_(update.applied(weight))
    return model


def trained(**options: Any) -> SD3Transformer2DModel:
    """The model with a trained LoRA."""
    transformer = stock()
    add_lora(transformer, 4, target_modules=TARGETS, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in lora_state(transformer).values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return transformer


def test_new_adapters_have_their_targets_dtype_and_seed() -> None:
    names = add_lora(stock(), 2, 2.0, LORA_TARGETS)
    assert len(names) == 2 * 8 - 1, "the last block has no text output"
    assert "transformer_blocks.1.attn.to_out.0" in names
    assert add_lora(stock(), 2, 2.0, ("transformer_blocks.0.attn.to_q", "proj_out")) == (
        "transformer_blocks.0.attn.to_q",
        "proj_out",
    )
    transformer = stock().to(torch.bfloat16)
    add_lora(transformer, 4, 4.0, TARGETS)
    assert {tensor.dtype for tensor in lora_state(transformer).values()} == {torch.float32}
    states = []
    for seed in (5, 5, 6):
        torch.rand(3)
        transformer = stock()
        state = torch.random.get_rng_state()
        add_lora(transformer, 4, 4.0, TARGETS, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state), "the global generator changed"
        states.append(lora_state(transformer))
    name = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][name], states[2][name])
    transformer = trained(alpha=6.0)
    with pytest.raises(UserError, match="already has an adapter"):
        add_lora(transformer, 4, 4.0, ("attn.to_v",))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("attn.toq", r"attn\.toq: no linear layer matches \(nearest: attn\.to_q\)"),
        ("o_q", r"o_q: no linear layer matches"),
        ("attn", r"attn: .*transformer_blocks\.0\.attn is not a linear layer \(Attention\)"),
        ("pos_embed.proj", r"pos_embed\.proj is not a linear layer \(Conv2d\)"),
    ],
)
def test_a_target_without_a_layer_is_an_error(target: str, message: str) -> None:
    transformer = stock()
    with pytest.raises(UserError, match=message):
        add_lora(transformer, 2, 2.0, ("attn.to_k", target))
    assert not lora_state(transformer), "and nothing was added"


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_applied_updates_give_the_same_model_and_move_between_scales(options: dict[str, Any]) -> None:
    transformer = trained(**options)
    expected = output(transformer)
    assert (expected - output(stock())).abs().max() > 1e-3
    assert (output(merged(transformer)) - expected).abs().max() < 1e-5
    target = stock()
    add_lora(target, 4, target_modules=TARGETS, **{**options, "alpha": 1.0})
    load_lora(target, lora_modules(transformer))
    assert (output(target) - expected).abs().max() < 1e-5


def test_applied_updates_equal_pefts_merge() -> None:
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS))
    theirs = get_peft_model(stock(), config)
    ours = trained(alpha=6.0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                parameter.copy_(lora_state(ours)[name.removeprefix("base_model.model.")])
    expected = theirs.merge_and_unload().state_dict()
    assert all((tensor - expected[name]).abs().max() < 1e-6 for name, tensor in merged(ours).state_dict().items())


MODULES = dict(lora_modules(trained(alpha=6.0)))
FIRST = "transformer_blocks.0.attn.to_q"
MISMATCHES = {
    "missing": ({name: module for name, module in MODULES.items() if name != FIRST}, f"{FIRST} is not in the file"),
    "foreign": ({**MODULES, "proj_out": MODULES[FIRST]}, "proj_out has no adapter in the model"),
    "rank": (
        {**MODULES, FIRST: LoraModule(torch.ones(2, 128), torch.ones(128, 2))},
        f"{FIRST} has rank 2 and 128 -> 128, not 4",
    ),
    "dora": (
        {**MODULES, FIRST: LoraModule(MODULES[FIRST].down, MODULES[FIRST].up, 1.0, torch.ones(128))},
        f"{FIRST} is DoRA",
    ),
}


@pytest.mark.parametrize(("modules", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatched_weights_are_named(modules: dict[str, LoraModule], message: str) -> None:
    transformer = trained(alpha=6.0)
    before = {name: tensor.clone() for name, tensor in lora_state(transformer).items()}
    with pytest.raises(UserError, match=message):
        load_lora(transformer, modules)
    assert all(torch.equal(tensor, before[name]) for name, tensor in lora_state(transformer).items())


def test_a_convolution_is_updated_in_its_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    conv = torch.randn(6, 3, 2, 2, generator=generator)
    module = LoraModule(torch.randn(2, 3, 2, 2, generator=generator), torch.randn(6, 2, 1, 1, generator=generator), 0.5)
    image = torch.randn(1, 3, 4, 4, generator=generator)
    low = torch.nn.functional.conv2d(torch.nn.functional.conv2d(image, module.down), module.up)
    expected = torch.nn.functional.conv2d(image, conv) + 0.5 * low
    assert torch.allclose(torch.nn.functional.conv2d(image, module.applied(conv)), expected, atol=1e-5)
    assert lora_scale(16, 8.0) == 0.5
    assert lora_scale(16, 8.0, use_rslora=True) == 2.0
    assert {module.scale for module in lora_modules(trained(alpha=6.0)).values()} == {1.5}
    assert {module.scale for module in lora_modules(trained(alpha=6.0, use_rslora=True)).values()} == {3.0}
