"""The verbs convert and lora: conversions keep every bit, and misuse is reported in one line."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from sd3_light.cli import app
from sd3_light.config import SIZES, AdapterConfig, ModelSize
from sd3_light.export.lora_file import write_lora
from sd3_light.export.trained_file import write_trained
from sd3_light.model.lora_layers import LoraModule
from tests import refusals
from tests.unit.export.denoisers import adapter_state, add_trained_adapter, live_denoiser

SQUARE = replace(SIZES["tiny2"], pos_embed_max_size=8)
WIDE = replace(SQUARE, num_heads=4)
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")
OF_ATTENTION = [f"transformer_blocks.{block}.attn.to_{part}" for block in (0, 1) for part in "qkv"]
LAYERS = (*OF_ATTENTION, "transformer_blocks.1.ff.net.0.proj")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    return refusals.refused("", run, *arguments)


def make_model(folder: Path, parts: Path, size: ModelSize, dtype: torch.dtype = torch.float32) -> Path:
    shutil.copytree(parts, folder, copy_function=os.link)
    torch.manual_seed(3)
    transformer = SD3Transformer2DModel(**size.transformer_config())
    transformer.to(dtype).save_pretrained(folder / "transformer")
    text = {"text_tokens": "padded", "uncond_text": "zero", "t5_max_length": 16}
    (folder / "sd3_light.json").write_text(json.dumps({"sd3_light": "0", "text": text, "weights": "ema", "step": 7}))
    return folder


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "square", demo_parts, SQUARE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "wide", demo_parts, WIDE, torch.bfloat16)


def make_lora(model: Path, file: Path, seed: int = 1, layers: Sequence[str] = LAYERS) -> Path:
    weights, generator = load_file(model / WEIGHTS), torch.Generator().manual_seed(seed)
    modules = {}
    for layer in layers:
        rows, columns = weights[f"{layer}.weight"].shape
        down, up = (torch.randn(*shape, generator=generator) * 0.1 for shape in ((2, columns), (rows, 2)))
        modules[layer] = LoraModule(down, up)
    return write_lora(file, modules)


def same_files(first: Path, second: Path, parts: Sequence[str]) -> None:
    for part in parts:
        for path in sorted((first / part).iterdir()):
            if path.name == "made.json":  # not part of the VAE: how it was made
                continue
            assert path.read_bytes() == (second / part / path.name).read_bytes(), path


def test_a_folder_becomes_a_file_of_chosen_contents_and_the_same_folder_again(wide: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "m.safetensors", tmp_path / "back"
    output = run("convert", wide, file, "--text-encoders")
    assert "identity blocks" in output
    assert f"wrote {file}" in output.replace("\n", "")
    assert any(key.startswith("text_encoders.") for key in load_file(file))
    run("convert", file, back, "--base", wide)
    same_files(wide, back, ("transformer", "vae", "text_encoder", "text_encoder_3", "tokenizer", "scheduler"))
    assert not list(tmp_path.glob(".*")), "nothing remains"
    file, back = tmp_path / "few.safetensors", tmp_path / "again"
    output = run("convert", wide, file, "--no-vae", "--no-pad-blocks")
    keys = load_file(file)
    assert not any(key.startswith("first_stage_model.") for key in keys)
    assert not any(key.startswith("model.diffusion_model.joint_blocks.2.") for key in keys)
    assert "joint_blocks.1." in " ".join(keys)
    assert "note: " in output, "readers expect as many blocks as heads"
    run("convert", file, back, "--base", wide)
    same_files(wide, back, ("transformer", "vae"))


def test_options_that_do_not_apply_are_refused(square: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    assert "ends in .safetensors" in refused("convert", square, tmp_path / "folder")
    assert "--base does not apply" in refused("convert", square, file, "--base", square)
    assert "--keep-pads does not apply" in refused("convert", square, file, "--keep-pads")
    assert "nowhere does not exist" in refused("convert", "nowhere", file)
    run("convert", square, file)
    assert "already exists" in refused("convert", square, file)
    assert "is a single file already" in refused("convert", file, tmp_path / "other.safetensors")
    assert "select what goes into a file" in refused("convert", file, tmp_path / "back", "--no-vae")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_a_lora_round_trips_through_kohyas_layout_exactly(square: Path, tmp_path: Path) -> None:
    first = make_lora(square, tmp_path / "1.safetensors")
    kohya, back = tmp_path / "2.safetensors", tmp_path / "3.safetensors"
    run("lora", "convert", first, kohya, "--layout", "kohya")
    assert "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha" in load_file(kohya)
    run("lora", "convert", kohya, back)
    assert back.read_bytes() == first.read_bytes()
    half = tmp_path / "4.safetensors"
    run("lora", "convert", first, half, "--dtype", "bfloat16")
    assert {tensor.dtype for tensor in load_file(half).values()} == {torch.bfloat16}


def test_a_lora_and_a_lokr_are_converted_for_the_folder_and_for_the_padded_file(wide: Path, tmp_path: Path) -> None:
    single, lora = tmp_path / "m.safetensors", make_lora(wide, tmp_path / "l.safetensors")
    run("convert", wide, single)
    padded, back = tmp_path / "padded.safetensors", tmp_path / "back.safetensors"
    run("lora", "convert", lora, padded, "--padded-for", single)
    assert {key.split(".")[2] for key in load_file(padded)} == {"0", "3"}, "block 1 of 2 becomes block 3 of 4"
    run("lora", "convert", padded, back)
    assert back.read_bytes() == lora.read_bytes()

    with safe_open(padded, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    save_file(tensors, tmp_path / "others.safetensors")  # as another program saves it, without padding metadata
    run("lora", "convert", tmp_path / "others.safetensors", tmp_path / "again.safetensors", "--trained-on", single)
    assert load_file(tmp_path / "again.safetensors").keys() == load_file(lora).keys()
    lokr = make_lokr(tmp_path / "lokr.safetensors")[0]
    folder, padded = tmp_path / "folder.safetensors", tmp_path / "padded-lokr.safetensors"
    run("lora", "convert", lokr, folder)
    assert {key.split("_")[3] for key in load_file(folder)} == {"0", "1"}
    run("lora", "convert", folder, padded, "--padded-for", single)
    assert {key.split("_")[3] for key in load_file(padded)} == {"0", "3"}, "block 1 of 2 becomes block 3 of 4"
    assert padded.read_bytes() == lokr.read_bytes()
    half = tmp_path / "half.safetensors"
    run("lora", "convert", lokr, half, "--dtype", "bfloat16")
    assert torch.bfloat16 in {tensor.dtype for tensor in load_file(half).values()}
    message = refused("lora", "convert", lokr, tmp_path / "x.safetensors", "--layout", "kohya")
    assert "a LoKr or LoHa is not a LoRA" in message


def make_lokr(file: Path, layers: Sequence[str] = LAYERS) -> tuple[Path, dict[str, Tensor]]:
    """Write a LoKr for WIDE, as a task or a run does: for its padded single file. Return the updates too."""
    adapter = AdapterConfig(type="lokr", rank=2, alpha=3.0, target_modules=tuple(layers))
    transformer = add_trained_adapter(live_denoiser(WIDE.transformer_config()), adapter)
    updates = {layer: transformer.get_submodule(layer).get_delta_weight("default").detach() for layer in layers}
    return write_trained(file, adapter_state(transformer), transformer, adapter), updates


@pytest.mark.usefixtures("unproven")
def test_a_lokr_is_merged_in_the_dtype_of_the_model_or_another(wide: Path, tmp_path: Path) -> None:
    lokr, updates = make_lokr(tmp_path / "l.safetensors")
    run("lora", "merge", wide, tmp_path / "merged", f"{lokr}:0.5", "--dtype", "float32")
    before, after = load_file(wide / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert changed == {f"{layer}.weight" for layer in LAYERS}
    for layer, update in updates.items():
        change = after[f"{layer}.weight"] - before[f"{layer}.weight"].float()
        torch.testing.assert_close(change, 0.5 * update, rtol=0, atol=1e-6)
    run("lora", "merge", wide, tmp_path / "kept", lokr)
    assert {tensor.dtype for tensor in load_file(tmp_path / "kept" / WEIGHTS).values()} == {torch.bfloat16}


def test_merging_gives_a_proven_model(square: Path, tmp_path: Path) -> None:
    loras = [make_lora(square, tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2)]
    out = tmp_path / "merged"
    run("lora", "merge", square, out, f"{loras[0]}:0.7", f"{loras[1]}:-0.5")
    proof = json.loads((out / "proof.json").read_text())
    assert proof["max_difference"] <= 1e-5, proof
    facts = json.loads((out / "sd3_light.json").read_text())
    assert facts["text"]["uncond_text"] == "zero", "the text policy is the model's"
    assert facts["weights"] == "ema with 1.safetensors at 0.7 and 2.safetensors at -0.5"
    assert facts["step"] == 7

    before, after = load_file(square / WEIGHTS), load_file(out / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{layer}.weight" for layer in LAYERS}


def lora_export(model: Path, folder: Path, seed: int, **text: object) -> Path:
    """Write a LoRA with the text settings of its training beside it, as a run exports it."""
    folder.mkdir()
    make_lora(model, folder / "lora.safetensors", seed)
    settings = {"text_tokens": "padded", "uncond_text": "empty", "t5_max_length": 5} | text
    (folder / "sd3_light.json").write_text(json.dumps({"text": settings}))
    return folder


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_a_merged_model_draws_what_its_loras_draw(square: Path, tmp_path: Path, text_tokens: str) -> None:
    """Texts are encoded as in the training of the LoRA, not of the model."""
    trained = lora_export(square, tmp_path / "trained", 1, text_tokens=text_tokens)
    plain = make_lora(square, tmp_path / "plain.safetensors", 2)
    out = tmp_path / "merged"
    run("lora", "merge", square, out, plain, f"{trained}:0.7")
    text = json.loads((trained / "sd3_light.json").read_text())["text"]
    assert json.loads((out / "sd3_light.json").read_text())["text"] == text
    draw = ("a small red star left of a blue square", "--steps", 2, "--width", 32, "--height", 32, "--out")
    run("sample", square, *draw, tmp_path / "stack", "--lora", plain, "--lora", f"{trained}:0.7")
    run("sample", out, *draw, tmp_path / "drawn")
    run("sample", square, *draw, tmp_path / "other", "--lora", plain, "--lora", f"{trained / 'lora.safetensors'}:0")
    images = [Image.open(tmp_path / name / "00000.png") for name in ("stack", "drawn", "other")]
    stack, drawn, other = (np.asarray(image).astype(int) for image in images)
    assert abs(stack - drawn).max() <= 1
    assert abs(stack - other).max() > 1


@pytest.mark.usefixtures("unproven")
def test_loras_of_different_texts_are_not_merged(square: Path, tmp_path: Path) -> None:
    first = lora_export(square, tmp_path / "first", 1)
    same = lora_export(square, tmp_path / "same", 2)
    other = lora_export(square, tmp_path / "other", 3, t5_max_length=7)
    message = refused("lora", "merge", square, tmp_path / "out", first, same, other)
    assert f"{first} was trained with t5_max_length = 5" in message
    assert f"{other} with t5_max_length = 7" in message
    assert "merge only LoRAs with the same text settings" in message
    assert not (tmp_path / "out").exists()
    run("lora", "merge", square, tmp_path / "out", first, same)


@pytest.mark.usefixtures("unproven")
def test_a_merged_lora_is_extracted_again(square: Path, tmp_path: Path) -> None:
    lora = make_lora(square, tmp_path / "l.safetensors")
    run("lora", "merge", square, tmp_path / "merged", lora)
    output = run("lora", "extract", square, tmp_path / "merged", tmp_path / "e.safetensors", "--rank", 2)
    assert f"{len(LAYERS)} layers, 100.00% of the squared difference" in output.replace("\n", " ")
    merged, extracted = (_updates(load_file(path)) for path in (lora, tmp_path / "e.safetensors"))
    assert merged.keys() == extracted.keys()
    for layer, update in merged.items():
        torch.testing.assert_close(extracted[layer], update, rtol=0, atol=1e-5)
    output = run("lora", "extract", square, tmp_path / "merged", tmp_path / "q.safetensors", "--target", "attn.to_q")
    assert "2 layers" in output
    assert "a LoRA cannot represent" in output


def _updates(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stems = {key.rsplit(".lora_", 1)[0] for key in tensors}
    return {stem: tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"] for stem in stems}


def test_errors_of_the_lora_verbs_are_one_line(square: Path, wide: Path, tmp_path: Path) -> None:
    lora, out = make_lora(square, tmp_path / "l.safetensors"), tmp_path / "out.safetensors"
    single = tmp_path / "m.safetensors"
    run("convert", square, single)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "choose one of diffusers, kohya, peft" in refused("lora", "convert", lora, out, "--layout", "a1111")
    assert "choose one of float32" in refused("lora", "convert", lora, out, "--dtype", "int8")
    assert "is not padded" in refused("lora", "convert", lora, out, "--padded-for", single)
    assert "already exists" in refused("lora", "convert", lora, single)
    assert "does not exist" in refused("lora", "merge", square, tmp_path / "x", tmp_path / "none.safetensors")
    assert "sd3-light convert" in refused("lora", "merge", single, tmp_path / "x", lora)
    assert "has shape" in refused("lora", "merge", wide, tmp_path / "x", lora)
    assert "lacks model_index.json" in refused("lora", "merge", tmp_path, tmp_path / "x", lora)
    assert "no weight among the targets differs" in refused("lora", "extract", square, square, out)
    assert "pass models of the same size" in refused("lora", "extract", square, wide, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "nothing remains"


def test_runs_and_adapters_are_not_converted(tmp_path: Path) -> None:
    """The error names what to convert instead."""
    run_folder, out = tmp_path / "run", tmp_path / "out.safetensors"
    (run_folder / "checkpoints").mkdir(parents=True)
    assert f"sd3-light export {run_folder} OUT" in refused("convert", run_folder, out)
    for step in (2, 10):
        export = run_folder / "exports" / f"step-{step:08d}"
        export.mkdir(parents=True)
    assert f"such as {export}" in refused("convert", run_folder, out)
    (export / "lora.safetensors").touch()
    assert f"lora merge MODEL OUT {export / 'lora.safetensors'}" in refused("convert", export, out)
