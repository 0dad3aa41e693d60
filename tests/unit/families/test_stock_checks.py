"""`new` and `check` with the folder of a stock pipeline: what they write, what they accept and what they refuse."""

import io
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sd3_light.check import verb as check
from sd3_light.cli import app
from sd3_light.config import ConfigFaults, Fault, UserError, resolved_toml
from sd3_light.core.registry import family_named, family_of
from sd3_light.export.open_pipeline import open_policy
from sd3_light.new import verb as new
from sd3_light.system import Gpu
from tests.families import TinyFolder
from tests.project import Project

FAMILIES = ["flux", "flux2", "krea2", "prx", "qwen_image", "sana", "z_image"]
Faults = Callable[..., list[tuple[str, str]]]
GPU = (Gpu("a GPU", 24 * 2**30),)
TRAIN = """
output_dir = "run"
dataset = "data.toml"
max_steps = 4
checkpoint_every_n_steps = 2
{top}
[model]
diffusers_path = "{model}"
{keys}
"""


@pytest.fixture
def flux(tmp_path: Path, tiny_folder: TinyFolder) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_folder("flux"), tmp_path / "flux"))


def written(folder: Path, images: Path, model: Path, top: str = "", keys: str = "") -> Path:
    path = folder / "train.toml"
    path.write_text(TRAIN.format(top=top, model=model, keys=keys), encoding="utf-8")
    (folder / "data.toml").write_text(f'resolutions = [64]\n[[directory]]\npath = "{images}"\n', encoding="utf-8")
    return path


@pytest.fixture
def faults(tmp_path: Path, raw_project: Project) -> Faults:
    """Return a function that returns key and problem of all faults."""

    def find(model: Path, top: str = "", keys: str = "") -> list[tuple[str, str]]:
        try:
            check.load(written(tmp_path, raw_project.images, model, top, keys))
        except ConfigFaults as error:
            return [(fault.key, fault.problem) for fault in error.faults]
        return []

    return find


def only_fault(call: Callable[[], object]) -> Fault:
    with pytest.raises(ConfigFaults) as error:
        call()
    (fault,) = error.value.faults
    return fault


def set_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


# --- new and check -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "finetune"])
def test_check_accepts_what_new_writes(
    tmp_path: Path, raw_project: Project, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    family, folder = family_named(name), tiny_folder(name)
    monkeypatch.setattr(type(family), "packages", ())
    if kind == "lora" and not family.loads_adapters:
        refusal = "the stock pipeline of PRX loads no adapter; train the weights: `sd3-light new finetune`"
        with pytest.raises(ConfigFaults, match=f"new: adapter: {refusal}"):
            new.run(kind, str(raw_project.images), str(folder), tmp_path)
        with pytest.raises(UserError, match="random weights; `new finetune` continues its own"):
            new.run("pretrain", str(raw_project.images), str(folder), tmp_path)
        with pytest.raises(ConfigFaults, match=f"adapter: {refusal}"):
            check.load(written(tmp_path, raw_project.images, folder, keys="[adapter]\nrank = 2"))
        return
    project = new.run(kind, str(raw_project.images), str(folder), tmp_path, resolution=64, gpus=GPU)
    loaded = check.load(project.train_toml)
    estimate = check.run(loaded)
    assert estimate.gpu.total == project.memory.needed, "new plans with the formula of check"
    text = project.train_toml.read_text(encoding="utf-8")
    table = tomllib.loads(text)
    assert "SD3" not in text
    assert not {"t5_max_length", "uncond_text"} & table["model"].keys()
    scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    if scheduler.get("use_dynamic_shifting"):
        assert (table["model"].get("flux_shift"), table["model"].get("shift")) == (True, None)
    else:
        assert table["model"]["shift"] == scheduler.get("shift", scheduler.get("flow_shift"))
    console = Console(width=240, file=io.StringIO())
    console.print(check.render(estimate, check.conclude(loaded.train, estimate, check.Target())))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "enable_uncond_text_dropout" not in shown
    for words in (f"{family.title}: ", f"{estimate.setup.cost.parameters:,}", "disk, cache", "GPU memory"):
        assert words in shown


def test_new_writes_the_recipe_of_flux(tmp_path: Path, raw_project: Project, flux: Path) -> None:
    project = new.run("lora", str(raw_project.images), str(flux), tmp_path / "out", gpus=GPU)
    table = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
    assert table["model"]["guidance"] == 1.0
    assert table["sampling"]["guidance"] == 3.5
    assert table["adapter"]["target_modules"] == list(family_named("flux").adapter_targets)  # type: ignore[attr-defined]
    assert project.resolution == 1024
    set_json(flux / "transformer/config.json", guidance_embeds=False)
    project = new.run("lora", str(raw_project.images), str(flux), tmp_path / "schnell", gpus=GPU)
    table = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
    assert "guidance" not in table["model"]
    assert (table["sampling"]["steps"], table["sampling"]["guidance"]) == (4, 1.0), "as schnell is distilled"


GUIDANCE = {"flux": None, "schnell": 1.0, "flux2": 1.0, "krea2": 0.0, "prx": 1.0, "qwen_image": 1.0}
GUIDANCE |= {"sana": 1.0, "wan": 1.0, "z_image": 0.0}


@pytest.mark.parametrize("name", GUIDANCE)
def test_guidance_without_text_dropout_is_named_where_it_compares(
    name: str, tmp_path: Path, raw_project: Project, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denoiser that takes a number needs no dropout; others run once per step up to the guidance that is named."""
    off = GUIDANCE[name]
    family = family_named("flux" if name == "schnell" else name)
    monkeypatch.setattr(type(family), "packages", ())
    model = Path(shutil.copytree(tiny_folder(family.name), tmp_path / name))
    if name == "schnell":
        set_json(model / "transformer/config.json", guidance_embeds=False)
    sampling = "\n[sampling]\nprompts = ['a']\nevery_n_steps = 2\nguidance = {}\n"
    for guidance in (0.0, 1.0, 1.5, 5.0):
        drop = "enable_uncond_text_dropout = false" + sampling.format(guidance)
        loaded = check.load(written(tmp_path, raw_project.images, model, keys=drop))
        lines = [text for _, text in check.conclude(loaded.train, check.run(loaded), check.Target())]
        found = [text for text in lines if "compares with a prediction without text" in text]
        assert bool(found) == (off is not None and guidance > off), (guidance, found)
        assert all(text.endswith(f"or sampling.guidance = {off:g}") for text in found)
        assert family.no_guidance(family.weights.start(loaded.train.model)) == off


def test_a_negative_prompt_needs_a_denoiser_that_runs_twice(flux: Path, faults: Faults) -> None:
    keys = "[sampling]\nprompts = ['a']\nevery_n_steps = 2\nnegative_prompt = 'blurred'"
    problem = "this denoiser takes guidance as a number and no negative prompt"
    assert faults(flux, "", keys) == [("sampling.negative_prompt", problem)]
    set_json(flux / "transformer/config.json", guidance_embeds=False)
    assert faults(flux, "", keys) == []


# --- faults --------------------------------------------------------------------------------------


def test_missing_parts_are_named_singly(flux: Path, faults: Faults, tmp_path: Path, tiny_folder: TinyFolder) -> None:
    assert faults(flux) == []
    (flux / "vae/diffusion_pytorch_model.safetensors").unlink()
    shutil.rmtree(flux / "tokenizer_2")
    found = faults(flux)
    assert {key for key, _ in found} == {"model.diffusers_path"}
    problems = " | ".join(problem for _, problem in found)
    assert "lacks vae/diffusion_pytorch_model.safetensors" in problems
    assert "lacks tokenizer_2/" in problems
    assert "text_encoder_3" not in problems
    set_json(flux / "model_index.json", text_encoder_2=[None, None])
    assert ("model.diffusers_path", "its model_index.json names no text_encoder_2") in faults(flux)
    folder = Path(shutil.copytree(tiny_folder("qwen_image"), tmp_path / "model"))
    denoiser = (folder / "transformer").rename(tmp_path / "denoiser")
    assert faults(folder, "", f'init = "{denoiser}"') == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen_image", ["text_encoder"]),
        ("flux", ["text_encoder", "text_encoder_2"]),
        ("sana", ["vae"]),
        ("wan", ["vae"]),
        ("wan", ["transformer"]),
        ("z_image", ["tokenizer"]),
    ],
)
def test_missing_folders(tmp_path: Path, tiny_folder: TinyFolder, faults: Faults, name: str, parts: list[str]) -> None:
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / name))
    for part in parts:
        shutil.rmtree(folder / part)
    keys = "[adapter]\nrank = 2\n[sampling]\nprompts = ['a']\nevery_n_steps = 2\n"
    keys += "frames = 5" if name == "wan" else ""
    names = ", ".join(f"{part}/" for part in sorted(parts))
    assert faults(folder, "", keys) == [("model.diffusers_path", f"the folder lacks {names}")]


@pytest.mark.parametrize("keys", ["", "[adapter]\nrank = 2"])
@pytest.mark.parametrize("name", ["flux", "krea2", "wan", "z_image"])
def test_a_denoiser_without_its_pipeline_is_one_fault(
    tmp_path: Path, tiny_folder: TinyFolder, faults: Faults, name: str, keys: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / name))
    (folder / "model_index.json").unlink()
    for model in (folder, folder / "transformer"):
        ((key, problem),) = faults(model, "", keys)
        assert key == "model.diffusers_path"
        assert problem == (
            f"{model} has a denoiser of {family_named(name).title} and no model_index.json; give the folder of the "
            "whole pipeline, with model_index.json, VAE and text encoders"
        )
        assert len(faults(model, "", f'type = "{name}"\n{keys}')) == 1


def test_keys_of_other_families_and_numbers_that_do_not_fit_are_refused(
    flux: Path, faults: Faults, raw_project: Project
) -> None:
    keys = 't5_max_length = 12\ntext_tokens = "real"\nuncond_text = "zero"\ntext_recon_gamma = 0.5\nqk_norm = true'
    top = "fast = true\nfp8 = true\npipeline_stages = 2"
    found = dict(faults(flux, top, keys))
    names = {"t5_max_length", "text_tokens", "uncond_text", "text_recon_gamma", "qk_norm"}
    assert {f"model.{name}" for name in names} | {"fast", "fp8", "pipeline_stages"} == set(found)
    assert found["model.t5_max_length"] == "Flux does not know this key: it is the length of SD3's T5 input"
    assert found["pipeline_stages"] == "Flux has no pipeline stages"
    assert found["fast"] == "Flux has no fast blocks"
    assert faults(flux, "", 'uncond_text = "empty"\nuncond_text_dropout = "joint"') == []
    for line in ("t5_max_length = 256", 'text_tokens = "padded"', 'uncond_text_dropout = "per_encoder"'):
        ((key, problem),) = faults(flux, "", line)
        assert key == f"model.{line.partition(' ')[0]}", "with its default value, too"
        assert problem.startswith("Flux does not know this key: ")
    keys = 'train_type = "sd3_light_pretrain"\nsize = "tiny2"\nt5_max_length = 12\nguidance = 1.0\ntext_max_length = 9'
    found = dict(faults(raw_project.model, "", keys))
    assert set(found) == {"model.guidance", "model.text_max_length"}
    (fault,) = faults(flux, "", "text_max_length = 400")
    assert fault == ("model.text_max_length", "its tokenizer accepts at most 16 tokens")
    set_json(flux / "transformer/config.json", in_channels=96, guidance_embeds=False)
    found = dict(faults(flux, "", "guidance = 2.0"))
    assert found["model.diffusers_path"].startswith("its denoiser takes 96 channels, and Flux 16 for a VAE of 4")
    assert found["model.guidance"] == "this denoiser takes no guidance as a number"
    set_json(flux / "transformer/config.json", in_channels=16, joint_attention_dim=40)
    (fault,) = faults(flux)
    assert fault[1] == "its text encoder returns text 32 wide, and the denoiser needs 40"


@pytest.mark.parametrize("keys", ["", 'type = "flux"', "uncond_text_dropout_prob = 0.3"])
def test_the_saved_config_of_a_run_is_accepted(tmp_path: Path, raw_project: Project, flux: Path, keys: str) -> None:
    loaded = check.load(written(tmp_path, raw_project.images, flux, keys=keys))
    check.require(loaded)
    saved = tmp_path / "saved.toml"
    saved.write_text(resolved_toml(loaded), encoding="utf-8")
    again = check.load(saved)
    assert again.train.model == loaded.train.model
    check.require(again)
    saved.write_text(resolved_toml(again), encoding="utf-8")
    assert check.load(saved, ["max_steps=5"]).train.max_steps == 5


def test_other_starts_and_pipelines_are_one_fault(flux: Path, faults: Faults) -> None:
    (fault,) = faults(flux, "", 'init = "random"')
    assert fault[1] == "Flux starts from trained weights only; remove model.train_type and model.init"
    set_json(flux / "transformer/config.json", _class_name="SD3Transformer2DModel")
    ((_, problem),) = faults(flux)
    assert problem.endswith("describes a 'SD3Transformer2DModel', Flux has a FluxTransformer2DModel")
    set_json(flux / "transformer/config.json", _class_name="FluxTransformer2DModel")
    set_json(flux / "model_index.json", _class_name="FluxFillPipeline")
    ((key, problem),) = faults(flux, "", "guidance = 1.0")
    assert key == "model.diffusers_path"
    assert "describes a 'FluxFillPipeline', which is not trained: its denoiser takes images beside the" in problem
    assert problem.endswith("; give a folder of FluxPipeline")
    named = ("model.diffusers_path", "it is a 'FluxFillPipeline', and Flux a FluxPipeline")
    assert faults(flux, "", 'type = "flux"') == [named], "Fill has nearly the denoiser of Flux"
    (fault, problem) = faults(flux, "max_nonfinite_steps = -1")
    assert fault[0] == "max_nonfinite_steps", "with the other faults of the config"
    assert problem[0] == "model.diffusers_path"


@pytest.mark.parametrize("name", ["flux1-dev.safetensors", "flux1-dev-Q4_K_S.gguf"])
def test_single_files_are_refused_with_the_remedy(tmp_path: Path, flux: Path, faults: Faults, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF")
    for keys in ("", 'type = "flux"'):
        ((key, problem),) = faults(file, "", keys)
        assert key == "model.diffusers_path"
        assert problem.startswith(f"{file} is a file; give a diffusers folder")
    ((key, problem),) = faults(flux, "", f'init = "{file}"')
    assert key == "model.init"
    assert problem.startswith(f"{file}: Flux starts from a diffusers folder, not from a single file; remove model.init")


def test_refused_models_are_named(
    tmp_path: Path, tiny_folder: TinyFolder, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        ("flux2", "model_index.json", {"is_distilled": True}, "distilled to few steps"),
        ("krea2", "model_index.json", {"is_distilled": True}, "distilled to few steps"),
        ("qwen_image", "transformer/config.json", {"zero_cond_t": True}, "has zero_cond_t"),
        ("z_image", "transformer/config.json", {"siglip_feat_dim": 8}, "takes images beside the text"),
        ("sana", "transformer/config.json", {"guidance_embeds": True}, "(Sprint)"),
        ("prx", "transformer/config.json", {"patch_size": 1}, "patches of 1"),
    ]
    for name, file, entries, words in cases:
        folder = Path(shutil.copytree(tiny_folder(name), tmp_path / name))
        set_json(folder / file, **entries)
        assert any(words in problem for _, problem in faults(folder)), name
    family = family_named("prx")
    monkeypatch.setattr(type(family), "packages", ("no_such_package",))
    (fault,) = faults(tiny_folder("prx"))
    assert fault == ("model.diffusers_path", "PRX needs no_such_package for its captions, which is not installed")


def test_sides_follow_the_vae(
    tmp_path: Path, raw_project: Project, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Sana's own VAE, which shrinks images 32 times."""
    sana = tiny_folder("sana")
    monkeypatch.setattr("sd3_light.families.stock.checks.StockChecks.side_step", lambda self, model: 32)
    path = written(tmp_path, raw_project.images, sana)
    ratios = 'resolutions = [{}]\nenable_ar_bucket = true\n{}[[directory]]\npath = "{}"\n'
    (tmp_path / "data.toml").write_text(ratios.format(128, "", raw_project.images))
    fault = only_fault(lambda: check.load(path))
    assert (fault.key, fault.hint) == ("directory[0].resolutions", "write side_step = 32")
    assert fault.problem == "the model needs sides that are multiples of 32"
    (tmp_path / "data.toml").write_text(ratios.format(128, "side_step = 32\n", raw_project.images))
    check.load(path)


@pytest.mark.parametrize(("name", "key"), [("z_image", "axes_lens"), ("wan", "rope_max_seq_len")])
def test_positions_may_end(name: str, key: str, tmp_path: Path, raw_project: Project, tiny_folder: TinyFolder) -> None:
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / name))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert config[key] in (32, [256, 32, 32]), "of 16 pixels each"
    path = written(tmp_path, raw_project.images, folder)
    sizes = 'size_buckets = [[{}, 64]]\n[[directory]]\npath = "{}"\n'
    (tmp_path / "data.toml").write_text(sizes.format(528, raw_project.images))
    with pytest.raises(ConfigFaults) as error:
        check.load(path)
    assert "the denoiser's position table ends at 512 px" in [fault.problem for fault in error.value.faults]
    (tmp_path / "data.toml").write_text(sizes.format(512, raw_project.images))
    check.load(path)
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=config))
    policy = open_policy(folder)[1]
    assert policy.size_fault(pipe, 512, 64) is None
    needed = "this model needs sides that are multiples of 16 from 16 to 512"
    assert policy.size_fault(pipe, 528, 64) == f"image size 528x64: {needed}"
    for odd in (None, "long", {}, [], [1]):
        family: Any = family_named(name)
        assert family.position_table({key: odd}) is None


def test_a_hostile_folder_is_a_fault(flux: Path, faults: Faults) -> None:
    for name in ("vae/config.json", "text_encoder_2/config.json", "transformer/config.json"):
        before = (flux / name).read_text()
        for text in ("[]", "{", '{"_class_name": "AutoencoderKL", "latent_channels": "x"}', "{}"):
            (flux / name).write_text(text)
            assert faults(flux), (name, text)
        (flux / name).write_text(before)
    assert faults(flux) == []


# --- clips ---------------------------------------------------------------------------------------


def test_new_names_clips_and_single_files_in_place_of_images(
    tmp_path: Path, flux: Path, tiny_folder: TinyFolder, raw_project: Project
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    (clips / "a.mp4").write_bytes(b"")
    (clips / "a.txt").write_text("a")
    fault = only_fault(lambda: new.run("lora", str(clips), str(flux), tmp_path / "out", gpus=GPU))
    assert fault.problem == "no usable sample (no images)"
    assert fault.hint == "the folder has clips, and Flux trains on images only; clips need Wan"
    fault = only_fault(lambda: check.run(check.load(written(tmp_path, clips, tiny_folder("wan")))))
    assert fault.hint == "the folder has clips: write frames in the dataset TOML"
    for name, words in (("wan", "40 clips and images at 64 px"), ("flux", "40 images at 64 px")):
        options = ["--data", str(raw_project.images), "--model", str(tiny_folder(name)), "--out", str(tmp_path / name)]
        result = CliRunner().invoke(app, ["new", "lora", *options, "--resolution", "64", "--gpu-memory", "24"])
        assert words in result.output, result.output
    file = tmp_path / "flux1-dev.safetensors"
    file.write_bytes(b"")
    fault = only_fault(lambda: new.run("lora", str(raw_project.images), str(file), tmp_path / "file", gpus=GPU))
    assert fault.file == "--model"
    assert fault.problem.startswith(f"{file} is a file; give a diffusers folder")


# --- model.type ----------------------------------------------------------------------------------


class NotAFamily:
    """Anything else."""


def test_a_type_names_the_family(flux: Path, faults: Faults, tmp_path: Path, raw_project: Project) -> None:
    assert faults(flux, "", 'type = "Flux"') == []
    assert faults(flux, "", 'type = "sd3_light.families.flux:Flux"') == []
    found = faults(flux, "", 'type = "sd3"')
    assert any("lacks text_encoder_3/config.json" in problem for _, problem in found), "as SD3 it is not complete"
    ((key, problem),) = faults(flux, "", f'type = "{__name__}:NotAFamily"')
    assert key == "model.type"
    assert problem.endswith("is not a `sd3_light.core.family.Family`; name a class that is one")
    ((key, problem),) = faults(flux, "", 'type = "no_such_package.module:Family"')
    assert "No module named 'no_such_package'" in problem
    ((key, problem),) = faults(flux, "", 'type = "sd3_light.families.base:StockFamily"')
    assert "is an unfinished family; it lacks denoise, " in problem
    for wrong in ("families/mine.py:Mine", "/tmp/mine.py", "flus"):
        ((key, problem),) = faults(flux, "", f'type = "{wrong}"')
        assert (key, problem) == ("model.type", "unknown value")
    train = check.load(written(tmp_path, raw_project.images, flux)).train
    assert family_of(train.model) is family_named("flux")
    assert (train.model.type, train.model.text_max_length) == ("auto", 16)
    assert (train.model.uncond_text_dropout, train.model.uncond_text_dropout_prob) == ("joint", 0.1)
    keys = "uncond_text_dropout_prob = 0.3\ntext_max_length = 9"
    train = check.load(written(tmp_path, raw_project.images, flux, keys=keys)).train
    assert (train.model.uncond_text_dropout_prob, train.model.text_max_length) == (0.3, 9)
