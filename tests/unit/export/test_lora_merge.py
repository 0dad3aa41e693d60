"""Merging adds exactly the LoRA's update; extraction finds the best LoRA of a rank and reports what is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.export.lora_merge import denoiser_state, extract_lora, merge_loras, merged_on_demand
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.lora_layers import LoraModule, lora_modules
from tests.refusals import refused
from tests.unit.export.denoisers import having, noise, without

pytestmark = pytest.mark.usefixtures("one_thread")

State = dict[str, Tensor]
CONFIG = SIZES["tiny2"].transformer_config()
Q, MLP = "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj"
TARGETS = ("attn.to_q", "attn.to_v", "ff.net.0.proj")


@pytest.fixture
def base() -> State:
    state = new_transformer(CONFIG, 0).state_dict()
    return {name: tensor + 0.05 * noise(*tensor.shape) for name, tensor in state.items()}


def model_of(state: State) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(**CONFIG)
    model.load_state_dict(state)
    return model


def lora(rank: int = 4, seed: int = 0) -> dict[str, LoraModule]:
    """Updates of a square and a tall weight."""
    return {
        Q: LoraModule(noise(rank, 128, seed=seed), noise(128, rank, seed=seed + 1), 0.5),
        MLP: LoraModule(noise(rank, 128, seed=seed + 2), noise(512, rank, seed=seed + 3), 0.25),
    }


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["alpha", "rslora", "dora"])
def test_merging_equals_pefts(base: State, options: dict[str, bool]) -> None:
    peft_model = get_peft_model(model_of(base), LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS), **options))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter += 0.05 * noise(*parameter.shape, seed=5)
    modules = lora_modules(peft_model.base_model.model)
    assert len(modules) == 6
    modules = {name: LoraModule(m.down.clone(), m.up.clone(), m.scale, m.magnitude) for name, m in modules.items()}
    merged, expected = merge_loras(base, [(modules, 1.0)]), peft_model.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert max((merged[name] - tensor).abs().max().item() for name, tensor in expected.items()) < 1e-6
    assert (merged[f"{Q}.weight"] - base[f"{Q}.weight"]).abs().max() > 1e-3


def test_strengths_add_up_in_float32(base: State) -> None:
    half = {name: tensor.bfloat16() for name, tensor in base.items()}
    first = {**lora(), Q: LoraModule(noise(2, 128), 1e-4 * noise(128, 2), 0.5)}  # bfloat16 would lose it
    second = lora(rank=2, seed=7)
    merged = merge_loras(half, [(first, 0.8), (second, -0.5)])
    for layer in (Q, MLP):
        weight = half[f"{layer}.weight"].double()
        for modules, strength in ((first, 0.8), (second, -0.5)):
            lora_module = modules[layer]
            weight += strength * lora_module.scale * lora_module.up.double() @ lora_module.down.double()
        assert merged[f"{layer}.weight"].dtype == torch.float32
        assert (merged[f"{layer}.weight"].double() - weight).abs().max() < 1e-5
    untouched = [name for name in base if name not in (f"{Q}.weight", f"{MLP}.weight")]
    assert all(merged[name] is half[name] for name in untouched)


def test_a_folder_is_merged(base: State, tmp_path: Path) -> None:
    model_of(base).save_pretrained(tmp_path / "transformer")
    for folder in (tmp_path, tmp_path / "transformer"):
        merged, expected = merged_on_demand(folder, [(lora(), 1.0)]), merge_loras(base, [(lora(), 1.0)])
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    assert "pos_embed.pos_embed" in denoiser_state(DEMO), "buffers included, from several files"
    refused(r"config\.json cannot be read", denoiser_state, tmp_path / "nowhere")


def test_a_lora_of_another_model_is_named(base: State) -> None:
    with pytest.raises(UserError, match=r"the LoRA has transformer_blocks\.7\.attn\.to_q, which the model lacks"):
        merge_loras(base, [({"transformer_blocks.7.attn.to_q": lora()[Q]}, 1.0)])
    with pytest.raises(UserError, match=rf"LoRA's {Q} has shape \[512, 128\], the model's weight \[128, 128\]"):
        merge_loras(base, [({Q: lora()[MLP]}, 1.0)])


def test_a_difference_is_extracted_exactly_or_as_the_best_of_a_smaller_rank(base: State) -> None:
    """Eckart-Young: the squared error is the sum of the discarded squared singular values."""
    tuned = merge_loras(base, [(lora(rank=4), 1.0)])
    extraction = extract_lora(base, tuned, rank=4)
    assert extraction.modules.keys() == extraction.kept.keys() == {Q, MLP}
    assert {module.rank for module in extraction.modules.values()} == {4}
    assert extraction.left_out == {}
    assert extraction.share > 1 - 1e-6
    remerged = merge_loras(base, [(extraction.modules, 1.0)])
    largest = max(tensor.abs().max().item() for tensor in tuned.values())
    assert largest > 5, "so a difference of 1e-5 is a few float32 roundings"
    assert max((remerged[name] - tensor).abs().max().item() for name, tensor in tuned.items()) < 2e-6 * largest
    extraction = extract_lora(base, tuned, rank=2)
    for layer in (Q, MLP):
        change = (tuned[f"{layer}.weight"] - base[f"{layer}.weight"]).double()
        values = torch.linalg.svdvals(change)
        error = (change - extraction.modules[layer].delta().double()).square().sum()
        assert error.item() == pytest.approx(values[2:].square().sum().item(), rel=1e-4)
        share = values[:2].square().sum() / values.square().sum()
        assert extraction.kept[layer] == pytest.approx(share.item(), rel=1e-5)
        assert 0.3 < extraction.kept[layer] < 0.99
        norms = [factor.norm().item() for factor in (extraction.modules[layer].down, extraction.modules[layer].up)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert min(extraction.kept.values()) < extraction.share < max(extraction.kept.values())


def test_weights_without_a_lora_are_listed(base: State) -> None:
    tuned = merge_loras(base, [(lora(), 1.0)])
    others = {"pos_embed.proj.weight", "proj_out.bias", "transformer_blocks.0.attn.norm_q.weight"}
    tuned |= {name: base[name] + noise(*base[name].shape) for name in others}
    extraction = extract_lora(base, tuned, rank=4)
    assert extraction.left_out.keys() == others
    assert extraction.share + sum(extraction.left_out.values()) == pytest.approx(1.0, abs=1e-5)
    assert extraction.modules.keys() == {Q, MLP}
    added = "transformer_blocks.0.attn.add_q_proj"
    tuned = merge_loras(base, [({MLP: lora()[MLP], added: lora()[Q]}, 1.0)])
    extraction = extract_lora(base, tuned, rank=4, targets=("proj",))  # a whole part of a name
    assert extraction.modules.keys() == {MLP}
    assert extraction.left_out.keys() == {f"{added}.weight"}


FAULTS: dict[str, tuple[Callable[[State], State], dict[str, object], str]] = {
    "same": (dict, {}, "nothing to extract"),
    "missing": (without("proj_out.bias"), {}, r"only the base model has proj_out\.bias"),
    "further": (having("new.weight", noise(2, 2)), {}, r"only the tuned model has new\.weight"),
    "shape": (having("proj_out.weight", noise(4, 4)), {}, r"proj_out\.weight has shapes \[64, 128\] and \[4, 4\]"),
    "rank": (dict, {"rank": 0}, "rank 0"),
    "target": (dict, {"targets": ("attn.to_q", "to_z")}, "target to_z: no linear layer's name ends in it"),
    "outside": (having("proj_out.bias", noise(64)), {"targets": ("attn.to_q",)}, "no weight among the targets differs"),
}


@pytest.mark.parametrize(("change", "options", "message"), FAULTS.values(), ids=FAULTS)
def test_models_that_do_not_match_are_named(base: State, change: Any, options: dict[str, object], message: str) -> None:
    refused(message, extract_lora, base, change(base), **{"rank": 2, **options})
