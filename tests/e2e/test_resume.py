"""A resumed run is the run that never stopped, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.store import checkpoint_name, open_checkpoint
from sd3_light.config.faults import UserError
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.proof import ProofError
from sd3_light.stages import evaluate
from sd3_light.stages.train import Resume
from sd3_light.world import write_dataset
from tests.checkpoints import read_checkpoint
from tests.e2e.equal import assert_same_end
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")
STEPS = 15
EPOCH = 11


def settings(out: str = "resumed", **keys: int) -> tuple[str, ...]:
    given = {"max_steps": STEPS, "checkpoint_every_n_steps": 100, **keys}
    return (f'output_dir="{out}"', *(f"{key}={value}" for key, value in given.items()))


def checkpoint(project: Project, step: int, run: str = "run") -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


def numbers(project: Project, run: str, first: int) -> list[tuple[Any, ...]]:
    """All that the log says about the mathematics of each step after ``first``."""
    keys = ("step", "samples", "loss", "flow", "grad_norm", "lr")
    return [tuple(event[key] for key in keys) for event in project.events("step", run) if event["step"] > first]


class Killed(Exception):
    """What stops a run in these tests."""


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The next run dies in the middle of the step after ``steps``."""
    real, done = TorchEngine.train_step, 0

    def train_step(self: TorchEngine, *given: Any) -> Any:
        nonlocal done
        done += 1
        if done > steps:
            raise Killed
        return real(self, *given)

    monkeypatch.setattr(TorchEngine, "train_step", train_step)


def test_the_unbroken_run_is_sound(whole: Project) -> None:
    losses = whole.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS
    assert whole.events("start")[0]["steps_per_epoch"] == EPOCH


def test_the_same_run_again_is_the_same(whole: Project, project: Project) -> None:
    project.train(*settings("again"))
    assert numbers(project, "again", 0) == numbers(whole, "run", 0)
    assert_same_end(checkpoint(project, STEPS, "again"), checkpoint(whole, STEPS))


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_resumed_run_goes_on_as_if_it_never_stopped(whole: Project, project: Project, step: int) -> None:
    """At every step, the last of an epoch and the first of the next among them."""
    done = project.train(*settings(), resume=Resume(checkpoint(whole, step)))
    assert (done.step, done.samples) == (STEPS, 4 * STEPS)
    (event,) = project.events("resume", "resumed")
    assert (event["step"], event["world"]) == (step, 1)
    resumed = numbers(project, "resumed", 0)
    assert len(resumed) == STEPS - step
    assert resumed == numbers(whole, "run", step)
    assert_same_end(checkpoint(project, STEPS, "resumed"), checkpoint(whole, STEPS))


def test_a_run_that_resumes_from_nothing_begins(whole: Project, project: Project) -> None:
    """Before the first step: the same command may be given from the start."""
    project.train(*settings(), resume=Resume())
    assert [event["step"] for event in project.events("start", "resumed")] == [0]
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 0)
    assert_same_end(checkpoint(project, STEPS, "resumed"), checkpoint(whole, STEPS))


def test_a_record_over_several_steps_survives_a_resume(project: Project) -> None:
    """What the log averages since its last line is in the checkpoint."""
    wishes = {"max_steps": 8, "logging_steps": 4, "checkpoint_every_n_steps": 3}
    project.train(*settings("run", **wishes))
    project.train(*settings(**wishes), resume=Resume(checkpoint(project, 6)))
    assert [event["step"] for event in project.events("step")] == [4, 8]
    (resumed,), unbroken = project.events("step", "resumed"), project.events("step")[1]
    assert resumed["steps"] == 4
    for key in ("loss", "flow", "grad_norm", "band", "param_norm", "samples"):
        assert resumed[key] == unbroken[key], key


@pytest.mark.parametrize("killed", [7, 2], ids=["after a checkpoint", "before the first checkpoint"])
def test_a_killed_run_resumes_from_its_newest_checkpoint(
    whole: Project, project: Project, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    wishes = settings("run", checkpoint_every_n_steps=3)
    with monkeypatch.context() as patch:
        kill_after(patch, killed)
        with pytest.raises(Killed):
            project.train(*wishes)
    project.train(*wishes, resume=Resume())
    begun = [event["step"] for event in (*project.events("start"), *project.events("resume"))]
    assert begun == ([0, 6] if killed == 7 else [0, 0])
    steps = [event["step"] for event in project.events("step")]
    assert steps == [*range(1, killed + 1), *range(killed // 3 * 3 + 1, STEPS + 1)]
    assert project.losses() == whole.losses()
    assert_same_end(checkpoint(project, STEPS), checkpoint(whole, STEPS))


def test_a_half_written_checkpoint_is_passed_over(whole: Project, project: Project) -> None:
    for step in (4, 5):
        shutil.copytree(checkpoint(whole, step), checkpoint(project, step, "resumed"))
    (checkpoint(project, 5, "resumed") / "index.json").unlink()
    project.train(*settings(max_steps=8), resume=Resume())
    assert project.events("resume", "resumed")[0]["step"] == 4
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 4)[:4]


def test_a_damaged_checkpoint_is_named(whole: Project, project: Project) -> None:
    copy = Path(shutil.copytree(checkpoint(whole, 4), project.folder / "damaged"))
    file = copy / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"checkpoint {copy} is damaged"):
        project.train(*settings(), resume=Resume(copy))


def test_an_earlier_checkpoint_leaves_the_later_ones_behind(
    whole: Project, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (4, 6, 7):
        shutil.copytree(checkpoint(whole, step), checkpoint(project, step, "resumed"))
    project.train(*settings(max_steps=5), resume=Resume(checkpoint(project, 4, "resumed")))
    said = capfd.readouterr().err
    folder = checkpoint(project, 4, "resumed").parent
    for step in (6, 7):
        assert f"set aside checkpoints/abandoned-{checkpoint_name(step)}" in said
        assert_same_end(folder / f"abandoned-{checkpoint_name(step)}", checkpoint(whole, step))
    project.train(*settings(max_steps=8), resume=Resume())
    assert [event["step"] for event in project.events("resume", "resumed")] == [4, 5]
    assert numbers(project, "resumed", 0) == numbers(whole, "run", 4)[:4]


def test_an_export_that_failed_is_made_when_the_run_is_resumed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are done and saved: nothing is left but the export."""

    def disprove(*_: Any) -> None:
        raise ProofError("it does not load")

    with monkeypatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", disprove)
        with pytest.raises(UserError, match=r"the export at step 2 failed: it does not load; .* then resume"):
            project.train(*settings("run", max_steps=2))
    assert list((project.run / "exports").iterdir()) == []
    for _ in range(2):
        project.train(*settings("run", max_steps=2), resume=Resume())
    assert [path.name for path in (project.run / "exports").iterdir()] == ["step-00000002"]
    assert [event["step"] for event in project.events("export")] == [2], "and it is made once"
    assert [event["step"] for event in project.events("step")] == [1, 2]


def test_a_run_that_is_over_has_nothing_left_to_do(whole: Project, project: Project) -> None:
    done = project.train(*settings(), resume=Resume(checkpoint(whole, STEPS)))
    assert done.step == STEPS
    assert project.events("step", "resumed") == []


def test_a_run_is_not_begun_over_another(whole: Project) -> None:
    before = (whole.run / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match=rf"{whole.run} holds a run \(step-00000015\); continue it with --resume"):
        whole.train()
    assert (whole.run / "log.jsonl").read_bytes() == before


def test_another_order_of_data_is_refused(whole: Project, project: Project) -> None:
    with pytest.raises(UserError, match=r"trained on another order of data .*--reset_dataloader"):
        project.train(*settings(micro_batch_size_per_gpu=2), resume=Resume(checkpoint(whole, 4)))
    with pytest.raises(UserError, match="another order of data"):
        project.train(*settings(seed=4), resume=Resume(checkpoint(whole, 4)))


def test_another_model_is_refused(whole: Project, project: Project) -> None:
    with pytest.raises(UserError, match=r"is of another model \(differs in"):
        project.train('model.size="tiny3"', *settings(), resume=Resume(checkpoint(whole, 4)))


def test_the_dataloader_can_be_reset(whole: Project, project: Project) -> None:
    """With the data anew a run may change its batch size; weights, moments and the count of steps go on."""
    wish = Resume(checkpoint(whole, 4), reset_dataloader=True)
    done = project.train(*settings(max_steps=6, micro_batch_size_per_gpu=2), resume=wish)
    assert (done.step, done.samples, done.position) == (6, 16 + 4, 2)
    saved = open_checkpoint(checkpoint(project, 6, "resumed"))
    assert saved.tensor("step/proj_out.bias").item() == 6.0, "AdamW counts on"
    project.train(*settings("same", max_steps=6), resume=wish)
    assert numbers(project, "same", 0)[0][2] != numbers(whole, "run", 4)[0][2], "other samples than the fifth step's"


def test_epochs_count_from_where_the_data_began(whole: Project, project: Project) -> None:
    wishes = ("epochs=1", *settings(max_steps=100))
    assert project.train(*wishes, resume=Resume(checkpoint(whole, 4))).step == EPOCH
    wish = Resume(checkpoint(whole, 4), reset_dataloader=True)
    done = project.train("epochs=1", *settings("anew", max_steps=100), resume=wish)
    assert (done.step, done.position) == (4 + EPOCH, EPOCH)


def test_the_optimizer_can_be_reset(whole: Project, project: Project) -> None:
    project.train(*settings(max_steps=7), resume=Resume(checkpoint(whole, 4), reset_optimizer=True))
    resumed, unbroken = numbers(project, "resumed", 0), numbers(whole, "run", 4)
    assert resumed[0] == unbroken[0], "the first loss is of the same weights and data"
    assert resumed[1] != unbroken[1], "then AdamW without its past goes elsewhere"
    assert open_checkpoint(checkpoint(project, 7, "resumed")).tensor("step/proj_out.bias").item() == 3.0


def test_the_checkpoints_rate_holds_unless_the_configs_is_asked_for(
    whole: Project, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    wish = Resume(checkpoint(whole, 4))
    project.train(*settings("kept", max_steps=6), "optimizer.lr=5e-4", "warmup_steps=9", resume=wish)
    assert [event["lr"] for event in project.events("step", "kept")] == [1e-3, 1e-3]
    assert "checkpoint's warmup_steps = 0, optimizer.lr = 0.001; --reset_optimizer_params" in capfd.readouterr().err

    wish = Resume(checkpoint(whole, 4), reset_optimizer_params=True)
    project.train(*settings(max_steps=6), "optimizer.lr=5e-4", resume=wish)
    assert [event["lr"] for event in project.events("step", "resumed")] == [5e-4, 5e-4]
    assert numbers(project, "resumed", 0)[0][2] == numbers(whole, "run", 4)[0][2]
    assert open_checkpoint(checkpoint(project, 6, "resumed")).tensor("step/proj_out.bias").item() == 6.0, "moments stay"


def test_another_optimizer_needs_its_state_dropped(whole: Project, project: Project) -> None:
    with pytest.raises(UserError, match=r"trained with optimizer.type = 'adamw', .* --reset_optimizer"):
        project.train(*settings(), 'optimizer.type="muon"', resume=Resume(checkpoint(whole, 4)))
    wish = Resume(checkpoint(whole, 4), reset_optimizer=True)
    project.train(*settings(max_steps=6), 'optimizer.type="muon"', resume=wish)
    saved = open_checkpoint(checkpoint(project, 6, "resumed"))
    assert saved.names("momentum_buffer")


# --- the same training by other means ----------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_trains_the_same(whole: Project, project: Project, workers: int) -> None:
    project.train(*settings("run", num_dataloader_workers=workers, dataloader_prefetch_per_worker=2))
    assert numbers(project, "run", 0) == numbers(whole, "run", 0)
    assert_same_end(checkpoint(project, STEPS), checkpoint(whole, STEPS))


@pytest.mark.parametrize("count", [2, 4])
def test_accumulation_makes_the_same_steps(whole: Project, project: Project, count: int) -> None:
    """At equal global batch: 4 samples a step, in 2 or 4 parts."""
    project.train(*settings("run", micro_batch_size_per_gpu=4 // count, gradient_accumulation_steps=count))
    for ours, theirs in zip(numbers(project, "run", 0), numbers(whole, "run", 0), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_two_evaluations_of_the_same_weights_are_identical(project: Project) -> None:
    """In one process one after the other, with workers, and of the export later."""
    write_dataset(project.folder / "held_out", 6, seed=2, held_out=True)
    (project.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "held_out"\n')
    sets = 'eval_datasets=[{name="one", config="eval.toml"}, {name="two", config="eval.toml"}]'
    wishes = (sets, "eval_every_n_steps=2", "eval_before_first_step=true")
    project.train(*settings("run", max_steps=2), *wishes)
    project.train(*settings("workers", max_steps=2, num_dataloader_workers=2), *wishes)
    found = {
        (run, event["step"], event["weights"], event["set"]): {key: event[key] for key in event if key[:4] == "flow"}
        for run in ("run", "workers")
        for event in project.events("eval", run)
    }
    assert len(found) == 2 * 2 * 2 * 2
    for (_, step, weights, _), losses in found.items():
        assert len(losses) == 10
        assert losses == found["run", step, weights, "one"]
    assert len({str(losses) for losses in found.values()}) == 3, "before the first step the average is the weights"
    later = evaluate.validation_losses(project.load(*wishes), project.run / "exports" / "step-00000002")
    assert later["one"] == later["two"] == found["run", 2, "ema", "one"]


def test_activation_checkpointing_changes_nothing(project: Project) -> None:
    """Of the stock blocks; those for CPUs keep everything, and round otherwise."""
    for run, again in (("kept", "false"), ("again", "true")):
        project.train(*settings(run, max_steps=3), "fast=false", f"activation_checkpointing={again}")
    assert numbers(project, "again", 0) == numbers(project, "kept", 0)


def test_the_running_average_is_in_every_checkpoint(whole: Project) -> None:
    """ema = 0.9 ema + 0.1 weights after each step, in float32, from the first weights on."""
    average: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3, 4):
        tensors, _ = read_checkpoint(checkpoint(whole, step))
        weights = {name.removeprefix("param/"): t for name, t in tensors.items() if name.startswith("param/")}
        saved = {name.removeprefix("ema/"): t for name, t in tensors.items() if name.startswith("ema/")}
        assert set(saved) == set(weights)
        assert len(saved) > 50
        if average:
            for name, tensor in saved.items():
                assert torch.allclose(tensor, 0.9 * average[name] + 0.1 * weights[name], atol=1e-7), name
        assert any(not torch.equal(saved[name], weights[name]) for name in saved)
        average = saved
