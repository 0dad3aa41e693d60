"""LoRA files: loaded by stock diffusers or by ComfyUI's rules, they give the trained model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.files import Padding
from sd3_light.export.lora_file import read_lora, write_lora
from sd3_light.export.lora_keys import read_key
from sd3_light.model.adapter_layers import add_adapter
from sd3_light.model.lora_layers import LoraModule, from_peft, load_lora, lora_modules
from sd3_light.tensor_file import METADATA_KEY
from tests.refusals import refused
from tests.unit.export.denoisers import adapter_state, add_trained_adapter, live_denoiser, noise, output

pytestmark = pytest.mark.usefixtures("one_thread")

State = dict[str, Tensor]
RANK, ALPHA = 4, 6.0
LAYERS = 2
CONFIG = {**SIZES["tiny2"].transformer_config(), "dual_attention_layers": (0,)}
ALL_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "linear")
ALL_LAYERS += ("proj_out", "context_embedder", "net.0.proj", "net.2", "linear_1", "linear_2")
KINDS: dict[str, dict[str, Any]] = {"alpha": {}, "rslora": {"use_rslora": True}}
Q, K, V = (f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
KOHYA_QKV = "lora_unet_joint_blocks_0_x_block_attn_qkv"


def stock() -> SD3Transformer2DModel:
    return live_denoiser(CONFIG)


def trained(targets: tuple[str, ...] = ALL_LAYERS, **options: Any) -> SD3Transformer2DModel:
    return add_trained_adapter(stock(), AdapterConfig(rank=RANK, alpha=ALPHA, target_modules=targets, **options))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def live(request: pytest.FixtureRequest) -> SD3Transformer2DModel:
    """A LoRA in memory, with alpha != rank and with rsLoRA. Read only."""
    return trained(**request.param)


@pytest.fixture(scope="module")
def modules() -> dict[str, LoraModule]:
    return lora_modules(trained())


def same(first: Mapping[str, LoraModule], second: Mapping[str, LoraModule]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].down, second[name].down)
        and torch.equal(first[name].up, second[name].up)
        and first[name].scale == second[name].scale
        for name in first
    )


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return dict(opened.metadata() or {})


def stock_with(path: Path) -> SD3Transformer2DModel:
    """Load a file into a stock model with `pipe.load_lora_weights` of stock diffusers."""
    parts = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = StableDiffusion3Pipeline(transformer=stock(), scheduler=scheduler, **dict.fromkeys(parts))
    pipe.load_lora_weights(path)
    transformer: SD3Transformer2DModel = pipe.transformer
    return transformer


def test_the_default_file_works_in_stock_diffusers(live: SD3Transformer2DModel, tmp_path: Path) -> None:
    loaded = stock_with(write_lora(tmp_path / "lora.safetensors", lora_modules(live)))
    layers = [layer for layer in loaded.modules() if isinstance(layer, LoraLayer)]
    assert len(layers) == sum(isinstance(layer, torch.nn.Linear) for layer in stock().modules()), "every linear layer"
    assert {scale for layer in layers for scale in layer.scaling.values()} == {1.0}
    assert (output(loaded) - output(live)).abs().max() < 1e-5
    assert (output(loaded) - output(stock())).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_metadata_for_other_programs(layout: Any, modules: dict[str, LoraModule], tmp_path: Path) -> None:
    facts = {"base": "sd3", "step": 7, "weights": "ema", "adapter": {"type": "lora"}}
    path = write_lora(tmp_path / "lora.safetensors", modules, layout=layout, facts=facts)
    assert read_lora(path).facts == facts
    metadata = metadata_of(path)
    data = path.read_bytes()
    values = data[8 + int.from_bytes(data[:8], "little") :]
    del metadata[METADATA_KEY]
    assert metadata == {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v3.5-medium/lora",  # it has layers of dual attention
        "modelspec.implementation": {"diffusers": "diffusers", "kohya": "sgm"}[layout],
        "modelspec.title": "LoRA for sd3",
        "modelspec.description": "Trained with SD3-Light, weights ema, optimizer steps 7",
        "modelspec.hash_sha256": f"0x{hashlib.sha256(values).hexdigest()}",
        "ss_network_dim": str(RANK),
        "ss_network_alpha": str(RANK),
        "ss_base_model_version": "sd3",
        "ss_output_name": "LoRA for sd3",
        "ss_steps": "7",
        "ss_sd_model_name": "sd3",
    }
    mixed = {Q: LoraModule(noise(2, 128), noise(128, 2)), V: LoraModule(noise(5, 128), noise(128, 5))}
    other = metadata_of(write_lora(tmp_path / "mixed.safetensors", mixed))
    assert (other["modelspec.title"], other["modelspec.description"]) == ("LoRA for SD3", "Written by SD3-Light")
    assert (other["ss_network_dim"], other["modelspec.architecture"]) == ("Dynamic", "stable-diffusion-v3-medium/lora")


def test_dora_is_for_diffusers_only_and_swapped_with_its_rows(tmp_path: Path) -> None:
    live = trained(("attn.to_q", "attn.to_k", "ff.net.2"), use_dora=True)
    for layout in ("diffusers", "kohya"):
        with pytest.raises(UserError, match=rf"{Q} has a DoRA magnitude, which ComfyUI silently ignores"):
            write_lora(tmp_path / "lora.safetensors", lora_modules(live), layout=layout)
    path = write_lora(tmp_path / "lora.safetensors", lora_modules(live), layout="peft")
    assert (output(stock_with(path)) - output(live)).abs().max() < 1e-5
    magnitude = read_lora(path).modules[Q].magnitude
    assert magnitude is not None
    assert torch.equal(magnitude, lora_modules(live)[Q].magnitude)
    up, magnitude = noise(256, RANK), noise(256)
    layer = "diffusion_model.final_layer.adaLN_modulation.1"  # single files have shift before scale there
    tensors = {"lora_A.weight": noise(RANK, 128), "lora_B.weight": up, "lora_magnitude_vector": magnitude}
    save_file({f"{layer}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "single.safetensors")
    module = read_lora(tmp_path / "single.safetensors").modules["norm_out.linear"]
    assert torch.equal(module.up, torch.cat([up[128:], up[:128]]))
    assert module.magnitude is not None
    assert torch.equal(module.magnitude, torch.cat([magnitude[128:], magnitude[:128]]))


def comfy_map(depth: int) -> dict[str, tuple[str, tuple[int, int] | None, bool]]:
    """Return diffusers layer -> (single-file weight, rows (start, count) in it, whether halves are swapped)."""
    table: dict[str, tuple[str, tuple[int, int] | None, bool]] = {
        "context_embedder": ("context_embedder", None, False),
        "pos_embed.proj": ("x_embedder.proj", None, False),
        "norm_out.linear": ("final_layer.adaLN_modulation.1", None, True),
        "proj_out": ("final_layer.linear", None, False),
    }
    for ours, theirs in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")):
        for number, index in ((1, 0), (2, 2)):
            table[f"time_text_embed.{ours}.linear_{number}"] = (f"{theirs}.mlp.{index}", None, False)
    width = 128  # ComfyUI: depth * 64; the padded file of this test has more blocks than heads
    for i in range(depth):
        b, j = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        for index, part in enumerate("qkv"):
            rows = (index * width, width)
            table[f"{b}.attn.to_{part}"] = (f"{j}.x_block.attn.qkv", rows, False)
            table[f"{b}.attn2.to_{part}"] = (f"{j}.x_block.attn2.qkv", rows, False)
            table[f"{b}.attn.add_{part}_proj"] = (f"{j}.context_block.attn.qkv", rows, False)
        for name, to in (
            ("norm1.linear", "x_block.adaLN_modulation.1"),
            ("attn.to_out.0", "x_block.attn.proj"),
            ("attn2.to_out.0", "x_block.attn2.proj"),
            ("attn.to_add_out", "context_block.attn.proj"),
            ("ff.net.0.proj", "x_block.mlp.fc1"),
            ("ff.net.2", "x_block.mlp.fc2"),
            ("ff_context.net.0.proj", "context_block.mlp.fc1"),
            ("ff_context.net.2", "context_block.mlp.fc2"),
        ):
            table[f"{b}.{name}"] = (f"{j}.{to}", None, False)
        table[f"{b}.norm1_context.linear"] = (f"{j}.context_block.adaLN_modulation.1", None, i == depth - 1)
    return table


def swapped(tensor: Tensor) -> Tensor:
    shift, scale = tensor.chunk(2)
    return torch.cat([scale, shift])


def single_file(state: State, depth: int) -> State:
    """Return the weights of linear layers by single-file names."""
    single: dict[str, dict[int, Tensor]] = {}
    for name, (weight_name, rows, swap) in comfy_map(depth).items():
        if f"{name}.weight" in state:
            tensor = state[f"{name}.weight"]
            single.setdefault(weight_name, {})[rows[0] if rows else 0] = swapped(tensor) if swap else tensor
    return {weight_name: torch.cat([parts[start] for start in sorted(parts)]) for weight_name, parts in single.items()}


def comfy_applies(single: State, file: State, depth: int) -> State:
    """Apply a file as ComfyUI does: W + alpha / rank * up @ down, alpha defaults to the rank; all keys are used."""
    targets: dict[str, tuple[str, tuple[int, int] | None, bool]] = {}
    for weight_name in single:
        targets[f"lora_unet_{weight_name.replace('.', '_')}"] = (weight_name, None, False)
        targets[f"diffusion_model.{weight_name}"] = (weight_name, None, False)
    targets |= {f"transformer.{name}": weight_name for name, weight_name in comfy_map(depth).items()}
    patched, unused = {weight_name: weight.clone() for weight_name, weight in single.items()}, dict(file)
    for key, (weight_name, rows, swap) in targets.items():
        for down_name, up_name in (("lora_down", "lora_up"), ("lora_A", "lora_B")):
            if f"{key}.{up_name}.weight" not in file:
                continue
            up, down = unused.pop(f"{key}.{up_name}.weight"), unused.pop(f"{key}.{down_name}.weight")
            alpha = unused.pop(f"{key}.alpha", torch.tensor(float(down.shape[0]))).item()
            change = alpha / down.shape[0] * (up.float() @ down.float())
            start, count = rows or (0, len(patched[weight_name]))
            patched[weight_name][start : start + count] += swapped(change) if swap else change
    assert not unused, "keys that ComfyUI does not load"
    return patched


def merged_state(live: SD3Transformer2DModel) -> State:
    """Merge the LoRA of `live` into the stock model without the code under test."""
    copy = stock()
    for name, module in lora_modules(live).items():
        with torch.no_grad():
            copy.get_submodule(name).weight += module.scale * (module.up @ module.down)
    state: State = copy.state_dict()
    return state


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_both_layouts_work_in_comfyui(live: SD3Transformer2DModel, layout: Any, tmp_path: Path) -> None:
    path = write_lora(tmp_path / "lora.safetensors", lora_modules(live), layout=layout)
    patched = comfy_applies(single_file(stock().state_dict(), LAYERS), load_file(path), LAYERS)
    expected = single_file(merged_state(live), LAYERS)
    assert patched.keys() == expected.keys()
    assert max((patched[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_a_padded_file_gets_a_renumbered_lora(modules: dict[str, LoraModule], layout: Any, tmp_path: Path) -> None:
    padding, last = Padding(LAYERS, 5), f"transformer_blocks.{LAYERS - 1}."
    path = write_lora(tmp_path / "lora.safetensors", modules, layout=layout, padding=padding)
    renumbered = {name.replace(last, "transformer_blocks.4."): tensor for name, tensor in stock().state_dict().items()}
    patched = comfy_applies(single_file(renumbered, 5), load_file(path), 5)
    merged = merged_state(trained())
    expected = single_file({name.replace(last, "transformer_blocks.4."): t for name, t in merged.items()}, 5)
    assert max((patched[name] - expected[name]).abs().max().item() for name in expected) < 1e-5
    plain = write_lora(tmp_path / "plain.safetensors", modules)
    assert same(read_lora(path).modules, read_lora(plain).modules), "our files record their padding"


def test_padding_that_does_not_fit_is_named(tmp_path: Path) -> None:
    lora = {f"transformer_blocks.{i}.attn.to_out.0": LoraModule(noise(2, 128), noise(128, 2)) for i in (0, 1, 2)}
    path = tmp_path / "lora.safetensors"
    with pytest.raises(UserError, match=r"transformer_blocks\.2\.attn\.to_out\.0 is not in a model of 2 blocks"):
        write_lora(path, lora, padding=Padding(2, 5))
    refused("num_blocks 2 is less than the model's 3", write_lora, path, lora, padding=Padding(3, 2))
    write_lora(path, lora)
    message = r"transformer_blocks\.1\.attn\.to_out\.0 updates a block that pads 2 blocks to 3"
    refused(message, read_lora, path, Padding(2, 3))
    del lora["transformer_blocks.1.attn.to_out.0"]
    foreign = write_lora(tmp_path / "foreign.safetensors", lora)
    assert "transformer_blocks.1.attn.to_out.0" in read_lora(foreign, Padding(2, 3)).modules


def test_layouts_convert_bit_for_bit_and_load_into_an_adapter(live: SD3Transformer2DModel, tmp_path: Path) -> None:
    source = lora_modules(live)
    kohya = write_lora(tmp_path / "1.safetensors", source, layout="kohya")
    diffusers = write_lora(tmp_path / "2.safetensors", read_lora(kohya).modules, layout="diffusers")
    kohya_again = write_lora(tmp_path / "3.safetensors", read_lora(diffusers).modules, layout="kohya")
    direct = write_lora(tmp_path / "4.safetensors", source, layout="diffusers")
    assert kohya.read_bytes() == kohya_again.read_bytes()
    assert diffusers.read_bytes() == direct.read_bytes()
    transformer = stock()
    add_adapter(transformer, AdapterConfig(rank=RANK, alpha=1.0, target_modules=ALL_LAYERS), 0)
    load_lora(transformer, read_lora(kohya).modules)
    assert (output(transformer) - output(live)).abs().max() < 1e-5


def test_fusing_concatenates_and_is_block_diagonal_and_is_undone(tmp_path: Path) -> None:
    parts = {}
    for i, name in enumerate((Q, K, V)):
        parts[name] = LoraModule(noise(2, 128, seed=i), noise(128, 2, seed=9 + i), 0.5)
    file = load_file(write_lora(tmp_path / "lora.safetensors", parts, layout="kohya"))
    assert file.keys() == {f"{KOHYA_QKV}.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert torch.equal(file[f"{KOHYA_QKV}.lora_down.weight"], torch.cat([part.down for part in parts.values()]))
    expected = torch.block_diag(*(0.5 * part.up for part in parts.values()))
    assert torch.equal(file[f"{KOHYA_QKV}.lora_up.weight"], expected)
    assert file[f"{KOHYA_QKV}.alpha"].item() == 6.0
    down, up = noise(6, 128), noise(384, 6, seed=1)  # trained on the fused layer
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(3.0)}
    save_file({f"{KOHYA_QKV}.{end}": tensor for end, tensor in tensors.items()}, tmp_path / "kohya.safetensors")
    parts = read_lora(tmp_path / "kohya.safetensors").modules
    assert parts.keys() == {Q, K, V}
    assert torch.equal(torch.cat([parts[name].delta() for name in (Q, K, V)]), 0.5 * (up @ down))


UNEQUAL = {"ranks": {Q: 2, K: 5, V: 3}, "ranks-of-nine": {Q: 1, K: 7, V: 1}}
UNEQUAL |= {"two-of-three": {Q: 3, V: 3}, "one-of-three": {V: 3}}


@pytest.mark.parametrize("ranks", UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_ranks_round_trip_exactly(ranks: dict[str, int], tmp_path: Path) -> None:
    lora = {name: LoraModule(noise(rank, 128), noise(128, rank, seed=1)) for name, rank in ranks.items()}
    path = write_lora(tmp_path / "lora.safetensors", lora, layout="kohya")
    assert same(read_lora(path).modules, lora)
    save_file(load_file(path), tmp_path / "bare.safetensors")
    bare = read_lora(tmp_path / "bare.safetensors").modules
    for name in (Q, K, V):  # without our metadata the factors are larger, the update is the same
        expected = lora[name].delta() if name in lora else torch.zeros(128, 128)
        assert (bare[name].delta() - expected).abs().max() < 1e-5


PAIR = ("lora_A.weight", "lora_B.weight")
OUT = "transformer_blocks.0.attn.to_out.0"
SPELLINGS = {
    "diffusers": ("transformer.transformer_blocks.0.attn.to_out.0", *PAIR),
    "bare": ("transformer_blocks.0.attn.to_out.0", *PAIR),
    "peft": ("base_model.model.transformer_blocks.0.attn.to_out.0", *PAIR),
    "default": ("transformer.transformer_blocks.0.attn.to_out.0", "lora_A.default.weight", "lora_B.default.weight"),
    "peft-diffusers": ("base_model.model.transformer.transformer_blocks.0.attn.to_out.0", *PAIR),
    "kohya": ("lora_unet_joint_blocks_0_x_block_attn_proj", "lora_down.weight", "lora_up.weight"),
    "comfyui": ("diffusion_model.joint_blocks.0.x_block.attn.proj", *PAIR),
    "onetrainer": ("lora_transformer_transformer_blocks_0_attn_to_out_0", "lora_down.weight", "lora_up.weight"),
    "lycoris": ("lycoris_transformer_blocks_0_attn_to_out_0", "lora_down.weight", "lora_up.weight"),
}


def test_a_layer_may_be_named_alpha() -> None:
    assert read_key("transformer.blocks.0.alpha.lora_A.weight") == ("blocks.0.alpha", "down")
    assert read_key("transformer.blocks.0.alpha") == ("blocks.0", "alpha")


@pytest.mark.parametrize("alpha", [None, 3.0], ids=["without-alpha", "alpha"])
@pytest.mark.parametrize(("layer", "down", "up"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_other_programs(layer: str, down: str, up: str, alpha: float | None, tmp_path: Path) -> None:
    tensors = {f"{layer}.{down}": noise(2, 128), f"{layer}.{up}": noise(128, 2, seed=1)}
    if alpha is not None:
        tensors[f"{layer}.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "lora.safetensors")
    lora = read_lora(tmp_path / "lora.safetensors")
    expected = LoraModule(noise(2, 128), noise(128, 2, seed=1), 1.0 if alpha is None else 1.5)
    assert same(lora.modules, {OUT: expected})
    assert lora.facts == {}


def test_the_state_of_a_model_and_files_written_by_diffusers(live: SD3Transformer2DModel, tmp_path: Path) -> None:
    """Their metadata contains alpha; ComfyUI does not read it, we do."""
    rslora = next(iter(lora_modules(live).values())).scale == ALPHA / RANK**0.5
    assert same(from_peft(adapter_state(live), ALPHA, rslora), lora_modules(live))
    state = get_peft_model_state_dict(live)
    about = {"transformer_lora_adapter_metadata": live.peft_config["default"].to_dict()}
    StableDiffusion3Pipeline.save_lora_weights(tmp_path / "with", state, **about)
    assert same(read_lora(tmp_path / "with").modules, lora_modules(live))
    StableDiffusion3Pipeline.save_lora_weights(tmp_path / "without", state)
    assert {module.scale for module in read_lora(tmp_path / "without").modules.values()} == {1.0}


def test_a_folder_written_by_peft(tmp_path: Path) -> None:
    save_file({f"base_model.model.{Q}.{end}": noise(4, 4) for end in PAIR}, tmp_path / "adapter_model.safetensors")
    config = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {f"^{K}": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_lora(tmp_path).modules[Q].scale == 4.0
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"attn.to_q": 2}}))
    assert read_lora(tmp_path / "adapter_model.safetensors").modules[Q].scale == 1.0
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {r".*to_q": 2}}))
    refused(r"alpha_pattern has the expression \.\*to_q", read_lora, tmp_path)


VALID = {f"transformer.{OUT}.{end}": noise(2, 2) for end in PAIR}
INVALID: dict[str, tuple[dict[str, Tensor], str]] = {
    "unknown-layer": ({**VALID, "transformer.attn.lora_A.weight": noise(2, 2)}, r"denoiser: transformer\.attn\.lora_A"),
    "another-model": (
        {"transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight": noise(2, 2)},
        r"not layers of an SD3 denoiser: transformer\.single_transformer_blocks",
    ),
    "unknown-key": ({**VALID, f"transformer.{OUT}.bias": noise(2)}, r"to_out\.0\.bias is not a key of a LoRA"),
    "no-up": ({f"transformer.{OUT}.lora_A.weight": noise(2, 2)}, r"to_out\.0 has no lora_B"),
    "no-down": ({f"transformer.{OUT}.lora_B.weight": noise(2, 2)}, r"to_out\.0 has no lora_A"),
    "alpha-alone": ({**VALID, f"transformer.{Q}.alpha": noise(1)}, r"to_q has no lora_A"),
    "twice": ({**VALID, f"{OUT}.lora_down.weight": noise(2, 2)}, r"to_out\.0\.lora.* repeats another key"),
    "two-names": (
        {**VALID, **{f"lora_unet_joint_blocks_0_x_block_attn_proj.{end}": noise(2, 2) for end in PAIR}},
        r"to_out\.0 has two LoRAs, one of them under the name",
    ),
    "ranks": (
        {f"{OUT}.lora_A.weight": noise(2, 4), f"{OUT}.lora_B.weight": noise(4, 3)},
        r"to_out\.0: \[2, 4\] and \[4, 3\] are not a pair",
    ),
    "no-thirds": (
        {f"{KOHYA_QKV}.lora_down.weight": noise(3, 4), f"{KOHYA_QKV}.lora_up.weight": noise(8, 3)},
        r"x_block\.attn\.qkv: \[8, 3\] is not an update of three layers",
    ),
    "lokr": ({f"transformer.{Q}.lokr_w1": noise(2, 2)}, r"to_q\.lokr_w1 is a LoKr"),
    "loha": ({f"lora_unet_{KOHYA_QKV}.hada_w1_a": noise(2, 2)}, r"hada_w1_a is a LoHa"),
    "dora-scale": ({**VALID, f"transformer.{OUT}.dora_scale": noise(2)}, r"dora_scale is LyCORIS' DoRA"),
    "text-encoder": ({"lora_te1_text_model.lora_up.weight": noise(2, 2)}, r"lora_te1_\S+ belongs to a text encoder"),
    "empty": ({}, "it is empty"),
}


@pytest.mark.parametrize(("tensors", "message"), INVALID.values(), ids=INVALID)
def test_unsupported_content_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "lora.safetensors")
    refused(rf"lora\.safetensors: .*{message}", read_lora, tmp_path / "lora.safetensors")


@pytest.mark.parametrize("key", [METADATA_KEY, "lora_adapter_metadata"])
@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_metadata_that_is_not_json_is_named(key: str, text: str, message: str, tmp_path: Path) -> None:
    save_file(VALID, tmp_path / "lora.safetensors", {key: text})
    refused(rf"{key} {message}", read_lora, tmp_path / "lora.safetensors")


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    torch.save(VALID, tmp_path / "lora.pt")
    for name, message in (("lora.pt", "cannot be read as safetensors"), ("no", "cannot be read"), ("", "contains no")):
        refused(message, read_lora, tmp_path / name)


PLAIN = LoraModule(noise(2, 128), noise(128, 2))
UNWRITABLE: dict[str, tuple[dict[str, LoraModule], str]] = {
    "empty": ({}, "no LoRA to write"),
    "unknown": ({"transformer_blocks.0.attn.norm_q": PLAIN}, r"attn\.norm_q is not a layer of an SD3 denoiser"),
    "meta": ({Q: LoraModule(PLAIN.down, PLAIN.up.to("meta"))}, rf"{Q}: its LoRA holds no data"),
    "rank-0": ({Q: LoraModule(noise(0, 128), noise(128, 0))}, rf"{Q}: \[0, 128\] and \[128, 0\] are not a pair"),
    "ranks": ({Q: LoraModule(PLAIN.down, noise(128, 3))}, rf"{Q}: .* are not a pair"),
    "nan": ({Q: LoraModule(PLAIN.down, PLAIN.up * float("nan"))}, "has values that are not finite"),
    "too-large": ({Q: LoraModule(PLAIN.down, PLAIN.up * 1e6)}, r"has values that torch\.float16 cannot hold"),
    "widths": ({Q: PLAIN, K: LoraModule(noise(2, 64), noise(64, 2))}, r"qkv: its q, k and v have different widths"),
}


@pytest.mark.parametrize(("lora", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_unwritable_loras_are_named(lora: dict[str, LoraModule], message: str, tmp_path: Path) -> None:
    refused(message, write_lora, tmp_path / "lora.safetensors", lora, layout="kohya", save_dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_text("precious")
    refused(r"lora\.safetensors already exists", write_lora, path, {Q: PLAIN})
    assert path.read_text() == "precious"

    def disk_full(file: Path, *_: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sd3_light.export.lora_file.write_tensor_file", disk_full)
    refused(r"cannot write .*other\.safetensors: No space", write_lora, tmp_path / "other.safetensors", {Q: PLAIN})
    assert [file.name for file in tmp_path.iterdir()] == ["lora.safetensors"]


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_the_same_lora_gives_the_same_bytes(modules: dict[str, LoraModule], layout: Any, tmp_path: Path) -> None:
    facts = {"steps": 7, "data": "images"}
    reordered = dict(reversed(modules.items()))
    first = write_lora(tmp_path / "1.safetensors", modules, layout=layout, facts=facts)
    second = write_lora(tmp_path / "2.safetensors", reordered, layout=layout, facts=dict(reversed(facts.items())))
    assert first.read_bytes() == second.read_bytes()


def test_the_scale_is_multiplied_in_before_the_cast(tmp_path: Path) -> None:
    module = LoraModule(PLAIN.down, PLAIN.up, 0.3)
    before = module.up.clone()
    saved = load_file(write_lora(tmp_path / "lora.safetensors", {Q: module}, save_dtype=torch.bfloat16))
    assert torch.equal(saved[f"transformer.{Q}.lora_B.weight"], (module.up * 0.3).bfloat16())
    assert torch.equal(saved[f"transformer.{Q}.lora_A.weight"], module.down.bfloat16())
    assert torch.equal(module.up, before)
    kohya = load_file(write_lora(tmp_path / "k.safetensors", {Q: module}, layout="kohya", save_dtype=torch.bfloat16))
    assert kohya[f"{KOHYA_QKV}.alpha"].dtype == torch.float32
