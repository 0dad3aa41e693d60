"""The parts stage: a complete folder from images alone, and what it refuses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from sd3_light.config.faults import ConfigFaults, Stopped, UserError
from sd3_light.model.pipeline_folder import check_configs, missing_parts
from sd3_light.parts.contrastive import TextOptions
from sd3_light.parts.fit import FitOptions
from sd3_light.parts.sizes import TextSize, VaeSize
from sd3_light.parts.vae import VaeOptions
from sd3_light.stages import parts as stage
from sd3_light.stages.parts import PartsOptions
from sd3_light.world import write_dataset


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Replace the smallest sizes by smaller ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stage.VAE_SIZES, "tiny", VaeSize((8, 8, 8, 8), 1, 4))
        patch.setitem(stage.TEXT_SIZES, "tiny", TextSize(32, 32, 64, 2, (8, 8, 16, 16), (1, 1, 1, 1)))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "images", 40, seed=2)
    toml = folder / "data.toml"
    toml.write_text('size_buckets = [[32, 32]]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    return toml


def options(**more: Any) -> PartsOptions:
    fit = FitOptions(steps=6, evaluate_every=3)
    defaults = {
        "vae_size": "tiny", "text_size": "tiny", "vae": VaeOptions(batch=4), "text": TextOptions(batch=8),
        "vae_fit": fit, "text_fit": fit, "workers": 0, "vocabulary": 1000,
    }  # fmt: skip
    return PartsOptions(**{**defaults, **more})


@pytest.fixture(scope="module")
def built(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage.run(data, tmp_path_factory.mktemp("parts") / "out", options())


def test_the_folder_is_complete(built: Path) -> None:
    assert missing_parts(built, transformer=False) == ()
    check_configs(built)
    for name in ("vae", "text_encoder", "text_encoder_3", "judge"):
        made = json.loads((built / name / "made.json").read_text())
        assert made["steps"] == 6
        assert [record["step"] for record in made["history"]] == [3, 6]
    assert (built / "training" / "vae" / "grid.png").is_file()
    weights = built / "vae" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_mode & 0o444 == 0o444 & (built / "vae" / "config.json").stat().st_mode


def test_the_stock_pipeline_loads_it(built: Path) -> None:
    pipe = StableDiffusion3Pipeline.from_pretrained(built, transformer=None, local_files_only=True)
    prompt, _, pooled, _ = pipe.encode_prompt(
        "a red circle", None, None, do_classifier_free_guidance=False, max_sequence_length=24
    )
    assert prompt.shape[2] == 64
    assert pooled.shape == (1, 64)
    latents = pipe.vae.encode(torch.zeros(1, 3, 32, 32)).latent_dist.mean
    assert latents.shape == (1, 16, 4, 4)


def test_a_second_run_changes_nothing(built: Path, data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()}
    stage.run(data, built, options())
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_continues_to_the_same_bytes(built: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for only in ("vae", "text"):
        with pytest.raises(Stopped, match="stop-after"):
            stage.run(data, out, options(only=only, stop_after=1e-9))
        stage.run(data, out, options(only=only))
    for file in (*built.rglob("*.safetensors"), *built.glob("tokenizer*/*.json")):
        relative = file.relative_to(built)
        if relative.parts[0] != "training":
            assert (out / relative).read_bytes() == file.read_bytes(), relative


def test_continuing_from_a_vae(built: Path, data: Path, tmp_path: Path) -> None:
    out = stage.run(data, tmp_path / "out", options(only="vae", init=built, channels=4))
    assert json.loads((out / "vae" / "config.json").read_text())["latent_channels"] == 16
    assert not (out / "text_encoder").exists()


def test_random_text_encoders(data: Path, tmp_path: Path) -> None:
    out = stage.run(data, tmp_path / "out", options(only="text", random_text=True))
    assert (out / "text_encoder_3" / "model.safetensors").is_file()
    assert not (out / "judge").exists()


def test_other_images_are_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        stage.run(data, out, options(only="vae", stop_after=1e-9))
    changed = Path(shutil.copytree(data.parent, tmp_path / "changed")) / "data.toml"
    (changed.parent / "images" / "000001.png").unlink()
    with pytest.raises(UserError, match="was started with images"):
        stage.run(changed, out, options(only="vae"))


def test_a_folder_with_other_files_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        stage.run(data, tmp_path, options())


def test_a_train_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('output_dir = "run"\ndataset = "data.toml"\n')
    with pytest.raises(ConfigFaults, match="not a dataset TOML"):
        stage.run(tmp_path / "train.toml", tmp_path / "out", options())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vae_size": "huge"}, "--vae-size: unknown size 'huge'; give one of tiny, small, medium"),
        ({"only": "t5"}, "--only: unknown part 't5'"),
        ({"vae": VaeOptions(decoder_only=True)}, "--decoder-only keeps an existing encoder"),
    ],
)
def test_contradicting_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        stage.check_options(options(**wrong))
