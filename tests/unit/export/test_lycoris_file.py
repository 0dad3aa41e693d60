"""LoKr and LoHa files: right in ComfyUI on the padded single file, and read back as the model's own layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.export.adapter_folder import adapter_modules, read_adapter
from sd3_light.export.trained_file import write_trained
from sd3_light.families.sd3.single_file import transformer_from_single_file, write_single_file
from sd3_light.tensor_file import read_header
from tests.refusals import refused
from tests.unit.export.denoisers import adapter_state, add_trained_adapter, live_denoiser, output

WIDE = replace(SIZES["tiny2"], num_heads=4, pos_embed_max_size=8)  # 2 blocks, padded to 4 in a single file
TARGETS = ("attn.to_q", "attn.add_v_proj", "ff.net.2", "norm1_context.linear", "norm_out.linear")
KINDS = ("lokr", "loha")


def stock() -> SD3Transformer2DModel:
    return live_denoiser(WIDE.transformer_config())


def config_of(kind: Any) -> AdapterConfig:
    return AdapterConfig(type=kind, rank=4, alpha=6.0, target_modules=TARGETS)


def trained(kind: Any) -> SD3Transformer2DModel:
    return add_trained_adapter(stock(), config_of(kind), 0.15)


@torch.no_grad()
def comfy_applies(transformer: SD3Transformer2DModel, file: dict[str, Tensor]) -> None:
    """Add a file as ComfyUI does: ``lycoris_<layer of the model as loaded>``; every key must be used."""
    unused = dict(file)
    for name, module in transformer.named_modules():
        stem = f"lycoris_{name.replace('.', '_')}"
        factors = {key.removeprefix(f"{stem}."): tensor for key, tensor in file.items() if key.startswith(f"{stem}.")}
        if not factors:
            continue
        for factor in factors:
            del unused[f"{stem}.{factor}"]
        low = next((tensor for factor, tensor in factors.items() if factor.endswith("_b")), None)
        scale = 1.0 if low is None else factors["alpha"].item() / len(low)
        first, second = (matrix(factors, number) for number in (1, 2))
        update = first * second if "hada_w1_a" in factors else torch.kron(first, second)
        weight: Any = module.weight
        weight += scale * update.reshape(weight.shape)
    assert not unused, "keys that ComfyUI does not load"


def matrix(factors: dict[str, Tensor], number: int) -> Tensor:
    kind = next(iter(factor for factor in factors if "_w" in factor))[:4]
    full = factors.get(f"{kind}_w{number}")
    return factors[f"{kind}_w{number}_a"] @ factors[f"{kind}_w{number}_b"] if full is None else full


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The single file of the model, padded to 4 blocks."""
    folder = tmp_path_factory.mktemp("wide")
    stock().save_pretrained(folder / "model" / "transformer")
    return write_single_file(folder / "model", folder / "m.safetensors", vae=False).path


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_file_is_right_in_comfyui_and_reads_back(kind: str, padded: Path, tmp_path: Path) -> None:
    live = trained(kind)
    file = write_trained(tmp_path / "a.safetensors", adapter_state(live), live, config_of(kind))
    config, state = transformer_from_single_file(padded, keep_pads=True)
    assert config["num_layers"] == 4
    loaded = SD3Transformer2DModel(**config).eval()
    loaded.load_state_dict(state)
    assert torch.equal(output(loaded), output(stock()))
    comfy_applies(loaded, load_file(file))
    expected = output(live)
    assert (output(loaded) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (expected - output(stock())).abs().max() > 0.05 * expected.abs().max(), "the adapter has an effect"
    with open(file, "rb") as opened:
        metadata = read_header(opened).metadata
    assert metadata["modelspec.title"] == {"lokr": "LoKr for SD3", "loha": "LoHa for SD3"}[kind]
    assert metadata["ss_base_model_version"] == "sd3"
    back: Any = read_adapter(file, kind)
    expected: Any = adapter_modules(adapter_state(live), config_of(kind))
    assert back.keys() == expected.keys()
    for layer, module in expected.items():
        assert back[layer].shape == tuple(live.get_submodule(layer).base_layer.weight.shape)
        assert torch.allclose(back[layer].delta(), module.delta(), atol=1e-6)
        peft_delta = live.get_submodule(layer).get_delta_weight("default")
        assert torch.allclose(module.delta(), peft_delta, atol=1e-6), "the update of peft"
    # another program's file has no metadata of ours, diffusers' names with underscores, and an alpha beside the rank
    renamed = {key.replace("_blocks_3_", "_blocks_1_"): tensor for key, tensor in load_file(file).items()}
    doubled = {key: 2 * tensor if key.endswith("alpha") else tensor for key, tensor in renamed.items()}
    save_file(doubled, tmp_path / "b.safetensors")
    theirs: Any = read_adapter(tmp_path / "b.safetensors", kind)
    assert theirs.keys() == back.keys()
    for layer, module in back.items():
        factor = 1 if module.rank is None else 2
        assert torch.allclose(theirs[layer].delta(), factor * module.delta(), atol=1e-6)


LAYER = "lycoris_transformer_blocks_0_attn_to_q"
PAIR = {f"{LAYER}.lokr_w1": torch.ones(2, 2), f"{LAYER}.lokr_w2": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{LAYER}.lokr_w1": torch.ones(2, 2)}, "lokr_w1 are not the factors of a LoKr or LoHa"),
        ({**PAIR, f"{LAYER}.lokr_t2": torch.ones(2, 2, 1, 1)}, "lokr_t2.* are not the factors"),
        ({**PAIR, f"{LAYER}.dora_scale": torch.ones(2)}, "dora_scale.* are not the factors"),
        ({**PAIR, f"{LAYER}.lokr_w1": torch.ones(2)}, "the shapes of its factors do not fit together"),
        (
            {f"{LAYER}.hada_w{i}_{part}": torch.ones(2, 3) for i in (1, 2) for part in "ab"},
            "the shapes of its factors do not fit together",
        ),
        ({**PAIR, f"{LAYER}.lokr_w1": torch.full((2, 2), float("nan"))}, "lokr_w1 contains NaN or infinity"),
        ({"lycoris_nothing.lokr_w1": torch.ones(2, 2)}, "lycoris_nothing is not a layer of an SD3 denoiser"),
        ({"lycoris_joint_blocks_0_x_block_attn_qkv.lokr_w1": torch.ones(2, 2)}, "is a layer of a single file, not of"),
    ],
)
def test_unsupported_content_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    refused(message, read_adapter, tmp_path / "a.safetensors", "lokr")
