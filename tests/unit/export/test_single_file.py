"""A single file is the folder in another layout: every tensor once, back bit for bit, and stock diffusers reads it."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from sd3_light.config import SIZES, ModelSize, UserError
from sd3_light.export import single_file
from sd3_light.export.proof import ProofError
from sd3_light.export.single_file import read_single_file, transformer_from_single_file, write_single_file
from sd3_light.export.single_names import deduced_config, denoiser_rules, fused, vae_name
from sd3_light.export.single_parts import promised_shapes
from sd3_light.tensor_file import zeros

TINY = replace(SIZES["tiny2"], pos_embed_max_size=8)
SHAPES = {
    "square": TINY,
    "three": replace(TINY, num_layers=3, num_heads=3, qk_norm=False),
    "dual": replace(TINY, num_layers=3, num_heads=3, dual_attention_layers=(0, 1)),
    "wide": replace(TINY, num_heads=4, dual_attention_layers=(0,)),
    "wide, dual to the last": replace(TINY, num_heads=3, dual_attention_layers=(0, 1)),
    "wide without qk-norm": replace(TINY, num_heads=3, qk_norm=False),
    "one block": replace(TINY, num_layers=1, num_heads=2),
    "deep": replace(TINY, num_layers=3, num_heads=2),
}
PADS = {"wide": 2, "wide, dual to the last": 1, "wide without qk-norm": 1, "one block": 1}
FACTS = {
    "sd3_light": "0",
    "text": {"text_tokens": "padded", "uncond_text": "empty", "t5_max_length": 16},
    "step": 7,
}
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")
PREFIX = "model.diffusion_model."
PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> FolderOf:
    """A complete folder of each shape: random weights in float16 beside the demo's frozen parts. Read only."""
    place, made = tmp_path_factory.mktemp("folders"), dict[str, Path]()

    def of(shape: str) -> Path:
        if shape not in made:
            made[shape] = write_stock(place / shape.replace(" ", "_"), demo_parts, SHAPES[shape])
        return made[shape]

    return of


def write_stock(folder: Path, parts: Path, size: ModelSize, dtype: torch.dtype = torch.float16, **keys: Any) -> Path:
    shutil.copytree(parts, folder, copy_function=os.link)
    torch.manual_seed(3)
    transformer = SD3Transformer2DModel(**size.transformer_config())
    with torch.no_grad():
        for tensor in transformer.state_dict().values():
            tensor += 0.05 * torch.randn(tensor.shape)
    transformer.to(dtype).save_pretrained(folder / "transformer", **keys)
    (folder / "sd3_light.json").write_text(json.dumps(FACTS))
    return folder


def single(folder: Path, out: Path, **keys: bool) -> dict[str, Tensor]:
    """The tensors of the written file, as the library reads them."""
    return load_file(write_single_file(folder, out, **keys).path)


@torch.no_grad()
def output(transformer: SD3Transformer2DModel) -> Tensor:
    config, generator = transformer.config, torch.Generator().manual_seed(1)
    result: Tensor = transformer.float()(
        hidden_states=torch.randn(2, 16, 8, 8, generator=generator),
        timestep=torch.tensor([10.0, 800.0]),
        encoder_hidden_states=torch.randn(2, 5, config.joint_attention_dim, generator=generator),
        pooled_projections=torch.randn(2, config.pooled_projection_dim, generator=generator),
        return_dict=False,
    )[0]
    return result


def stock(folder: Path) -> SD3Transformer2DModel:
    return SD3Transformer2DModel.from_pretrained(folder / "transformer", local_files_only=True)


# --- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pad_blocks", [True, False], ids=["padded", "unpadded"])
def test_there_and_back_is_bit_for_bit(
    tmp_path: Path, folder_of: FolderOf, demo_parts: Path, shape: str, pad_blocks: bool
) -> None:
    folder = folder_of(shape)
    file = write_single_file(folder, tmp_path / "m.safetensors", text_encoders=True, pad_blocks=pad_blocks).path
    back = read_single_file(file, demo_parts, tmp_path / "back")
    assert back.notes == ()
    for part in PARTS:
        (weights,) = (folder / part).glob("*.safetensors")
        assert (back.path / part / weights.name).read_bytes() == weights.read_bytes(), part
        assert (back.path / part / "config.json").read_bytes() == (folder / part / "config.json").read_bytes()
    assert json.loads((back.path / "sd3_light.json").read_text()) == FACTS
    scheduler = Path("scheduler", "scheduler_config.json")
    assert json.loads((back.path / scheduler).read_text()) == json.loads((folder / scheduler).read_text())
    StableDiffusion3Pipeline.from_pretrained(back.path, local_files_only=True)


def test_a_folder_in_several_files_and_types_comes_back(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY, torch.bfloat16, max_shard_size="1MB")
    files = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    first = load_file(files[0])
    first["pos_embed.pos_embed"] = first["pos_embed.pos_embed"].float()  # another type than its neighbours
    save_file(first, files[0], {"format": "pt"})
    before = {name: tensor for file in files for name, tensor in load_file(file).items()}
    file = write_single_file(folder, tmp_path / "m.safetensors").path
    after = load_file(read_single_file(file, None, tmp_path / "back").path / WEIGHTS)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == tensor.dtype and after[name].equal(tensor) for name, tensor in before.items())


def test_what_the_file_lacks_is_the_bases(tmp_path: Path, folder_of: FolderOf, demo_parts: Path) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    assert all(name.startswith(PREFIX) for name in load_file(file))
    back = read_single_file(file, demo_parts, tmp_path / "back").path
    assert (back / "vae" / "config.json").samefile(demo_parts / "vae" / "config.json"), "linked, not repeated"
    assert {path.name for path in demo_parts.iterdir() if path.is_dir()} < {path.name for path in back.iterdir()}


def test_without_a_base_the_parts_of_the_file_are_written(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors").path
    back = read_single_file(file, None, tmp_path / "back")
    assert {path.name for path in back.path.iterdir()} == {"transformer", "vae", "scheduler", "sd3_light.json"}
    assert back.notes == (
        "without a base folder there are no tokenizers: this is a denoiser to start from, no pipeline",
    )


# --- the layout --------------------------------------------------------------------------------


def test_rows_are_fused_and_halves_swapped(tmp_path: Path, folder_of: FolderOf) -> None:
    folder = folder_of("dual")
    weights, found = load_file(folder / WEIGHTS), single(folder, tmp_path / "m.safetensors", vae=False)
    block, last = "transformer_blocks.1", "transformer_blocks.2"
    there, end = f"{PREFIX}joint_blocks.1", f"{PREFIX}joint_blocks.2"
    for kind in ("weight", "bias"):
        for name, parts in {
            "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "x_block.adaLN_modulation.1": ("norm1.linear",),
            "context_block.adaLN_modulation.1": ("norm1_context.linear",),
            "context_block.attn.proj": ("attn.to_add_out",),
            "x_block.mlp.fc2": ("ff.net.2",),
        }.items():
            joined = torch.cat([weights[f"{block}.{part}.{kind}"] for part in parts])
            assert found[f"{there}.{name}.{kind}"].equal(joined), name
        for name, part in {
            f"{PREFIX}final_layer.adaLN_modulation.1": "norm_out.linear",
            f"{end}.context_block.adaLN_modulation.1": f"{last}.norm1_context.linear",
        }.items():
            scale, shift = weights[f"{part}.{kind}"].chunk(2)
            assert found[f"{name}.{kind}"].equal(torch.cat([shift, scale])), name
    assert found[f"{PREFIX}pos_embed"].equal(weights["pos_embed.pos_embed"])
    assert found[f"{there}.x_block.attn2.ln_k.weight"].equal(weights[f"{block}.attn2.norm_k.weight"])
    assert found[f"{there}.context_block.attn.ln_q.weight"].equal(weights[f"{block}.attn.norm_added_q.weight"])
    assert not any(f"{end}.context_block.{part}" in name for name in found for part in ("mlp", "attn.proj"))


@pytest.mark.parametrize("shape", [*SHAPES, *SIZES])
def test_every_tensor_is_covered_exactly_once(shape: str) -> None:
    config = (SHAPES | SIZES)[shape].transformer_config()
    rules = list(denoiser_rules(config))
    stock_names = [name for rule in rules for name in rule.stock]
    assert sorted(stock_names) == sorted(promised_shapes("transformer", config)), "all of them, none twice"
    assert len({rule.single for rule in rules}) == len(rules)


@pytest.mark.parametrize("shape", ["three", "dual", "wide"])
def test_no_number_of_the_folder_is_lost_or_repeated(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    folder = folder_of(shape)
    found = single(folder, tmp_path / "m.safetensors", text_encoders=True, pad_blocks=False)
    before = [load_file(path) for part in PARTS for path in (folder / part).glob("*.safetensors")]
    assert sum(tensor.numel() for tensor in found.values()) == sum(t.numel() for part in before for t in part.values())


def test_the_file_is_the_librarys_and_equal_models_are_equal_bytes(tmp_path: Path, folder_of: FolderOf) -> None:
    folder = folder_of("wide")
    one, two = (write_single_file(folder, tmp_path / name).path for name in ("1.safetensors", "2.safetensors"))
    data = one.read_bytes()
    assert data == two.read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert data == save(load_file(one), metadata)
    about = json.loads(metadata.pop("sd3_light"))
    assert not metadata, "one entry: the library writes several in an order of chance"
    assert list(about) == sorted(about)
    assert about["config"] == json.loads((folder / "transformer" / "config.json").read_text())
    assert (about["true_blocks"], about["blocks_in_file"]) == (2, 4)
    assert about["facts"] == FACTS
    assert about["other_configs"]["vae"]["latent_channels"] == 16


# --- as others read it -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["square", "three", "dual", "wide", "one block", "deep"])
def test_stock_diffusers_reads_the_unpadded_file(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    folder = folder_of(shape)
    file = write_single_file(folder, tmp_path / "m.safetensors", pad_blocks=False).path
    loaded = SD3Transformer2DModel.from_single_file(
        str(file), config=str(folder), subfolder="transformer", local_files_only=True
    )
    weights = load_file(folder / WEIGHTS)
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert all(state[name].equal(tensor) for name, tensor in weights.items())
    assert output(loaded).equal(output(stock(folder)))


def test_stock_diffusers_reads_the_whole_pipeline(tmp_path: Path, folder_of: FolderOf) -> None:
    folder = folder_of("square")
    file = write_single_file(folder, tmp_path / "m.safetensors", text_encoders=True).path
    pipe = StableDiffusion3Pipeline.from_single_file(str(file), config=str(folder), local_files_only=True)
    for part in PARTS:
        (path,) = (folder / part).glob("*.safetensors")
        state = getattr(pipe, part).state_dict()
        for name, tensor in load_file(path).items():
            if (part, name) != ("text_encoder", "text_projection.weight"):  # diffusers takes the identity there
                assert state[name].to(tensor.dtype).equal(tensor), (part, name)


@pytest.mark.parametrize("levels", [2, 4])
def test_the_vae_is_named_as_diffusers_converter_expects(levels: int) -> None:
    """At another depth too, with quant convolutions, and with the attention's matrices as convolutions."""
    config = {
        "block_out_channels": [32] * levels,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": 2,
    }
    state = AutoencoderKL(**config).state_dict()
    named = {f"first_stage_model.{vae_name(name, levels)}": tensor for name, tensor in state.items()}
    assert len(named) == len(state)
    converted = convert_ldm_vae_checkpoint(named, config)
    assert converted.keys() == state.keys()
    assert all(converted[name] is tensor or converted[name].equal(tensor) for name, tensor in state.items())


def test_the_vaes_attention_is_a_convolution_there(tmp_path: Path, folder_of: FolderOf) -> None:
    folder = folder_of("square")
    found = single(folder, tmp_path / "m.safetensors")
    assert found["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (128, 128, 1, 1)
    assert found["first_stage_model.decoder.mid.attn_1.proj_out.weight"].shape == (128, 128, 1, 1)
    assert found["first_stage_model.decoder.mid.attn_1.norm.weight"].shape == (128,)
    config = json.loads((folder / "vae" / "config.json").read_text())
    before = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    converted = convert_ldm_vae_checkpoint(found, config)
    assert converted.keys() == before.keys()
    assert all(converted[name].equal(tensor) for name, tensor in before.items())


# --- blocks that do nothing --------------------------------------------------------------------


@pytest.mark.parametrize("shape", PADS)
def test_identity_blocks_change_nothing(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    folder, size = folder_of(shape), SHAPES[shape]
    written = write_single_file(folder, tmp_path / "m.safetensors")
    assert written.notes[0].startswith(f"{PADS[shape]} identity blocks stand before the last of {size.num_layers}: ")
    config, state = transformer_from_single_file(written.path, keep_pads=True)
    assert config["num_layers"] == size.num_heads == size.num_layers + PADS[shape]
    padded = SD3Transformer2DModel(**config)
    padded.load_state_dict(state, strict=True)
    assert output(padded).equal(output(stock(folder)))
    for block in range(size.num_layers - 1, size.num_heads - 1):
        pad = [tensor for name, tensor in state.items() if name.startswith(f"transformer_blocks.{block}.")]
        assert len(pad) >= 24
        assert not any(tensor.any() for tensor in pad)


@pytest.mark.parametrize("shape", ["square", "three", "dual", "deep"])
def test_as_many_blocks_as_heads_or_more_are_not_padded(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    one = write_single_file(folder_of(shape), tmp_path / "1.safetensors").path
    two = write_single_file(folder_of(shape), tmp_path / "2.safetensors", pad_blocks=False).path
    assert one.read_bytes() == two.read_bytes()


def test_padding_that_has_learned_is_not_thrown_away(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("wide"), tmp_path / "m.safetensors", vae=False).path

    def train(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}joint_blocks.2.x_block.mlp.fc1.bias"][5] = 1e-3

    respell(file, train)
    with pytest.raises(UserError, match=r"calls block 2 padding, but its weights are not zero"):
        transformer_from_single_file(file)
    config, state = transformer_from_single_file(file, keep_pads=True)
    assert (config["num_layers"], config["dual_attention_layers"]) == (4, [0])
    assert state["transformer_blocks.2.ff.net.0.proj.bias"][5] != 0


# --- files of others ---------------------------------------------------------------------------


def respell(file: Path, change: Callable[[dict[str, Tensor]], object], foreign: bool = False) -> None:
    """Rewrite a file with other tensors, as another program would; ``foreign``: without our metadata."""
    data = file.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"made_by": "another"} if foreign else metadata)


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(PREFIX)] = tensors.pop(name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [lambda tensors: None, without_prefix], ids=["prefixed", "bare"])
def test_a_denoiser_of_another_program_is_read(
    tmp_path: Path, folder_of: FolderOf, shape: str, change: Callable[[dict[str, Tensor]], object]
) -> None:
    folder = folder_of(shape)
    file = write_single_file(folder, tmp_path / "m.safetensors", vae=False, pad_blocks=False).path
    respell(file, change, foreign=True)
    config, state = transformer_from_single_file(file)
    expected = {**SHAPES[shape].transformer_config(), "sample_size": 128}
    assert {**config, "dual_attention_layers": tuple(config["dual_attention_layers"])} == expected
    before = load_file(folder / WEIGHTS)
    assert state.keys() == before.keys()
    assert all(state[name].dtype == tensor.dtype and state[name].equal(tensor) for name, tensor in before.items())
    SD3Transformer2DModel(**config).load_state_dict(state, strict=True)


@pytest.mark.parametrize("size", ["sd3_medium", "sd3.5_medium", "sd3_light_square"])
def test_the_config_of_real_sizes_is_told_by_their_tensors(size: str) -> None:
    config = SIZES[size].transformer_config()
    shapes = promised_shapes("transformer", config)
    found = fused({name: zeros("F16", shape) for name, shape in shapes.items()}, config)
    deduced = deduced_config(found, "file")
    assert {**deduced, "dual_attention_layers": tuple(deduced["dual_attention_layers"]), "sample_size": None} == {
        **config,
        "sample_size": None,
    }


def test_blocks_of_zeros_stay_where_no_metadata_calls_them_padding(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("wide"), tmp_path / "m.safetensors", vae=False).path
    respell(file, lambda tensors: None, foreign=True)
    config, state = transformer_from_single_file(file)
    assert config["num_layers"] == 4
    model = SD3Transformer2DModel(**config)
    model.load_state_dict(state)
    assert output(model).equal(output(stock(folder_of("wide"))))


def test_frozen_parts_of_another_program_take_the_bases_config(
    tmp_path: Path, folder_of: FolderOf, demo_parts: Path
) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", text_encoders=True).path

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
        tensors["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
        shared = "text_encoders.t5xxl.transformer.shared.weight"
        tensors[shared] = tensors[shared].to(torch.float8_e4m3fn)
        name = "first_stage_model.encoder.mid.attn_1.q.weight"
        tensors[name] = tensors[name][:, :, 0, 0].contiguous()

    respell(file, change, foreign=True)
    back = read_single_file(file, demo_parts, tmp_path / "back")
    assert back.notes == (
        "CLIP-L's text_projection is not in the file: it is the identity, as readers take it",
        "left out, as no part of SD3: 1 tensors such as text_encoders.clip_l.logit_scale",
    )
    clip = load_file(back.path / "text_encoder" / "model.safetensors")
    assert clip["text_projection.weight"].equal(torch.eye(96, dtype=torch.float16))
    assert load_file(back.path / "text_encoder_3" / "model.safetensors")["shared.weight"].dtype == torch.float8_e4m3fn
    vae = "diffusion_pytorch_model.safetensors"
    assert (back.path / "vae" / vae).read_bytes() == (demo_parts / "vae" / vae).read_bytes()
    alone = read_single_file(file, None, tmp_path / "alone")
    assert {path.name for path in alone.path.iterdir()} == {"transformer"}
    assert alone.notes[0].startswith("vae is left out: ")


# --- what is refused ---------------------------------------------------------------------------

BLOCK = f"{PREFIX}joint_blocks.1.x_block.attn.qkv.weight"
SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(BLOCK), r"it lacks joint_blocks\.1\.x_block\.attn\.qkv\.weight"),
    "no position table": (lambda tensors: tensors.pop(f"{PREFIX}pos_embed"), "it lacks pos_embed"),
    "unexpected": (
        lambda tensors: tensors.update({f"{PREFIX}register": torch.zeros(1)}),
        "it has register, which is no part of it",
    ),
    "shape": (
        lambda tensors: tensors.update({BLOCK: torch.zeros(383, 128)}),
        r"joint_blocks\.1\.x_block\.attn\.qkv\.weight has shape \[383, 128\], not \[384, 128\]",
    ),
    "gap": (
        lambda tensors: tensors.update({f"{PREFIX}joint_blocks.7.x_block.attn.qkv.weight": torch.zeros(1)}),
        r"it has joint_blocks\.7\.x_block\.attn\.qkv\.weight|it has joint_blocks\.7 and lacks joint_blocks\.2",
    ),
}


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
@pytest.mark.parametrize("fault", SPOILT)
def test_wrong_keys_are_named(tmp_path: Path, folder_of: FolderOf, fault: str, foreign: bool) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    spoil, message = SPOILT[fault]
    respell(file, spoil, foreign)
    with pytest.raises(UserError, match=message):
        transformer_from_single_file(file)
    with pytest.raises(UserError, match=message):
        read_single_file(file, None, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_stage_model.decoder.up.1.block.0.conv1.weight", "lacks decoder.up_blocks.2.resnets.0.conv1.weight"),
        ("text_encoders.clip_g.transformer.text_projection.weight", "lacks text_projection.weight"),
        ("text_encoders.t5xxl.transformer.shared.weight", "lacks shared.weight"),
    ],
)
def test_frozen_parts_must_be_whole_too(tmp_path: Path, folder_of: FolderOf, name: str, message: str) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", text_encoders=True).path
    respell(file, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=message):
        read_single_file(file, None, tmp_path / "out")


def test_a_file_of_another_kind_is_refused(tmp_path: Path, folder_of: FolderOf) -> None:
    with pytest.raises(UserError, match=r"is not an SD3 single file: it lacks x_embedder\.proj\.weight, "):
        transformer_from_single_file(folder_of("square") / WEIGHTS)
    with pytest.raises(UserError, match=r"cannot be read: No such file"):
        transformer_from_single_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize("size", [4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, folder_of: FolderOf, size: int) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors").path
    file.write_bytes(file.read_bytes()[:size])
    for read in (lambda: transformer_from_single_file(file), lambda: read_single_file(file, None, tmp_path / "out")):
        with pytest.raises(
            UserError, match=r"m\.safetensors is no whole safetensors file \(it.*fetch or write it anew"
        ):
            read()
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("said", ["no JSON", "[]", '{"config": {}}', "contradiction"])
def test_damaged_metadata_is_refused(tmp_path: Path, folder_of: FolderOf, said: str) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    if said == "contradiction":
        said = json.dumps({"config": {"num_layers": 2}, "true_blocks": 2, "blocks_in_file": 1})
    save_file(load_file(file), file, {"sd3_light": said})
    with pytest.raises(UserError, match=r"its metadata 'sd3_light' (is damaged|contradicts itself)"):
        transformer_from_single_file(file)


def test_nothing_is_overwritten(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors").path
    before = file.read_bytes()
    with pytest.raises(UserError, match=r"m\.safetensors already exists"):
        write_single_file(folder_of("wide"), file)
    assert file.read_bytes() == before
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out already exists"):
        read_single_file(file, None, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_what_reads_back_otherwise_does_not_appear(
    tmp_path: Path, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    write = single_file.write_tensor_file

    def flip(path: Path, *rest: Any) -> None:
        write(path, *rest)
        with open(path, "r+b") as opened:
            opened.seek(-3, os.SEEK_END)
            opened.write(b"\x55")

    monkeypatch.setattr(single_file, "write_tensor_file", flip)
    with pytest.raises(ProofError, match=r"n\.safetensors was not written: read back, transformer differs in "):
        write_single_file(folder_of("square"), tmp_path / "n.safetensors")
    with pytest.raises(ProofError, match=r"out was not written: read back, transformer differs in "):
        read_single_file(file, None, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_an_incomplete_folder_is_refused(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY)
    weights = load_file(folder / WEIGHTS)
    lost = weights.pop("transformer_blocks.1.attn.to_k.bias")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"transformer is not .*it lacks transformer_blocks\.1\.attn\.to_k\.bias"):
        write_single_file(folder, tmp_path / "m.safetensors")
    save_file({**weights, "transformer_blocks.1.attn.to_k.bias": lost.float()}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"to_k\.bias, .*to_v\.bias have types F16 and F32"):
        write_single_file(folder, tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"ends in \.safetensors"):
        write_single_file(folder, tmp_path / "m.ckpt")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"lacks diffusion_pytorch_model\.safetensors"):
        write_single_file(folder, tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"is no diffusers folder"):
        read_single_file(tmp_path / "m.safetensors", tmp_path, tmp_path / "out")


def test_a_tensor_in_two_files_of_a_folder_is_refused(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY, max_shard_size="1MB")
    one, two, *_ = sorted((folder / "transformer").glob("*.safetensors"))
    name, tensor = next(iter(load_file(two).items()))
    save_file({**load_file(one), name: tensor}, one, {"format": "pt"})
    with pytest.raises(UserError, match="and so does another file"):
        write_single_file(folder, tmp_path / "m.safetensors")


# --- what readers will make of it --------------------------------------------------------------


def notes_of(tmp_path: Path, demo_parts: Path, size: ModelSize, **keys: bool) -> tuple[str, ...]:
    folder = write_stock(tmp_path / "folder", demo_parts, size)
    written = write_single_file(folder, tmp_path / "m.safetensors", **keys)
    config, _ = transformer_from_single_file(written.path)
    assert config["num_layers"] == size.num_layers, "what readers cannot load, we can"
    return written.notes


def test_sizes_that_readers_do_not_know_are_told(tmp_path: Path, demo_parts: Path) -> None:
    notes = notes_of(tmp_path, demo_parts, SHAPES["deep"], text_encoders=True)
    beginnings = (
        "3 blocks and 2 heads: readers such as ComfyUI want one block a head and do not load it",
        "text width 256: ",
        "pooled text width 224: ",
        "vae has block_out_channels [32, 64, 96, 128]: ",
        "text_encoder has hidden_size 96: ComfyUI loads 768 only",
        "text_encoder_2 has hidden_size 128: ",
        "text_encoder_3 has d_model 256: ",
        "sampling shift 1: ComfyUI takes 3 unless",
        "CLIP-L's text_projection is not the identity",
    )
    assert len(notes) == len(beginnings), notes
    assert all(note.startswith(beginning) for note, beginning in zip(notes, beginnings, strict=True)), notes


def test_fewer_blocks_without_padding_are_told(tmp_path: Path, demo_parts: Path) -> None:
    notes = notes_of(tmp_path, demo_parts, SHAPES["wide"], pad_blocks=False)
    assert notes[0].startswith("2 blocks and 4 heads: readers such as ComfyUI load it only with identity blocks")


def test_heads_of_another_width_are_told_or_refused(tmp_path: Path, demo_parts: Path) -> None:
    narrow = replace(TINY, num_heads=4, head_dim=32)
    assert notes_of(tmp_path, demo_parts, narrow)[0].startswith(
        "heads of 32: ComfyUI and other readers know heads of 64"
    )
    folder = write_stock(tmp_path / "plain", demo_parts, replace(narrow, qk_norm=False))
    with pytest.raises(UserError, match=r"heads of 32 without qk-norm: .* silently"):
        write_single_file(folder, tmp_path / "plain.safetensors")
    assert not (tmp_path / "plain.safetensors").exists()


def test_other_text_and_latents_than_readers_compute_are_told(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY)
    text = {"text_tokens": "real", "uncond_text": "zero"}
    (folder / "sd3_light.json").write_text(json.dumps({"text": text}))
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").unlink()  # it is a link
    (folder / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.5}))
    notes = write_single_file(folder, tmp_path / "m.safetensors").notes
    assert "the VAE's scaling_factor is 0.5: readers compute with 1.5305" in notes
    assert any(note.startswith("trained on real text tokens") for note in notes)
    assert any(note.startswith("trained with zeros as the unconditional text") for note in notes)
