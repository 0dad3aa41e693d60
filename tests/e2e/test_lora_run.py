"""Runs that train an adapter, with the loop, checkpoints and exports of pretraining."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.cli import app
from sd3_light.config.faults import UserError
from sd3_light.evaluate import verb as evaluate
from sd3_light.export import verb as export
from sd3_light.export.lora_file import read_lora
from sd3_light.export.proof import ProofError
from sd3_light.model.lora_layers import is_lora_name
from sd3_light.model.part_configs import WEIGHTS_STEM
from sd3_light.report import verb as report
from sd3_light.train.verb import Resume
from tests.checkpoints import assert_same_checkpoint
from tests.poisoned import poison
from tests.project import Project

STEPS = 5
PROMPT = "a small red circle on a white background"


def use_adapter(project: Project, keys: str = "rank = 4\nalpha = 8.0\ndropout = 0.2") -> Project:
    """Change the project to train an adapter on the shipped demo model."""
    text = project.train_toml.read_text()
    for old, new in (
        ('train_type = "sd3_light_pretrain"\n', ""),
        ('init = "random"', f'init = "{DEMO}"'),
        ('size = "tiny2"\n', ""),
        ("max_steps = 4", f"max_steps = {STEPS}"),
    ):
        assert old in text
        text = text.replace(old, new)
    project.train_toml.write_text(f"{text}\n[adapter]\n{keys}\n")
    return project


def file_of(project: Project, step: int = STEPS, run: str = "run") -> Path:
    return Path(project.folder / run / "exports" / checkpoint_name(step) / "pytorch_lora_weights.safetensors")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """A finished LoRA run with evaluation, grids, dropout, EMA and a proven export."""
    project = use_adapter(cached_project.copy(tmp_path_factory.mktemp("tuned") / "project"))
    project.hold_out(4)
    text = project.train_toml.read_text()
    text = text.replace("seed = 3\n", 'seed = 3\neval_datasets = ["eval.toml"]\neval_every_n_steps = 5\n')
    text += f'\n[sampling]\nprompts = ["{PROMPT}"]\nevery_n_steps = 5\nsteps = 2\n'
    project.train_toml.write_text(text)
    project.train()
    return project


def test_only_the_adapter_is_saved(tuned: Project) -> None:
    proof = json.loads((file_of(tuned).parent / "proof.json").read_text())
    assert proof["loaded_by"] == "load_lora_weights of stock diffusers"
    tensors = load_file(file_of(tuned))
    assert len(tensors) == 2 * 31
    assert all(name.startswith("transformer.transformer_blocks.") for name in tensors)
    saved = open_checkpoint(tuned.run / "checkpoints" / checkpoint_name(STEPS))
    assert {name.partition("/")[0] for name in saved.shapes} == {"param", "ema", "exp_avg", "exp_avg_sq", "step"}
    assert all(is_lora_name(name) for name in saved.shapes)
    lora, facts = read_lora(file_of(tuned)), read_lora(file_of(tuned)).facts
    assert (facts["adapter"]["rank"], facts["adapter"]["alpha"], facts["step"]) == (4, 8.0, STEPS)
    kind = "transformer_blocks.0.attn.to_q"
    up, down = (saved.tensor(f"ema/{kind}.lora_{part}.default.weight") for part in "BA")
    assert torch.allclose(lora.modules[kind].delta(), 8.0 / 4 * up @ down, atol=1e-6)


def test_it_is_evaluated_sampled_and_reported(tuned: Project) -> None:
    losses = {event["weights"]: event["flow"] for event in tuned.events("eval")}
    assert set(losses) == {"raw", "ema"}
    assert losses["raw"] != losses["ema"]
    assert [path.name for path in (tuned.run / "samples").iterdir()] == ["step-00000005.png"]
    assert tuned.events("start")[0]["engine"] == "torch"
    console = Console(record=True, width=200)
    console.print(report.render(report.run(tuned.run)))
    assert "a LoRA of rank 4 (63,488 weights) on the weights of" in console.export_text()
    (trained,) = (event["flow"] for event in tuned.events("eval") if event["weights"] == "ema")
    losses = evaluate.validation_losses(tuned.load(), tuned.run)
    assert losses["eval"]["flow"] == pytest.approx(trained, rel=1e-4)
    base = evaluate.validation_losses(tuned.load(), DEMO)
    assert base["eval"]["flow"] != pytest.approx(trained, rel=1e-3)


def test_the_export_command_writes_the_same_or_names_the_cause(tuned: Project, unproven: None) -> None:
    same = export.run(tuned.run, tuned.folder / "again") / file_of(tuned).name
    assert same.read_bytes() == file_of(tuned).read_bytes()
    raw = export.run(tuned.run, tuned.folder / "raw", weights="raw") / file_of(tuned).name
    assert raw.read_bytes() != file_of(tuned).read_bytes()
    out = tuned.folder / "failed"
    for name, error, message in (
        ("write_adapter_file", UserError("lora_A is too large"), "lora_A is too large"),
        ("prove_adapter", ProofError("it differs by 1.0"), "it differs by 1.0. The run is unchanged"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"sd3_light.export.adapter_folder.{name}", Mock(side_effect=error))
            with pytest.raises(UserError) as raised:
                export.run(tuned.run, out)
        assert str(raised.value) == f"{out} was not written: {message}"
        assert not out.exists()


def test_an_interrupted_run_resumes_exactly(tuned: Project, unproven: None) -> None:
    """With dropout, which is seeded by step and micro-batch; activation checkpointing changes nothing."""
    start = tuned.run / "checkpoints" / checkpoint_name(2)
    overrides = ('output_dir="resumed"', "activation_checkpointing=true")
    tuned.train(*overrides, resume=Resume(start))
    assert [(e["step"], e["loss"], e["grad_norm"]) for e in tuned.events("step", "resumed")] == [
        (e["step"], e["loss"], e["grad_norm"]) for e in tuned.events("step") if e["step"] > 2
    ]
    end = Path("checkpoints", checkpoint_name(STEPS))
    assert_same_checkpoint(tuned.folder / "resumed" / end, tuned.run / end)
    assert file_of(tuned, run="resumed").read_bytes() == file_of(tuned).read_bytes()


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("activation_checkpointing=true",), id="recomputed", marks=pytest.mark.slow),
        pytest.param((), id="saved"),
    ],
)
def test_blocks_in_host_memory_change_no_bit(
    tuned: Project, monkeypatch: pytest.MonkeyPatch, unproven: None, keys: tuple[str, ...]
) -> None:
    """Losses, weights, moments, averages, validation, grids and exports, from a checkpoint on."""
    needed = poison(monkeypatch)
    run = f"swapped{len(keys)}"
    start = tuned.run / "checkpoints" / checkpoint_name(2)
    tuned.train(f'output_dir="{run}"', 'swap_blocks="all"', *keys, resume=Resume(start))
    assert needed[:7] == [0, 1, 2, 3, 2, 1, 0]
    end = Path("checkpoints", checkpoint_name(STEPS))
    assert_same_checkpoint(tuned.folder / run / end, tuned.run / end)
    assert file_of(tuned, run=run).read_bytes() == file_of(tuned).read_bytes()
    grid = Path("samples", "step-00000005.png")
    assert (tuned.folder / run / grid).read_bytes() == (tuned.run / grid).read_bytes()
    losses = [[(event["weights"], event["flow"]) for event in tuned.events("eval", name)] for name in ("run", run)]
    assert losses[0] == losses[1]


def test_a_run_starts_from_another_adapter(tuned: Project, project: Project, unproven: None) -> None:
    start = f'rank = 4\nalpha = 2.0\ninit_from_existing = "{file_of(tuned).parent}"'
    use_adapter(project, start).train("max_steps=1", "optimizer.lr=1e-30")
    before, after = read_lora(file_of(tuned)).modules, read_lora(file_of(project, 1)).modules
    assert all(torch.allclose(before[name].delta(), after[name].delta(), atol=1e-6) for name in before)
    with pytest.raises(UserError, match=r"init_from_existing = .* has rank 4 .* write the rank"):
        project.train("adapter.rank=3", 'output_dir="other"')


@pytest.mark.parametrize("bits", [8, 4])
def test_a_run_on_a_quantized_base_exports_for_the_full_model(project: Project, bits: int) -> None:
    """The export is proven on the unquantized model, and a resumed run equals the uninterrupted one."""
    if bits == 4:
        pytest.importorskip("bitsandbytes")
    use_adapter(project, f"rank = 4\nbase_bits = {bits}").train("max_steps=3")
    proof = json.loads((file_of(project, 3).parent / "proof.json").read_text())
    assert 0 < proof["change_of_output"] < 1
    project.train("max_steps=3", 'output_dir="resumed"', resume=Resume(project.run / "checkpoints/step-00000002"))
    assert file_of(project, 3, "resumed").read_bytes() == file_of(project, 3).read_bytes()
    assert read_lora(file_of(project, 3)).facts["adapter"]["base_bits"] == bits


@pytest.mark.parametrize("kind", ["lokr", pytest.param("loha", marks=pytest.mark.slow)])
def test_other_kinds_train_and_are_saved(project: Project, unproven: None, kind: str) -> None:
    use_adapter(project, f'type = "{kind}"\nrank = 4').train("max_steps=2")
    (file,) = project.run.glob("exports/step-*/adapter.safetensors")
    assert all(name.startswith("lycoris_transformer_blocks_") for name in load_file(file))
    assert project.losses()[1] != project.losses()[2]


@pytest.mark.parametrize(
    "keys",
    [
        'type = "lora"',
        pytest.param('type = "lora"\nuse_dora = true', marks=pytest.mark.slow),
        pytest.param('type = "lokr"', marks=pytest.mark.slow),
        pytest.param('type = "loha"', marks=pytest.mark.slow),
    ],
    ids=["lora", "dora", "lokr", "loha"],
)
def test_an_adapter_on_a_base_in_bfloat16_works_in_every_command(project: Project, keys: str) -> None:
    """Large models are published in half precision."""
    base, merged = project.folder / "base", project.folder / "merged"
    shutil.copytree(DEMO, base, ignore=shutil.ignore_patterns("transformer"))
    whole = SD3Transformer2DModel.from_pretrained(DEMO / "transformer", dtype=torch.bfloat16)
    whole.save_pretrained(base / "transformer")
    use_adapter(project, f"{keys}\nrank = 4").train(
        "max_steps=2", f'model.init="{base}"', 'save_dtype="bfloat16"', "optimizer.lr=0.05"
    )
    proofs = [project.run / "exports" / checkpoint_name(2) / "proof.json", project.folder / "again" / "proof.json"]
    command("export", project.run, proofs[1].parent)
    for proof in proofs:
        assert json.loads(proof.read_text())["change_of_output"] > 0
    command("lora", "merge", base, merged, project.run)
    images = {}
    for name, words in {"base": [base], "merged": [merged], "lora": [base, "--lora", project.run]}.items():
        out = project.folder / "images" / name
        command("sample", words[0], PROMPT, *words[1:], "--steps", 2, "--out", out)
        images[name] = np.asarray(Image.open(out / "00000.png"), dtype=np.int64)
    assert np.abs(images["lora"] - images["base"]).max() > 3, "the adapter has an effect"
    assert np.abs(images["lora"] - images["merged"]).mean() < np.abs(images["lora"] - images["base"]).mean() / 2
    file, back = project.folder / "merged.safetensors", project.folder / "back"
    command("convert", merged, file)
    command("convert", file, back, "--base", base)
    states = [load_file(folder / "transformer" / f"{WEIGHTS_STEM}.safetensors") for folder in (merged, back)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def command(*words: object) -> None:
    """Run a command in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
