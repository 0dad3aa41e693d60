"""A single file contains every tensor of a folder once, converts back bit for bit, and stock diffusers reads it."""

import hashlib
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
from sd3_light.export.proof import ProofError
from sd3_light.families.sd3 import single_file
from sd3_light.families.sd3.single_file import read_single_file, transformer_from_single_file, write_single_file
from sd3_light.families.sd3.single_names import denoiser_rules, fuse, vae_name
from sd3_light.families.sd3.single_parts import expected_shapes
from sd3_light.families.sd3.start import config_of_shapes
from sd3_light.tensor_file import zeros
from tests.cases import combinations
from tests.refusals import refused
from tests.shards import header_of
from tests.unit.export.denoisers import output

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
FACTS = {"sd3_light": "0", "text": {"text_tokens": "padded", "uncond_text": "empty", "t5_max_length": 16}, "step": 7}
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")
PREFIX = "model.diffusion_model."
PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> FolderOf:
    """A complete folder of each shape: random float16 weights with the demo's frozen parts. Read only."""
    root, folders = tmp_path_factory.mktemp("folders"), dict[str, Path]()

    def of(shape: str) -> Path:
        if shape not in folders:
            folders[shape] = write_stock(root / shape.replace(" ", "_"), demo_parts, SHAPES[shape])
        return folders[shape]

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


def stock(folder: Path) -> SD3Transformer2DModel:
    return SD3Transformer2DModel.from_pretrained(folder / "transformer", local_files_only=True).float()


@pytest.mark.parametrize(
    ("shape", "pad_blocks"),
    combinations(
        SHAPES,
        (True, False),
        fast=[*((shape, True) for shape in PADS), *((shape, False) for shape in SHAPES if shape not in PADS)],
    ),
)
def test_a_round_trip(tmp_path: Path, folder_of: FolderOf, demo_parts: Path, shape: str, pad_blocks: bool) -> None:
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


def test_a_folder_of_several_files_and_types_round_trips_unless_one_is_twice(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY, torch.bfloat16, max_shard_size="1MB")
    files = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    first = load_file(files[0])
    first["pos_embed.pos_embed"] = first["pos_embed.pos_embed"].float()  # another type than the other tensors
    save_file(first, files[0], {"format": "pt"})
    before = {name: tensor for file in files for name, tensor in load_file(file).items()}
    file = write_single_file(folder, tmp_path / "m.safetensors").path
    after = load_file(read_single_file(file, None, tmp_path / "back").path / WEIGHTS)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == tensor.dtype and after[name].equal(tensor) for name, tensor in before.items())
    name, tensor = next(iter(load_file(files[1]).items()))
    save_file({**first, name: tensor}, files[0], {"format": "pt"})
    refused("and another file of", write_single_file, folder, tmp_path / "other.safetensors")


def test_parts_that_the_file_lacks_come_from_the_base(tmp_path: Path, folder_of: FolderOf, demo_parts: Path) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    assert all(name.startswith(PREFIX) for name in load_file(file))
    back = read_single_file(file, demo_parts, tmp_path / "back").path
    assert (back / "vae" / "config.json").samefile(demo_parts / "vae" / "config.json"), "linked, not copied"
    assert {path.name for path in demo_parts.iterdir() if path.is_dir()} < {path.name for path in back.iterdir()}


def test_the_files_configs_win_over_those_of_the_base(tmp_path: Path, folder_of: FolderOf, demo_parts: Path) -> None:
    """The weights are equal in both, so that only the config gives the scale of the latents."""
    folder = folder_of("square")
    file = write_single_file(folder, tmp_path / "m.safetensors", text_encoders=True).path
    base = Path(shutil.copytree(demo_parts, tmp_path / "base"))
    for part, key, value in (("vae", "scaling_factor", 0.5), ("text_encoder", "hidden_act", "gelu")):
        path = base / part / "config.json"
        config = json.loads(path.read_text())
        assert config[key] != value
        path.unlink()  # it may be a link to the original
        path.write_text(json.dumps({**config, key: value}))
    back = read_single_file(file, base, tmp_path / "back").path
    for part in PARTS:
        assert (back / part / "config.json").read_bytes() == (folder / part / "config.json").read_bytes(), part


def test_without_a_base_the_parts_of_the_file_are_written(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors").path
    back = read_single_file(file, None, tmp_path / "back")
    assert {path.name for path in back.path.iterdir()} == {"transformer", "vae", "scheduler", "sd3_light.json"}
    assert back.notes == ("without a base folder there are no tokenizers: use the folder to initialize training",)
    tensors = load_file(file)
    for name in ("encoder.mid.attn_1.q", "decoder.mid.attn_1.proj_out"):
        assert tensors[f"first_stage_model.{name}.weight"].shape == (8, 8, 1, 1), "attention is a convolution there"
    assert tensors["first_stage_model.decoder.mid.attn_1.norm.weight"].shape == (8,)


@pytest.mark.parametrize("shape", [*SHAPES, *SIZES])
def test_every_tensor_is_covered_exactly_once(shape: str) -> None:
    config = (SHAPES | SIZES)[shape].transformer_config()
    rules = list(denoiser_rules(config))
    stock_names = [name for rule in rules for name in rule.stock]
    assert sorted(stock_names) == sorted(expected_shapes("transformer", config)), "each exactly once"
    assert len({rule.single for rule in rules}) == len(rules)


def test_the_file_equals_the_librarys_and_equal_models_are_equal_bytes(tmp_path: Path, folder_of: FolderOf) -> None:
    folder = folder_of("wide")
    first, second = (write_single_file(folder, tmp_path / name).path for name in ("1.safetensors", "2.safetensors"))
    data = first.read_bytes()
    assert data == second.read_bytes()
    (header, values), (library_header, library_values) = header_of(data), header_of(save(load_file(first)))
    metadata = header.pop("__metadata__")
    assert list(header.items()) == list(library_header.items())
    assert values == library_values
    assert list(metadata) == sorted(metadata), "the library writes several entries in random order"
    about = json.loads(metadata.pop("sd3_light"))
    assert metadata == {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v3.5-medium",  # it has dual attention
        "modelspec.implementation": "sgm",
        "modelspec.title": "SD3 model of 2 blocks and 4 heads",
        "modelspec.description": "Trained with SD3-Light, optimizer steps 7",
        "modelspec.resolution": f"{TINY.sample_size * 8}x{TINY.sample_size * 8}",
        "modelspec.hash_sha256": f"0x{hashlib.sha256(values).hexdigest()}",
    }
    assert list(about) == sorted(about)
    assert about["config"] == json.loads((folder / "transformer" / "config.json").read_text())
    assert (about["true_blocks"], about["blocks_in_file"]) == (2, 4)
    assert about["facts"] == FACTS
    assert about["other_configs"]["vae"]["latent_channels"] == 16


@pytest.mark.parametrize("shape", ["square", "three", "dual", "wide", "one block", "deep"])
def test_stock_diffusers_reads_the_unpadded_file(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    folder = folder_of(shape)
    file = write_single_file(folder, tmp_path / "m.safetensors", pad_blocks=False).path
    options = {"config": str(folder), "subfolder": "transformer", "local_files_only": True}
    loaded = SD3Transformer2DModel.from_single_file(str(file), **options)
    weights = load_file(folder / WEIGHTS)
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert all(state[name].equal(tensor) for name, tensor in weights.items())
    assert output(loaded.float()).equal(output(stock(folder)))


def with_t5_dropout(folder: Path) -> Path:
    """Give the folder's T5 the dropout of released ones, which `T5Config` has by default; the demo's has none."""
    config = folder / "text_encoder_3" / "config.json"
    values = {**json.loads(config.read_text()), "dropout_rate": 0.1}
    config.unlink()  # a link to the shared file
    config.write_text(json.dumps(values))
    return folder


@torch.no_grad()
def drawn(pipe: Any) -> Tensor:
    call = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": 16, "output_type": "pt"}
    images: Tensor = pipe.to(torch.float32)("a red star", generator=torch.Generator().manual_seed(0), **call).images
    return images


def test_stock_diffusers_reads_the_full_pipeline(tmp_path: Path, demo_parts: Path) -> None:
    """With the line of docs/formats/single-file.md: diffusers 0.42.1 leaves T5 in training mode, with dropout."""
    folder = with_t5_dropout(write_stock(tmp_path / "folder", demo_parts, TINY))
    file = write_single_file(folder, tmp_path / "m.safetensors", text_encoders=True).path
    pipe = StableDiffusion3Pipeline.from_single_file(str(file), config=str(folder), local_files_only=True)
    pipe.text_encoder_3.eval()
    for part in PARTS:
        (path,) = (folder / part).glob("*.safetensors")
        state = getattr(pipe, part).state_dict()
        for name, tensor in load_file(path).items():
            if (part, name) != ("text_encoder", "text_projection.weight"):  # diffusers uses the identity there
                assert state[name].to(tensor.dtype).equal(tensor), (part, name)
        assert not [name for name, tensor in state.items() if tensor.is_meta], f"{part}: not in the file"
        assert not [name for name, module in getattr(pipe, part).named_modules() if module.training], part
    expected: Any = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    projection = expected.text_encoder.text_projection.weight
    projection.data = torch.eye(*projection.shape)
    assert (drawn(pipe) - drawn(expected)).abs().max() <= 1 / 255


@pytest.mark.parametrize("levels", [2, 4])
def test_the_vae_is_named_as_diffusers_converter_expects(levels: int) -> None:
    """For another depth, with quant convolutions, and with attention matrices as convolutions."""
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


@pytest.mark.parametrize("shape", PADS)
def test_identity_blocks_change_nothing(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    folder, size = folder_of(shape), SHAPES[shape]
    written = write_single_file(folder, tmp_path / "m.safetensors")
    assert written.notes[0].startswith(f"{PADS[shape]} identity blocks before the last of {size.num_layers}: ")
    config, state = transformer_from_single_file(written.path, keep_pads=True)
    assert config["num_layers"] == size.num_heads == size.num_layers + PADS[shape]
    padded = SD3Transformer2DModel(**config)
    padded.load_state_dict(state, strict=True)
    assert output(padded.float()).equal(output(stock(folder)))
    for block in range(size.num_layers - 1, size.num_heads - 1):
        pad = [tensor for name, tensor in state.items() if name.startswith(f"transformer_blocks.{block}.")]
        assert len(pad) >= 24
        assert not any(tensor.any() for tensor in pad)


@pytest.mark.parametrize("shape", ["square", "three", "dual", "deep"])
def test_as_many_blocks_as_heads_or_more_are_not_padded(tmp_path: Path, folder_of: FolderOf, shape: str) -> None:
    padded = write_single_file(folder_of(shape), tmp_path / "1.safetensors").path
    unpadded = write_single_file(folder_of(shape), tmp_path / "2.safetensors", pad_blocks=False).path
    assert padded.read_bytes() == unpadded.read_bytes()


def test_trained_padding_is_not_discarded(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("wide"), tmp_path / "m.safetensors", vae=False).path

    def train(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}joint_blocks.2.x_block.mlp.fc1.bias"][5] = 1e-3

    rewrite(file, train)
    refused(r"calls block 2 padding, but its weights are not zero", transformer_from_single_file, file)
    config, state = transformer_from_single_file(file, keep_pads=True)
    assert (config["num_layers"], config["dual_attention_layers"]) == (4, [0])
    assert state["transformer_blocks.2.ff.net.0.proj.bias"][5] != 0


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object], foreign: bool = False) -> None:
    """Rewrite a file with other tensors, as another program would; ``foreign``: without our metadata."""
    metadata = header_of(file.read_bytes())[0]["__metadata__"]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"made_by": "another"} if foreign else metadata)


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(PREFIX)] = tensors.pop(name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [lambda tensors: None, without_prefix], ids=["prefixed", "bare"])
def test_a_denoiser_of_another_program_is_read(tmp_path: Path, folder_of: FolderOf, shape: str, change: Any) -> None:
    folder = folder_of(shape)
    file = write_single_file(folder, tmp_path / "m.safetensors", vae=False, pad_blocks=False).path
    rewrite(file, change, foreign=True)
    config, state = transformer_from_single_file(file)
    expected = {**SHAPES[shape].transformer_config(), "sample_size": 128}
    assert {**config, "dual_attention_layers": tuple(config["dual_attention_layers"])} == expected
    before = load_file(folder / WEIGHTS)
    assert state.keys() == before.keys()
    assert all(state[name].dtype == tensor.dtype and state[name].equal(tensor) for name, tensor in before.items())
    SD3Transformer2DModel(**config).load_state_dict(state, strict=True)


@pytest.mark.parametrize("size", ["sd3_medium", "sd3.5_medium", "sd3_light_square"])
def test_the_config_of_real_sizes_follows_from_their_shapes(size: str) -> None:
    config = SIZES[size].transformer_config()
    shapes = expected_shapes("transformer", config)
    tensors = fuse({name: zeros("F16", shape) for name, shape in shapes.items()}, config)
    deduced = config_of_shapes({name: tensor.shape for name, tensor in tensors.items()}, "file")
    unknown = {"sample_size": config["sample_size"]}
    assert {**deduced, "dual_attention_layers": tuple(deduced["dual_attention_layers"]), **unknown} == config


def test_zero_blocks_are_kept_without_metadata_about_padding(tmp_path: Path, folder_of: FolderOf) -> None:
    file = write_single_file(folder_of("wide"), tmp_path / "m.safetensors", vae=False).path
    rewrite(file, lambda tensors: None, foreign=True)
    config, state = transformer_from_single_file(file)
    assert config["num_layers"] == 4
    model = SD3Transformer2DModel(**config)
    model.load_state_dict(state)
    assert output(model.float()).equal(output(stock(folder_of("wide"))))


def test_parts_of_another_program_use_the_bases_config(tmp_path: Path, folder_of: FolderOf, demo_parts: Path) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", text_encoders=True).path

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
        tensors["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
        shared = "text_encoders.t5xxl.transformer.shared.weight"
        tensors[shared] = tensors[shared].to(torch.float8_e4m3fn)
        name = "first_stage_model.encoder.mid.attn_1.q.weight"
        tensors[name] = tensors[name][:, :, 0, 0].contiguous()

    rewrite(file, change, foreign=True)
    back = read_single_file(file, demo_parts, tmp_path / "back")
    assert back.notes == (
        "CLIP-L's text_projection is not in the file: the identity is used, as in other readers",
        "left out because they do not belong to SD3: 1 tensors such as text_encoders.clip_l.logit_scale",
    )
    clip = load_file(back.path / "text_encoder" / "model.safetensors")
    assert clip["text_projection.weight"].equal(torch.eye(96, dtype=torch.float16))
    assert load_file(back.path / "text_encoder_3" / "model.safetensors")["shared.weight"].dtype == torch.float8_e4m3fn
    vae = "diffusion_pytorch_model.safetensors"
    assert (back.path / "vae" / vae).read_bytes() == (demo_parts / "vae" / vae).read_bytes()
    alone = read_single_file(file, None, tmp_path / "alone")
    assert {path.name for path in alone.path.iterdir()} == {"transformer"}
    assert alone.notes[0].startswith("vae is left out: ")


BLOCK = f"{PREFIX}joint_blocks.1.x_block.attn.qkv.weight"


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(BLOCK), r"it lacks joint_blocks\.1\.x_block\.attn\.qkv\.weight"),
    "no position table": (lambda tensors: tensors.pop(f"{PREFIX}pos_embed"), "it lacks pos_embed"),
    "unexpected": (put(f"{PREFIX}register", torch.zeros(1)), "it has register, which does not belong to it"),
    "shape": (put(BLOCK, torch.zeros(383, 128)), r"qkv\.weight has shape \[383, 128\], not \[384, 128\]"),
    "gap": (
        put(BLOCK.replace("1", "7"), torch.zeros(1)),
        r"it has joint_blocks\.7(\.x_| and lacks joint_blocks\.2)",
    ),
}


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
@pytest.mark.parametrize("fault", DAMAGES)
def test_wrong_keys_are_named(tmp_path: Path, folder_of: FolderOf, fault: str, foreign: bool) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    damage, message = DAMAGES[fault]
    rewrite(file, damage, foreign)
    refused(message, transformer_from_single_file, file)
    refused(message, read_single_file, file, None, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_stage_model.decoder.up.1.block.0.conv1.weight", "lacks decoder.up_blocks.2.resnets.0.conv1.weight"),
        ("text_encoders.clip_g.transformer.text_projection.weight", "lacks text_projection.weight"),
        ("text_encoders.t5xxl.transformer.shared.weight", "lacks shared.weight"),
    ],
)
def test_frozen_parts_must_be_complete(tmp_path: Path, folder_of: FolderOf, name: str, message: str) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", text_encoders=True).path
    rewrite(file, lambda tensors: tensors.pop(name))
    refused(message, read_single_file, file, None, tmp_path / "out")


CONTRADICTION = '{"config": {"num_layers": 2}, "true_blocks": 2, "blocks_in_file": 1}'


@pytest.mark.parametrize("damage", [4, 100, -1, "no JSON", "[]", '{"config": {}}', CONTRADICTION])
def test_a_truncated_file_and_bad_metadata_are_refused(tmp_path: Path, folder_of: FolderOf, damage: int | str) -> None:
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors", vae=False).path
    message = r"its metadata 'sd3_light' (is damaged|has contradictory block counts)"
    if isinstance(damage, str):
        save_file(load_file(file), file, {"sd3_light": damage})
    else:
        file.write_bytes(file.read_bytes()[:damage])
        message = r"m\.safetensors is not a complete safetensors file \(it.*download or write it again"
    for read in (lambda: transformer_from_single_file(file), lambda: read_single_file(file, None, tmp_path / "out")):
        refused(message, read)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_other_files_are_refused_and_nothing_is_overwritten(tmp_path: Path, folder_of: FolderOf) -> None:
    with pytest.raises(UserError, match=r"is not an SD3 single file: it lacks x_embedder\.proj\.weight, "):
        transformer_from_single_file(folder_of("square") / WEIGHTS)
    refused(r"cannot read .*: No such file", transformer_from_single_file, tmp_path / "none.safetensors")
    file = write_single_file(folder_of("square"), tmp_path / "m.safetensors").path
    before = file.read_bytes()
    refused(r"m\.safetensors already exists", write_single_file, folder_of("wide"), file)
    assert file.read_bytes() == before
    (tmp_path / "out").mkdir()
    refused("out already exists", read_single_file, file, None, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_a_wrong_file_does_not_appear(tmp_path: Path, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
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
    bias = weights.pop("transformer_blocks.1.attn.to_k.bias")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    missing = r"transformer does not match its config: it lacks transformer_blocks\.1\.attn\.to_k\.bias"
    refused(missing, write_single_file, folder, tmp_path / "m.safetensors")
    save_file({**weights, "transformer_blocks.1.attn.to_k.bias": bias.float()}, folder / WEIGHTS, {"format": "pt"})
    refused(r"to_k\.bias, .*to_v\.bias have types F16 and F32", write_single_file, folder, tmp_path / "m.safetensors")
    refused(r"ends in \.safetensors", write_single_file, folder, tmp_path / "m.ckpt")
    (folder / WEIGHTS).unlink()
    refused(r"lacks diffusion_pytorch_model\.safetensors", write_single_file, folder, tmp_path / "m.safetensors")
    refused(r"is not a diffusers folder", read_single_file, tmp_path / "m.safetensors", tmp_path, tmp_path / "out")


def notes_of(tmp_path: Path, demo_parts: Path, size: ModelSize, **keys: bool) -> tuple[str, ...]:
    folder = write_stock(tmp_path / "folder", demo_parts, size)
    written = write_single_file(folder, tmp_path / "m.safetensors", **keys)
    config, _ = transformer_from_single_file(written.path)
    assert config["num_layers"] == size.num_layers, "we load what other readers cannot"
    return written.notes


def test_sizes_that_readers_do_not_support_are_noted(tmp_path: Path, demo_parts: Path) -> None:
    notes = notes_of(tmp_path, demo_parts, SHAPES["deep"], text_encoders=True)
    beginnings = (
        "3 blocks and 2 heads: readers such as ComfyUI expect one block per head and do not load it",
        "text width 256: ",
        "pooled text width 224: ",
        "vae has block_out_channels [8, 8, 8, 8]: ",
        "text_encoder has hidden_size 96: ComfyUI loads 768 only",
        "text_encoder_2 has hidden_size 128: ",
        "text_encoder_3 has d_model 256: ",
        "sampling shift 1: ComfyUI uses 3 unless",
        "T5 tokens: ComfyUI pads a prompt to 77, training and diffusers to 16",
        "CLIP-L's text_projection is not the identity",
        "in ComfyUI choose the sampler `euler` and the scheduler `normal`",
    )
    assert len(notes) == len(beginnings), notes
    assert all(note.startswith(beginning) for note, beginning in zip(notes, beginnings, strict=True)), notes
    fewer = notes_of(tmp_path / "fewer", demo_parts, SHAPES["wide"], pad_blocks=False)
    assert fewer[0].startswith("2 blocks and 4 heads: readers such as ComfyUI load it only with identity blocks")


def test_other_head_widths_are_noted_or_refused(tmp_path: Path, demo_parts: Path) -> None:
    narrow = replace(TINY, num_heads=4, head_dim=32)
    (first, *_) = notes_of(tmp_path, demo_parts, narrow)
    assert first.startswith("heads of 32: ComfyUI and other readers support heads of 64")
    folder = write_stock(tmp_path / "plain", demo_parts, replace(narrow, qk_norm=False))
    refused(r"heads of 32 without qk-norm: .* silently", write_single_file, folder, tmp_path / "plain.safetensors")
    assert not (tmp_path / "plain.safetensors").exists()


def test_text_and_latents_that_differ_from_readers_are_noted(tmp_path: Path, demo_parts: Path) -> None:
    folder = write_stock(tmp_path / "folder", demo_parts, TINY)
    text = {"text_tokens": "real", "uncond_text": "zero"}
    (folder / "sd3_light.json").write_text(json.dumps({"text": text}))
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").unlink()  # it is a link
    (folder / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.5}))
    notes = write_single_file(folder, tmp_path / "m.safetensors").notes
    assert "the VAE's scaling_factor is 0.5: readers use 1.5305" in notes
    assert any(note.startswith("trained on real text tokens") for note in notes)
    assert any(note.startswith("trained with zeros as the unconditional text") for note in notes)
