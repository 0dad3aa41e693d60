"""Merging adds exactly what the LoRA says; extracting finds the best LoRA of a rank and says what is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.export.lora_file import write_lora
from sd3_light.export.lora_merge import denoiser_state, extract, merge
from sd3_light.model.lora_layers import LoraModule, lora_modules
from sd3_light.model.random_weights import new_transformer

State = dict[str, Tensor]
CONFIG = SIZES["tiny2"].transformer_config()
Q, MLP = "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj"
TARGETS = ("attn.to_q", "attn.to_v", "ff.net.0.proj")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def base() -> State:
    return {
        name: tensor + 0.05 * noise(*tensor.shape) for name, tensor in new_transformer(CONFIG, 0).state_dict().items()
    }


def model_of(state: State) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(**CONFIG)
    model.load_state_dict(state)
    return model


def lora(rank: int = 4, seed: int = 0) -> dict[str, LoraModule]:
    """Updates of a square and of a tall weight, each of its full rank."""
    return {
        Q: LoraModule(noise(rank, 128, seed=seed), noise(128, rank, seed=seed + 1), 0.5),
        MLP: LoraModule(noise(rank, 128, seed=seed + 2), noise(512, rank, seed=seed + 3), 0.25),
    }


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["alpha", "rslora", "dora"])
def test_merging_is_pefts(base: State, how: dict[str, bool]) -> None:
    theirs = get_peft_model(model_of(base), LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS), **how))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                parameter += 0.05 * noise(*parameter.shape, seed=5)
    modules = lora_modules(theirs.base_model.model)
    assert len(modules) == 6
    modules = {name: LoraModule(m.down.clone(), m.up.clone(), m.scale, m.magnitude) for name, m in modules.items()}
    found, expected = merge(base, [(modules, 1.0)]), theirs.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    assert max((found[name] - tensor).abs().max().item() for name, tensor in expected.items()) < 1e-6
    assert (found[f"{Q}.weight"] - base[f"{Q}.weight"]).abs().max() > 1e-3


def test_strengths_add_up(base: State) -> None:
    one, two = lora(), lora(rank=2, seed=7)
    found = merge(base, [(one, 0.8), (two, -0.5)])
    weight = base[f"{Q}.weight"].double()
    weight = weight + 0.8 * 0.5 * one[Q].up.double() @ one[Q].down.double()
    weight = weight - 0.5 * 0.5 * two[Q].up.double() @ two[Q].down.double()
    assert (found[f"{Q}.weight"].double() - weight).abs().max() < 1e-5
    untouched = [name for name in base if name not in (f"{Q}.weight", f"{MLP}.weight")]
    assert all(found[name] is base[name] for name in untouched)


def test_merging_reads_weights_and_computes_in_float32(base: State) -> None:
    half = {name: tensor.bfloat16() for name, tensor in base.items()}
    before = half[f"{Q}.weight"].clone()
    small = {Q: LoraModule(noise(2, 128), 1e-4 * noise(128, 2))}
    found = merge(half, [(small, 1.0)])[f"{Q}.weight"]
    assert found.dtype == torch.float32
    assert (found - before.float() - small[Q].delta()).abs().max() < 1e-6, "bfloat16 would have lost it"
    assert torch.equal(half[f"{Q}.weight"], before)


def test_a_folder_is_merged(base: State, tmp_path: Path) -> None:
    model_of(base).save_pretrained(tmp_path / "transformer")
    for folder in (tmp_path, tmp_path / "transformer"):
        found, expected = merge(folder, [(lora(), 1.0)]), merge(base, [(lora(), 1.0)])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "pos_embed.pos_embed" in denoiser_state(DEMO), "buffers included, of several files"
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        merge(tmp_path / "nowhere", [])


def test_a_lora_of_another_model_is_named(base: State) -> None:
    with pytest.raises(UserError, match=r"the LoRA has transformer_blocks\.7\.attn\.to_q, the model has not"):
        merge(base, [({"transformer_blocks.7.attn.to_q": lora()[Q]}, 1.0)])
    with pytest.raises(UserError, match=rf"LoRA's {Q} is for \[512, 128\], the model's weight is \[128, 128\]"):
        merge(base, [({Q: lora()[MLP]}, 1.0)])


# --- extracting ----------------------------------------------------------------------------------


def test_a_difference_of_that_rank_is_extracted_exactly(base: State) -> None:
    tuned = merge(base, [(lora(rank=4), 1.0)])
    found = extract(base, tuned, rank=4)
    assert found.modules.keys() == found.kept.keys() == {Q, MLP}
    assert {module.rank for module in found.modules.values()} == {4}
    assert found.left_out == {}
    assert found.share > 1 - 1e-6
    again = merge(base, [(found.modules, 1.0)])
    largest = max(tensor.abs().max().item() for tensor in tuned.values())
    assert largest > 5, "so a distance of 1e-5 would be a few roundings of float32"
    assert max((again[name] - tensor).abs().max().item() for name, tensor in tuned.items()) < 2e-6 * largest


def test_a_smaller_rank_is_the_best_of_its_rank(base: State) -> None:
    """Eckart and Young: the squared error is the sum of the discarded squared singular values."""
    tuned = merge(base, [(lora(rank=4), 1.0)])
    found = extract(base, tuned, rank=2)
    for layer in (Q, MLP):
        change = (tuned[f"{layer}.weight"] - base[f"{layer}.weight"]).double()
        values = torch.linalg.svdvals(change)
        error = (change - found.modules[layer].delta().double()).square().sum()
        assert error.item() == pytest.approx(values[2:].square().sum().item(), rel=1e-4)
        assert found.kept[layer] == pytest.approx((values[:2].square().sum() / values.square().sum()).item(), rel=1e-5)
        assert 0.3 < found.kept[layer] < 0.99
        assert found.modules[layer].down.norm().item() == pytest.approx(found.modules[layer].up.norm().item(), rel=1e-3)
    assert min(found.kept.values()) < found.share < max(found.kept.values())


def test_a_rank_beyond_the_weights_own_keeps_all(base: State, tmp_path: Path) -> None:
    name = "proj_out.weight"
    tuned = {**base, name: base[name] + noise(64, 128)}
    found = extract(base, tuned, rank=1000)
    assert found.modules["proj_out"].rank == 64
    assert found.share == pytest.approx(1.0)
    assert write_lora(tmp_path / "lora.safetensors", found.modules).is_file()


def test_what_no_lora_can_hold_is_left_out_by_name(base: State) -> None:
    tuned = merge(base, [(lora(), 1.0)])
    for name in ("pos_embed.proj.weight", "proj_out.bias", "transformer_blocks.0.attn.norm_q.weight"):
        tuned[name] = base[name] + noise(*base[name].shape)
    found = extract(base, tuned, rank=4)
    assert found.left_out.keys() == {
        "pos_embed.proj.weight",
        "proj_out.bias",
        "transformer_blocks.0.attn.norm_q.weight",
    }
    assert found.share + sum(found.left_out.values()) == pytest.approx(1.0, abs=1e-5)
    assert found.modules.keys() == {Q, MLP}


def test_targets_choose_and_the_rest_is_named(base: State) -> None:
    tuned = merge(base, [(lora(), 1.0)])
    found = extract(base, tuned, rank=4, targets=("attn.to_q",))
    assert found.modules.keys() == {Q}
    assert found.left_out.keys() == {f"{MLP}.weight"}
    assert found.share < 1 - found.left_out[f"{MLP}.weight"] + 1e-6


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


FAULTS: dict[str, tuple[Callable[[State], State], dict[str, object], str]] = {
    "same": (dict, {}, "nothing to extract"),
    "missing": (without("proj_out.bias"), {}, r"only the base model has proj_out\.bias"),
    "further": (lambda state: {**state, "new.weight": noise(2, 2)}, {}, r"only the tuned model has new\.weight"),
    "shape": (
        lambda state: {**state, "proj_out.weight": noise(4, 4)},
        {},
        r"proj_out\.weight is \[64, 128\] and \[4, 4\]",
    ),
    "rank": (dict, {"rank": 0}, "rank 0"),
    "target": (dict, {"targets": ("attn.to_q", "to_z")}, "target to_z: no linear layer's name ends so"),
    "outside": (
        lambda state: {**state, "proj_out.bias": noise(64)},
        {"targets": ("attn.to_q",)},
        "no weight among the targets differs",
    ),
}


@pytest.mark.parametrize(("spoil", "how", "message"), FAULTS.values(), ids=FAULTS)
def test_models_that_do_not_fit_are_named(
    base: State, spoil: Callable[[State], State], how: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"rank": 2, **how}
    with pytest.raises(UserError, match=message):
        extract(base, spoil(base), **arguments)  # type: ignore[arg-type]
