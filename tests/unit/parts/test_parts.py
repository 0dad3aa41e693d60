"""The parts verb: a complete folder from images alone, and what it refuses."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.cli import app
from sd3_light.config import load_images
from sd3_light.config.faults import ConfigFaults, Stopped, UserError
from sd3_light.evaluate.feature_model import shares_captions
from sd3_light.model.folder import check_configs, missing_parts
from sd3_light.parts import verb
from sd3_light.parts.contrastive import TextOptions, TextTask
from sd3_light.parts.fit import FitOptions
from sd3_light.parts.images import load_pools
from sd3_light.parts.sizes import TextSize, VaeSize
from sd3_light.parts.vae import VaeOptions
from sd3_light.parts.verb import PartsOptions
from sd3_light.world import write_dataset
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(verb.VAE_SIZES, "tiny", VaeSize((8, 8, 8, 8), 1, 4))
        patch.setitem(verb.TEXT_SIZES, "tiny", TextSize(32, 32, 64, 2, (8, 8, 16, 16), (1, 1, 1, 1)))
        yield


@pytest.fixture(scope="module")
def data(data_toml: Path) -> Path:
    return data_toml


def options(**more: Any) -> PartsOptions:
    fit = FitOptions(steps=6, evaluate_every=3)
    defaults = {
        "vae_size": "tiny", "text_size": "tiny", "vae": VaeOptions(batch=4), "text": TextOptions(batch=8),
        "vae_fit": fit, "text_fit": fit, "workers": 0, "vocabulary": 1000,
    }  # fmt: skip
    return PartsOptions(**{**defaults, **more})


@pytest.fixture(scope="module")
def built(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parts") / "out"
    assert verb.run(data, out, options()).trained == ("vae", "text")
    return out


def test_the_folder_is_complete_and_the_stock_pipeline_loads_it(built: Path) -> None:
    assert missing_parts(built, transformer=False) == ()
    check_configs(built)
    for name in ("vae", "text_encoder", "text_encoder_3", "judge"):
        made = json.loads((built / name / "made.json").read_text())
        assert made["steps"] == 6
        assert [record["step"] for record in made["history"]] == [3, 6]
    assert (built / "training" / "vae" / "grid.png").is_file()
    weights = built / "vae" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_mode & 0o444 == 0o444 & (built / "vae" / "config.json").stat().st_mode
    pipe = StableDiffusion3Pipeline.from_pretrained(built, transformer=None, local_files_only=True)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 24}
    prompt, _, pooled, _ = pipe.encode_prompt("a red circle", None, None, **options)
    assert prompt.shape[2] == 64
    assert pooled.shape == (1, 64)
    latents = pipe.vae.encode(torch.zeros(1, 3, 32, 32)).latent_dist.mean
    assert latents.shape == (1, 16, 4, 4)


def test_an_interrupted_run_continues_to_the_same_bytes(built: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for only in ("vae", "text"):
        with pytest.raises(Stopped, match="stop-after"):
            verb.run(data, out, options(only=only, stop_after=1e-9))
        verb.run(data, out, options(only=only))
    for file in (*built.rglob("*.safetensors"), *built.glob("tokenizer*/*.json")):
        relative = file.relative_to(built)
        if relative.parts[0] != "training":
            assert (out / relative).read_bytes() == file.read_bytes(), relative


def test_a_judge_shares_no_captions(built: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other captions, other weights; VAE and tokenizers stay the same, and an interruption changes nothing."""
    captions: dict[str, set[str]] = {}
    seeds: dict[str, int] = {}

    def note(self: verb._PartsRun, title: str, task: TextTask, *rest: Any) -> dict[str, Any]:
        start = int(task.data.first[task.data.held_out])
        captions[title] = set(task.data.texts[start:])
        seeds[title] = task.options.seed
        return train(self, title, task, *rest)

    train = verb._PartsRun._train_towers
    monkeypatch.setattr(verb._PartsRun, "_train_towers", note)
    apart = {"judge_share": 0.4, "judge_fit": FitOptions(steps=4, evaluate_every=2)}
    out = tmp_path / "out"
    assert verb.run(data, out, options(**apart)).trained == ("vae", "text", "judge")
    assert captions["text"]
    assert captions["judge"]
    first = {texts[0] for texts in all_captions(data)}
    assert not captions["text"] & captions["judge"] & first
    assert seeds == {"text": 0, "judge": 1}
    made = json.loads((out / "judge" / "made.json").read_text())
    assert (made["judge_share"], made["steps"], made["seed"]) == (0.4, 4, 1)
    assert shares_captions(built)
    assert not shares_captions(out)
    encoder = load_file(out / "text_encoder_2" / "model.safetensors")
    weights = load_file(out / "judge" / "model.safetensors")
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    assert not torch.equal(encoder[name], weights[name])
    assert verb.run(data, out, options(**apart)).trained == ()
    again = tmp_path / "again"
    for only in ("vae", "text"):
        verb.run(data, again, options(only=only, **apart))
    assert not (again / "judge").exists()
    with pytest.raises(Stopped, match="stop-after"):
        verb.run(data, again, options(only="judge", stop_after=1e-9, **apart))
    assert verb.run(data, again, options(only="judge", **apart)).missing == ()
    assert (again / "judge" / "model.safetensors").read_bytes() == (out / "judge" / "model.safetensors").read_bytes()


def all_captions(data: Path) -> list[tuple[str, ...]]:
    with TemporaryDirectory() as folder:
        return [texts for pool in load_pools(load_images(data), Path(folder), 1000, 0) for texts in pool.captions]


@pytest.mark.parametrize(("only", "task"), [("vae", verb.VaeTask), ("text", verb.TextTask)])
def test_a_signal_stops_inside_a_step(
    only: Any, task: Any, built: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is abandoned, as it may take minutes on a CPU; the same command repeats it."""
    loss = task.loss

    def signalled(self: Any, step: int) -> Any:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return loss(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(task, "loss", signalled)
        with pytest.raises(Stopped, match=f"^SIGTERM; {only} is saved at step 2$"):
            verb.run(data, tmp_path / "out", options(only=only))
    verb.run(data, tmp_path / "out", options(only=only))
    for file in (built / ("vae" if only == "vae" else "text_encoder_3")).glob("*.safetensors"):
        assert (tmp_path / "out" / file.relative_to(built)).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("place", ["load_pools", "channel_statistics"])
def test_a_signal_stops_it_at_once(place: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verb, place, lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match=r"^SIGTERM; no part is in training, and what is finished is kept$"):
            verb.run(data, tmp_path / "out", options(only="vae"))
    assert verb.run(data, tmp_path / "out", options(only="vae")).trained == ("vae",)


def test_the_batch_fits_the_device_unless_the_run_has_another(data: Path, tmp_path: Path) -> None:
    short = FitOptions(steps=2, evaluate_every=2)
    default = {"vae": VaeOptions(), "text": TextOptions(), "vae_fit": short, "text_fit": short}
    for name, batches in (("a", {}), ("b", {"vae": VaeOptions(batch=3), "text": TextOptions(batch=5)})):
        out = tmp_path / name
        for only, expected in (("vae", (128, 3)), ("text", (64, 5))):
            with pytest.raises(Stopped):
                verb.run(data, out, options(only=only, stop_after=1e-9, **{**default, **batches}))
            assert verb.saved_identity(out / "training" / only)["batch"] == expected[name == "b"]
            verb.run(data, out, options(only=only, **default))


def test_continuing_from_a_vae(built: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    verb.run(data, out, options(only="vae", init=built, channels=4))
    assert json.loads((out / "vae" / "config.json").read_text())["latent_channels"] == 16
    assert not (out / "text_encoder").exists()


def test_random_text_encoders(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    verb.run(data, out, options(only="text", random_text=True))
    assert (out / "text_encoder_3" / "model.safetensors").is_file()
    assert not (out / "judge").exists()
    shutil.copytree(DEMO / "vae", out / "vae")  # from elsewhere, with another note
    assert verb.run(data, out, options()) == verb.PartsResult((), (), load_images(data))


def test_other_images_are_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        verb.run(data, out, options(only="vae", stop_after=1e-9))
    changed = Path(shutil.copytree(data.parent, tmp_path / "changed")) / "data.toml"
    (changed.parent / "images" / "000001.png").unlink()
    refused("was started with images", verb.run, changed, out, options(only="vae"))


@pytest.mark.parametrize("only", ["vae", "text"])
def test_too_few_images_to_hold_one_out_are_refused(tmp_path: Path, only: str) -> None:
    """Without a held-out image the VAE would report 100 dB, and the text encoders have nothing to find."""
    write_dataset(tmp_path / "images", 3, seed=2)
    with pytest.raises(UserError, match=r"3 images are too few: none is held out.*; give at least 4 of one size"):
        verb.run(tmp_path / "images", tmp_path / "out", options(only=only))
    verb.run(tmp_path / "images", tmp_path / "random", options(only="text", random_text=True))


def test_a_folder_with_other_files_and_a_train_toml_are_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('output_dir = "run"\ndataset = "data.toml"\n')
    refused("already exists", verb.run, data, tmp_path, options())
    with pytest.raises(ConfigFaults, match="not a dataset TOML"):
        verb.run(tmp_path / "train.toml", tmp_path / "out", options())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vae_size": "huge"}, "--vae-size: unknown size 'huge'; give one of tiny, small, medium"),
        ({"only": "t5"}, "--only: unknown part 't5'"),
        ({"vae": VaeOptions(decoder_only=True)}, "--decoder-only keeps an existing encoder"),
        ({"only": "judge"}, "--only judge trains a separate judge; give the share"),
        ({"random_text": True, "judge_share": 0.5}, "--random-text trains on no captions; leave out --judge-share"),
    ],
)
def test_contradicting_options(wrong: dict[str, Any], message: str) -> None:
    refused(message, verb.check_options, options(**wrong))


SIZES = ("--vae-size", "tiny", "--text-size", "tiny", "--vae-batch", "4", "--text-batch", "8", "--workers", "0")
SMALL = (*SIZES, "--vae-steps", "2", "--text-steps", "2")


def command(*words: str | Path) -> tuple[int, str]:
    """Return the exit code and all output of `sd3-light parts`, in one line."""
    result = CliRunner().invoke(app, ["parts", *map(str, words)])
    error = f"error: {result.exception}" if result.exception else ""
    return result.exit_code, " ".join(f"{result.output} {error}".split())


def test_a_folder_of_captioned_images(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder needs no TOML; bad files are named; the end shows what follows and warns of a VAE that is not ready."""
    images = Path(shutil.copytree(data.parent / "images", tmp_path / "images"))
    (images / "captionless.png").write_bytes((images / "000000.png").read_bytes())
    (images / "broken.png").write_bytes(b"not an image")
    longest = "a remarkably long caption of a very small red circle that shows where the longest one is"
    table = json.loads((images / "captions.json").read_text(encoding="utf-8"))
    captions = {**table, "broken.png": "a broken file", "000000.png": longest}
    (images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, text = command("images", "parts", *SMALL)
    assert code == 0, text
    made = json.loads((tmp_path / "parts" / "training" / "tokenizers.json").read_text())
    assert f"the longest has {max(made['longest'].values())} tokens: {longest}" in text
    assert re.search(r"rejected 1: not_an_image \(.*?\): images#0/broken\.png", text)
    assert re.search(r"rejected 1: no_caption \(.*?\): images#0/captionless\.png", text)
    listed = (tmp_path / "parts" / "training" / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in listed] == ["not_an_image", "no_caption"]
    assert "all rejected inputs: parts/training/rejects.jsonl" in text
    assert re.search(r"warning: the VAE reconstructs held-out images with \S+ dB, below 20 dB", text)
    assert "next: sd3-light new icons --data images --model parts" in text
    assert 'train_type = "sd3_light_pretrain"' in text
    (pixels, *_) = verb.load_pools(load_images(images), tmp_path, 4, 0)
    assert pixels.size == (128, 128)


def test_a_second_run_changes_nothing_and_names_the_next_command(built: Path, data: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()}
    code, text = command(data, built, *SMALL, "--vae-minutes", "9")
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()} == before
    assert "wrote" not in text
    assert f"{built} is complete: nothing was trained" in text
    assert f"sd3-light parts {data} NEW --init {built}" in text
    assert f"sd3-light new icons --data {data.parent / 'images'} --model {built} --resolution 32" in text
    two = tmp_path / "two.toml"
    folder = f'[[directory]]\npath = "{data.parent / "images"}"\n'
    two.write_text(f"resolutions = [64]\n{folder}{folder}", encoding="utf-8")
    _, text = command(two, built, *SMALL)
    assert f"add the other directories of {two} to icons_data.toml" in text


def test_a_stopped_run_shows_the_whole_command(data: Path, tmp_path: Path) -> None:
    words = (data, tmp_path / "out", *SMALL, "--only", "vae", "--no-compile", "--stop-after", "0.01")
    stop = CliRunner().invoke(app, ["parts", *map(str, words), "--vae-steps", "100000"]).exception
    assert isinstance(stop, Stopped)
    (notes,) = stop.__notes__
    assert notes.startswith(f"continue with: sd3-light parts {data} {tmp_path / 'out'} --only vae --vae-size tiny")
    assert "--vae-batch 4" in notes
    assert "--no-compile" in notes
    assert "same options" not in notes
