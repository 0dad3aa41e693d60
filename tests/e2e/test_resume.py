"""A resumed run equals the uninterrupted run, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.data.prepare import CleanPreparer
from sd3_light.data.resident import ResidentCache
from sd3_light.data.stream import MicroBatches
from sd3_light.engines.feed import training_steps
from sd3_light.engines.torch import TorchEngine
from sd3_light.evaluate import verb as evaluate
from sd3_light.export.proof import ProofError
from sd3_light.train import verb as train_stage
from sd3_light.train.verb import Resume
from tests.cases import combinations
from tests.checkpoints import assert_same_checkpoint, read_checkpoint
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")
STEPS = 15
EPOCH = 11
FIRST, LAST = EPOCH - 2, EPOCH + 2
"""The steps of a short run across the end of an epoch."""


def settings(out: str = "resumed", **keys: int) -> tuple[str, ...]:
    values = {"max_steps": STEPS, "checkpoint_every_n_steps": 100, **keys}
    return (f'output_dir="{out}"', *(f"{key}={value}" for key, value in values.items()))


def checkpoint(project: Project, step: int, run: str = "run") -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


def numbers(project: Project, run: str, first: int) -> list[tuple[Any, ...]]:
    """Return the logged training values of each step after ``first``."""
    keys = ("step", "samples", "loss", "flow", "grad_norm", "lr")
    return [tuple(event[key] for key in keys) for event in project.events("step", run) if event["step"] > first]


def require_same_steps(whole: Project, project: Project, *overrides: str, **keys: int) -> None:
    """Train from `FIRST` to `LAST` and compare with the uninterrupted run."""
    project.train(*settings(max_steps=LAST, **keys), *overrides, resume=Resume(checkpoint(whole, FIRST)))
    assert numbers(project, "resumed", 0) == numbers(whole, "run", FIRST)[: LAST - FIRST]
    assert_same_checkpoint(checkpoint(project, LAST, "resumed"), checkpoint(whole, LAST))


class Killed(Exception):
    """Raised to kill a run."""


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Make the next run fail in the step after ``steps``."""
    real, done = TorchEngine.train_step, 0

    def train_step(self: TorchEngine, *args: Any) -> Any:
        nonlocal done
        done += 1
        if done > steps:
            raise Killed
        return real(self, *args)

    monkeypatch.setattr(TorchEngine, "train_step", train_step)


@pytest.mark.parametrize("workers", combinations((0, 2), fast=[(0,)]))
def test_noise_added_after_the_copy_to_the_device_gives_the_same_run(
    whole: Project, project: Project, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """GPUs get moments and add noise themselves; here the CPU is that device."""
    sent = []

    def steps(source: Any, engine: Any, preparer: Any, prefetch_to: Any, *rest: Any) -> Any:
        monkeypatch.setattr(CleanPreparer, "prepare_inputs", lambda self, batch: sent.append(1) or clean(self, batch))
        return training_steps(source, engine, preparer, torch.device("cpu"), *rest)

    clean = CleanPreparer.prepare_inputs
    monkeypatch.setattr("sd3_light.train.verb.training_steps", steps)
    require_same_steps(whole, project, num_dataloader_workers=workers)
    assert bool(sent) == (workers == 0), "workers prepare in their own processes"


@pytest.mark.parametrize(
    ("residence", "workers"), combinations(("host", "device"), (0, 2), fast=[("host", 2), ("device", 0)])
)
def test_a_cache_in_memory_gives_the_same_run(
    whole: Project, project: Project, monkeypatch: pytest.MonkeyPatch, residence: str, workers: int
) -> None:
    """Gathered by the workers, or on the device that adds noise; here the CPU is that device."""

    def steps(source: Any, engine: Any, preparer: Any, prefetch_to: Any, *rest: Any) -> Any:
        assert isinstance(source.resident, ResidentCache)
        if residence == "device":
            source.resident.device = torch.device("meta")  # anything but the host
        return training_steps(source, engine, preparer, torch.device("cpu") if residence == "device" else None, *rest)

    monkeypatch.setattr("sd3_light.train.verb.training_steps", steps)
    require_same_steps(whole, project, f'cache_residence="{residence}"', num_dataloader_workers=workers)


IMPORTANT = (EPOCH - 1, EPOCH, EPOCH + 1)


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step in IMPORTANT else pytest.mark.slow) for step in range(1, STEPS)]
)
def test_a_resumed_run_equals_the_uninterrupted_run(
    whole: Project, project: Project, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """From every step, including the last of an epoch and the first of the next."""
    done = project.train(*settings(), resume=Resume(checkpoint(whole, step)))
    lines = capfd.readouterr().err.splitlines()
    assert f"resumed from {checkpoint(whole, step)} (step {step} of {STEPS})" in lines
    assert f"finished: {STEPS} steps, {4 * STEPS} samples; the run is in {project.folder / 'resumed'}" in lines
    assert (done.step, done.samples) == (STEPS, 4 * STEPS)
    (event,) = project.events("resume", "resumed")
    assert (event["step"], event["world"]) == (step, 1)
    resumed = numbers(project, "resumed", 0)
    assert len(resumed) == STEPS - step
    assert resumed == numbers(whole, "run", step)
    assert_same_checkpoint(checkpoint(project, STEPS, "resumed"), checkpoint(whole, STEPS))


def test_log_averages_over_several_steps_survive_a_resume(project: Project) -> None:
    """The sums since the last log line are in the checkpoint."""
    overrides = {"max_steps": 8, "logging_steps": 4, "checkpoint_every_n_steps": 3}
    project.train(*settings("run", **overrides))
    project.train(*settings(**overrides), resume=Resume(checkpoint(project, 6)))
    assert [event["step"] for event in project.events("step")] == [4, 8]
    (resumed,), uninterrupted = project.events("step", "resumed"), project.events("step")[1]
    assert resumed["steps"] == 4
    for key in ("loss", "flow", "grad_norm", "band", "param_norm", "samples"):
        assert resumed[key] == uninterrupted[key], key


@pytest.mark.parametrize("killed", [7, 2], ids=["after a checkpoint", "before the first"])
def test_a_killed_run_resumes_from_its_newest_checkpoint(
    whole: Project, project: Project, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """Without a checkpoint the same command starts the run."""
    assert sorted(whole.losses()) == list(range(1, STEPS + 1))
    assert len(set(whole.losses().values())) == STEPS
    last = killed + 2
    overrides = settings("run", max_steps=last, checkpoint_every_n_steps=3)
    with monkeypatch.context() as patch:
        kill_after(patch, killed)
        with pytest.raises(Killed):
            project.train(*overrides)
    project.train(*overrides, resume=Resume())
    starts = [event["step"] for event in (*project.events("start"), *project.events("resume"))]
    assert starts == ([0, 6] if killed == 7 else [0, 0])
    steps = [event["step"] for event in project.events("step")]
    assert steps == [*range(1, killed + 1), *range(killed // 3 * 3 + 1, last + 1)]
    assert project.losses() == {step: loss for step, loss in whole.losses().items() if step <= last}
    assert_same_checkpoint(checkpoint(project, last), checkpoint(whole, last))


def test_an_incomplete_checkpoint_is_skipped(whole: Project, project: Project) -> None:
    for step in (4, 5):
        shutil.copytree(checkpoint(whole, step), checkpoint(project, step, "resumed"))
    (checkpoint(project, 5, "resumed") / "index.json").unlink()
    project.train(*settings(max_steps=8), resume=Resume())
    assert project.events("resume", "resumed")[0]["step"] == 4
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 4)[:4]


def test_a_damaged_checkpoint_is_reported_and_a_restart_sets_it_aside(whole: Project, project: Project) -> None:
    copy = Path(shutil.copytree(checkpoint(whole, 4), project.folder / "damaged"))
    file = copy / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"checkpoint {copy} is damaged"):
        project.train(*settings(), resume=Resume(copy))
    shutil.copytree(checkpoint(whole, 4), checkpoint(project, 4, "resumed"))
    (checkpoint(project, 4, "resumed") / "rank-00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"step-00000004 \(rank-00000.safetensors has 7 of \d+ bytes\).*--restart"):
        project.train(*settings(max_steps=5), resume=Resume())
    project.train(*settings(max_steps=5), resume=Resume(restart=True))
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 0)[:5]
    kept = checkpoint(project, 4, "resumed").parent / "abandoned-step-00000004" / "rank-00000.safetensors"
    assert kept.read_bytes() == b"damaged"


def test_later_checkpoints_are_set_aside(whole: Project, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    for step in (4, 6, 7):
        shutil.copytree(checkpoint(whole, step), checkpoint(project, step, "resumed"))
    project.train(*settings(max_steps=5), resume=Resume(checkpoint(project, 4, "resumed")))
    output = capfd.readouterr().err
    folder = checkpoint(project, 4, "resumed").parent
    for step in (6, 7):
        assert f"set aside checkpoints/abandoned-{checkpoint_name(step)}" in output
        assert_same_checkpoint(folder / f"abandoned-{checkpoint_name(step)}", checkpoint(whole, step))
    project.train(*settings(max_steps=8), resume=Resume())
    assert [event["step"] for event in project.events("resume", "resumed")] == [4, 5]
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 4)[:4]


def test_a_failed_export_is_made_when_the_run_is_resumed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are done and saved: only the export is missing."""

    def fail(*_: Any) -> None:
        raise ProofError("it does not load")

    with monkeypatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", fail)
        with pytest.raises(UserError, match=r"the export at step 2 failed: it does not load; .*: resume, or") as error:
            project.train(*settings("run", max_steps=2))
    assert "disk" not in str(error.value), "the disk is not the cause"
    assert list((project.run / "exports").iterdir()) == []
    for _ in range(2):
        project.train(*settings("run", max_steps=2), resume=Resume())
    assert [path.name for path in (project.run / "exports").iterdir()] == ["step-00000002"]
    assert [event["step"] for event in project.events("export")] == [2], "it is made once"
    assert [event["step"] for event in project.events("step")] == [1, 2]


def test_a_finished_run_is_neither_resumed_nor_overwritten(
    whole: Project, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    done = project.train(*settings(), resume=Resume(checkpoint(whole, STEPS)))
    assert done.step == STEPS
    line = f"already finished: step {STEPS} of {STEPS}; raise max_steps or epochs to train more"
    output = capfd.readouterr().err.splitlines()
    assert line in output
    assert not any(text.startswith(("finished:", "train: ")) for text in output)
    assert project.events("step", "resumed") == []
    before = (whole.run / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match=rf"{whole.run} holds a run \(step-00000015\); continue it with --resume"):
        whole.train()
    assert (whole.run / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("micro_batch_size_per_gpu=2", r"trained on another order of data .*--reset-dataloader"),
        ("seed=4", "another order of data"),
        ('model.size="tiny3"', r"is of another model \(differs in"),
        ('optimizer.type="muon"', r"trained with optimizer.type = 'adamw', .* --reset-optimizer"),
    ],
)
def test_other_data_and_models_are_rejected(whole: Project, project: Project, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        project.train(*settings(), change, resume=Resume(checkpoint(whole, 4)))


def test_the_dataloader_can_be_reset(whole: Project, project: Project) -> None:
    """After a reset of the data the batch size may change; weights, moments and the step count continue."""
    resume_options = Resume(checkpoint(whole, 4), reset_dataloader=True)
    done = project.train(*settings(max_steps=6, micro_batch_size_per_gpu=2), resume=resume_options)
    assert (done.step, done.samples, done.position) == (6, 16 + 4, 2)
    saved = open_checkpoint(checkpoint(project, 6, "resumed"))
    assert saved.tensor("step/proj_out.bias").item() == 6.0, "AdamW keeps its step count"
    project.train(*settings("same", max_steps=6), resume=resume_options)
    assert numbers(project, "same", 0)[0][2] != numbers(whole, "run", 4)[0][2], (
        "samples differ from those of the fifth step"
    )


@pytest.mark.parametrize(("reset", "first"), [(False, 4), (True, 0)])
def test_the_first_shards_are_requested_before_the_model_is_loaded(
    whole: Project, project: Project, monkeypatch: pytest.MonkeyPatch, reset: bool, first: int
) -> None:
    happened: list[object] = []
    monkeypatch.setattr(MicroBatches, "prefetch_step", lambda self, step: happened.append(step))
    make_state = train_stage.make_train_state
    monkeypatch.setattr(train_stage, "make_train_state", lambda *args: happened.append("model") or make_state(*args))
    project.train(*settings(max_steps=5), resume=Resume(checkpoint(whole, 4), reset_dataloader=reset))
    assert happened == [first, "model"]


def test_epochs_count_from_the_start_of_the_data(whole: Project, project: Project) -> None:
    overrides = ("epochs=1", *settings(max_steps=100))
    assert project.train(*overrides, resume=Resume(checkpoint(whole, FIRST))).step == EPOCH
    resume_options = Resume(checkpoint(whole, 4), reset_dataloader=True)
    done = project.train("epochs=1", *settings("reset", max_steps=100), resume=resume_options)
    assert (done.step, done.position) == (4 + EPOCH, EPOCH)


def test_the_optimizer_can_be_reset(whole: Project, project: Project) -> None:
    project.train(*settings(max_steps=7), resume=Resume(checkpoint(whole, 4), reset_optimizer=True))
    resumed, uninterrupted = numbers(project, "resumed", 0), numbers(whole, "run", 4)
    assert resumed[0] == uninterrupted[0], "the first loss has the same weights and data"
    assert resumed[1] != uninterrupted[1], "then AdamW without its moments differs"
    assert open_checkpoint(checkpoint(project, 7, "resumed")).tensor("step/proj_out.bias").item() == 3.0


def test_the_learning_rate_of_the_checkpoint_is_used_unless_reset(
    whole: Project, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    resume_options = Resume(checkpoint(whole, 4))
    project.train(*settings("kept", max_steps=6), "optimizer.lr=5e-4", "warmup_steps=9", resume=resume_options)
    assert [event["lr"] for event in project.events("step", "kept")] == [1e-3, 1e-3]
    assert "checkpoint's warmup_steps = 0, optimizer.lr = 0.001; --reset-optimizer-params" in capfd.readouterr().err

    resume_options = Resume(checkpoint(whole, 4), reset_optimizer_params=True)
    project.train(*settings(max_steps=6), "optimizer.lr=5e-4", resume=resume_options)
    assert [event["lr"] for event in project.events("step", "resumed")] == [5e-4, 5e-4]
    assert numbers(project, "resumed", 0)[0][2] == numbers(whole, "run", 4)[0][2]
    assert open_checkpoint(checkpoint(project, 6, "resumed")).tensor("step/proj_out.bias").item() == 6.0, (
        "moments are kept"
    )


@pytest.mark.slow  # a step of Muon takes half a minute on a CPU without bf16
def test_a_reset_allows_another_optimizer(whole: Project, project: Project) -> None:
    resume_options = Resume(checkpoint(whole, 4), reset_optimizer=True)
    project.train(*settings(max_steps=6), 'optimizer.type="muon"', resume=resume_options)
    saved = open_checkpoint(checkpoint(project, 6, "resumed"))
    assert saved.names("momentum_buffer")


@pytest.mark.parametrize("kind", ["adafactor", "prodigy"])
def test_optimizers_with_state_of_other_shapes_resume_exactly(project: Project, kind: str) -> None:
    if kind == "prodigy":
        pytest.importorskip("prodigyopt")
    keys = (
        *settings("whole", max_steps=4, checkpoint_every_n_steps=2),
        f'optimizer.type="{kind}"',
        "optimizer.lr=1e-2",
    )
    project.train(*keys)
    again = (*settings("resumed", max_steps=4), *keys[-2:])
    project.train(*again, resume=Resume(checkpoint(project, 2, "whole")))
    assert_same_checkpoint(checkpoint(project, 4, "resumed"), checkpoint(project, 4, "whole"))
    assert numbers(project, "resumed", 0) == numbers(project, "whole", 2)


# --- settings that do not change training ------------------------------------------------------


@pytest.mark.parametrize("workers", combinations((1, 4), fast=[(4,)]))
def test_the_number_of_workers_does_not_change_training(whole: Project, project: Project, workers: int) -> None:
    project.train(*settings("run", num_dataloader_workers=workers, dataloader_prefetch_per_worker=2))
    assert numbers(project, "run", 0) == numbers(whole, "run", 0)
    assert_same_checkpoint(checkpoint(project, STEPS), checkpoint(whole, STEPS))


@pytest.mark.parametrize("count", combinations((2, 4), fast=[(4,)]))
def test_gradient_accumulation_gives_the_same_steps(whole: Project, project: Project, count: int) -> None:
    """With the same global batch: 4 samples per step, in 2 or 4 micro-batches."""
    keys = {"max_steps": 5, "micro_batch_size_per_gpu": 4 // count, "gradient_accumulation_steps": count}
    project.train(*settings("run", **keys))
    for ours, theirs in zip(numbers(project, "run", 0), numbers(whole, "run", 0)[:5], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_two_evaluations_of_the_same_weights_are_identical(project: Project) -> None:
    """Twice in one process, with workers, and later from the export."""
    project.hold_out(3)
    sets = 'eval_datasets=[{name="one", config="eval.toml"}, {name="two", config="eval.toml"}]'
    overrides = (sets, "eval_every_n_steps=2")
    project.train(*settings("run", max_steps=2), *overrides, "eval_before_first_step=true")
    project.train(*settings("workers", max_steps=2, num_dataloader_workers=2), *overrides)
    results = {
        (run, event["step"], event["weights"], event["set"]): {key: event[key] for key in event if key[:4] == "flow"}
        for run in ("run", "workers")
        for event in project.events("eval", run)
    }
    assert len(results) == (2 + 1) * 2 * 2
    for (_, step, weights, _), losses in results.items():
        assert len(losses) == 11, "the mean, its standard error, and nine times"
        assert losses == results["run", step, weights, "one"]
    assert len({str(losses) for losses in results.values()}) == 3, "before the first step the EMA equals the weights"
    later = evaluate.validation_losses(project.load(*overrides), project.run / "exports" / "step-00000002")
    assert later["one"] == later["two"] == results["run", 2, "ema", "one"]


def test_activation_checkpointing_changes_nothing(project: Project) -> None:
    """Of the stock blocks; those for CPUs keep everything, and round otherwise."""
    for run, again in (("kept", "false"), ("again", "true")):
        project.train(*settings(run, max_steps=3), "fast=false", f"activation_checkpointing={again}")
    assert numbers(project, "again", 0) == numbers(project, "kept", 0)


def test_the_ema_is_in_every_checkpoint(whole: Project) -> None:
    """ema = d ema + (1 - d) weights after each step, in float32, with the decays d of the ramp."""
    average: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3, 4):
        tensors, _ = read_checkpoint(checkpoint(whole, step))
        weights = {name.removeprefix("param/"): t for name, t in tensors.items() if name.startswith("param/")}
        saved = {name.removeprefix("ema/"): t for name, t in tensors.items() if name.startswith("ema/")}
        assert set(saved) == set(weights)
        assert len(saved) > 50
        if average:
            for name, tensor in saved.items():
                decay = step / (step + 9)
                assert torch.allclose(tensor, decay * average[name] + (1 - decay) * weights[name], atol=1e-7), name
        assert any(not torch.equal(saved[name], weights[name]) for name in saved)
        average = saved
