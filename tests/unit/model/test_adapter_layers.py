"""Adapters of every type: their layers, trained weights, parameters, dropout, and updates when loaded or applied."""

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import LORA_TARGETS
from sd3_light.model import adapter_layers
from sd3_light.model.adapter_layers import AdapterDropout, add_adapter, is_adapter_name, load_lycoris, lycoris_modules
from sd3_light.model.linears import adapter_layer_parameters, match_targets
from sd3_light.model.lora_layers import LoraModule, is_lora_name, load_lora, lora_modules, lora_scale
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = SIZES["tiny2"].transformer_config()
KINDS: list[dict[str, Any]] = [
    *({"type": kind} for kind in ("lora", "lokr", "loha")),
    {"type": "lora", "use_dora": True},
    *({"type": "lokr", "rank": rank} for rank in (32, 65536)),
]
TARGETS = ("attn.to_q", "attn.add_k_proj", "ff.net.0.proj", "norm1.linear")
OPTIONS: dict[str, Any] = {"alpha": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
LORA_KINDS = {kind: {"alpha": 6.0, **options} for kind, options in OPTIONS.items()}
FIRST = "transformer_blocks.0.attn.to_q"
OF_RANK_2 = LoraModule(torch.ones(2, 128), torch.ones(128, 2))


def stock() -> SD3Transformer2DModel:
    return perturbed(TINY).eval()


def adapter(**keys: Any) -> AdapterConfig:
    return AdapterConfig.model_validate({"rank": 4, **keys})


def output(transformer: SD3Transformer2DModel) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 16, 8, 8), (1, 5, 256), (1, 224))
    noisy, text, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    result: Tensor = transformer(noisy, text, pooled, torch.tensor([300.0]), return_dict=False)[0]
    return result


def perturb(transformer: nn.Module, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if is_adapter_name(name):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def state(transformer: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in transformer.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("size", ["tiny2", "demo", "sd3_medium", "sd3.5_medium"])
def test_the_table_of_linear_layers_matches_the_model(size: str) -> None:
    with torch.device("meta"):
        model = SD3Transformer2DModel(**SIZES[size].transformer_config())
    actual = {n: (m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert SIZES[size].linear_layers() == actual


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_a_new_adapter_trains_and_outputs_do_not_change(kind: dict[str, Any]) -> None:
    transformer, config = stock(), adapter(**kind)
    before = output(transformer)
    names = add_adapter(transformer, config, seed=5)
    assert set(names) == set(match_targets(SIZES["tiny2"].linear_layers(), config.target_modules))
    trained = state(transformer)
    assert all(is_adapter_name(name) and weight.dtype == torch.float32 for name, weight in trained.items())
    assert sum(weight.numel() for weight in trained.values()) == sum(adapter_layer_parameters(SIZES["tiny2"], config))
    assert torch.allclose(output(transformer), before, atol=1e-6)
    again = stock()
    add_adapter(again, config, seed=5)
    assert all(torch.equal(weight, trained[name]) for name, weight in state(again).items())
    perturb(transformer)
    assert not torch.allclose(output(transformer), before, atol=1e-3)


def test_targets_casts_and_ranks_of_adapters() -> None:
    transformer = stock()
    names = add_adapter(transformer, adapter(target_modules=["transformer_blocks.1.attn.to_[qk]", "ff.net.*"]), 0)
    assert set(names) == {
        "transformer_blocks.1.attn.to_q",
        "transformer_blocks.1.attn.to_k",
        *(f"transformer_blocks.{block}.ff.net.{part}" for block in (0, 1) for part in ("0.proj", "2")),
    }
    with pytest.raises(UserError, match=r"transformer_blocks\.7\.\*: no linear layer matches"):
        add_adapter(stock(), adapter(target_modules=["attn.to_q", "transformer_blocks.7.*"]), 0)
    with pytest.raises(UserError, match="has a"):
        add_adapter(transformer, adapter(), 0)
    with pytest.raises(UserError, match="already has an adapter"):
        add_adapter(transformer, adapter(type="loha"), 0)
    transformer = stock()
    add_adapter(transformer, adapter(), 0)
    adapter_layers.cast_frozen_linears(transformer, torch.bfloat16)
    linears = [module for module in transformer.modules() if isinstance(module, nn.Linear)]
    weights = {id(weight) for layer in linears for weight in layer.parameters(recurse=False)}
    kinds = {
        (is_adapter_name(name), id(weight) in weights, weight.dtype) for name, weight in transformer.named_parameters()
    }
    expected = {(True, True, torch.float32), (False, True, torch.bfloat16), (False, False, torch.float32)}
    assert kinds == expected
    assert all(buffer.dtype != torch.bfloat16 for buffer in transformer.buffers())
    # diffusion-pipe's `rank = 1e6` asks for this; the message about it names this rank.
    transformer = stock()
    add_adapter(transformer, adapter(type="lokr", rank=65536), 0)
    assert {name.split(".")[-2] for name in state(transformer)} == {"lokr_w1", "lokr_w2"}


def test_a_lora_computes_in_its_dtype() -> None:
    """Autocast to bf16 does not cast a float32 adapter's factors."""
    seen = []
    for dtype in ("bfloat16", "float32"):
        transformer = stock()
        add_adapter(transformer, adapter(dtype=dtype), 0)
        layer: Any = transformer.transformer_blocks[0].attn.to_q
        layer.lora_A["default"].register_forward_hook(lambda module, inputs, result: seen.append(result.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            output(transformer)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_lycoris_weights_load_with_another_scale(kind: str) -> None:
    one, other = stock(), stock()
    add_adapter(one, adapter(type=kind, alpha=6.0), 0)
    add_adapter(other, adapter(type=kind, alpha=2.0), 1)
    perturb(one)
    modules = lycoris_modules(state(one), 4, 6.0)
    load_lycoris(other, modules)
    assert torch.allclose(output(one), output(other), atol=1e-5)
    del modules["transformer_blocks.0.attn.to_q"]
    with pytest.raises(UserError, match=r"transformer_blocks\.0\.attn\.to_q\..* is missing"):
        load_lycoris(other, modules)


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_dropout_is_a_function_of_step_and_micro_batch(kind: str) -> None:
    transformer = stock()
    add_adapter(transformer, adapter(type=kind, dropout=0.5), 0)
    perturb(transformer)
    device = torch.device("cpu")

    def draw(seed: int, rank: int, step: int, count: int) -> list[Tensor]:
        dropout, outputs = AdapterDropout(transformer, seed, rank), []
        dropout.begin(step)
        for _ in range(count):
            dropout.forward(device)
            outputs.append(output(transformer).detach())
        return outputs

    first, second = draw(3, 0, 7, 2)
    assert not torch.equal(first, second), "micro-batches differ"
    assert all(torch.equal(one, two) for one, two in zip(draw(3, 0, 7, 2), (first, second), strict=True))
    assert not torch.equal(draw(3, 0, 8, 1)[0], first)
    assert not torch.equal(draw(3, 1, 7, 1)[0], first)
    with torch.no_grad():
        one, two = draw(3, 0, 7, 2)
    assert torch.equal(one, two), "evaluation has no dropout"


def test_dropout_of_pipeline_layers_does_not_depend_on_their_order() -> None:
    """Layer 1 of micro-batch 0 drops the same before and after layer 0 of micro-batch 1."""
    transformer = stock()
    add_adapter(transformer, adapter(dropout=0.5), 0)
    device = torch.device("cpu")

    def draws(*layers: int) -> list[float]:
        dropout = AdapterDropout(transformer, 3, 0)
        dropout.begin(7)
        numbers = []
        for layer in layers:
            dropout.forward(device, layer)
            numbers.append(torch.rand(1).item())
        return numbers

    a0, a1, b0 = draws(0, 1, 0)
    assert draws(0, 0, 1) == [a0, b0, a1]
    assert len({a0, a1, b0}) == 3


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
    chosen = ("transformer_blocks.0.attn.to_q", "proj_out")
    assert add_lora(stock(), 2, 2.0, chosen) == chosen
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


@pytest.mark.parametrize("options", LORA_KINDS.values(), ids=LORA_KINDS)
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
WITH_MAGNITUDE = LoraModule(MODULES[FIRST].down, MODULES[FIRST].up, 1.0, torch.ones(128))
MISMATCHES = {
    "missing": ({name: module for name, module in MODULES.items() if name != FIRST}, f"{FIRST} is not in the file"),
    "foreign": ({**MODULES, "proj_out": MODULES[FIRST]}, "proj_out has no adapter in the model"),
    "rank": ({**MODULES, FIRST: OF_RANK_2}, f"{FIRST} has rank 2 and 128 -> 128, not 4"),
    "dora": ({**MODULES, FIRST: WITH_MAGNITUDE}, f"{FIRST} is DoRA"),
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
