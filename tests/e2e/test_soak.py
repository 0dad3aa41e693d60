"""A run that is killed repeatedly ends like an uninterrupted run, bit for bit."""

import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.cli import RESUMABLE
from tests.checkpoints import assert_same_checkpoint, read_checkpoint
from tests.e2e.live import TrainProcess, leftovers
from tests.project import Project, without_proofs

EVERY = 4  # steps between two checkpoints
SESSION_STEPS = 24  # steps per session on average: a full disk alone takes up to ten
SMALL_FILE = 4 << 20  # bytes: enough for the log, too small for a checkpoint
SECOND_AVERAGE = "snapshot_every_n_steps = 8\n\n[[ema.track]]\nname = 'long'\npower_width = 0.1\n"
INCOMPLETE_LINES = (b'{"event": "step", "time": 17', b"{", b"\0" * 5000)


class Soak:
    """One run and several ways to interrupt it at random moments."""

    def __init__(self, project: Project, ways: Sequence[str], seed: int) -> None:
        self.project, self.random = project, random.Random(seed)
        self.ways = self.random.sample(ways, len(ways))
        self.steps = SESSION_STEPS * (len(ways) + 1)

    def settings(self) -> dict[str, int]:
        return {"max_steps": self.steps, "checkpoint_every_n_steps": EVERY, "keep_last_n_checkpoints": 3}

    def interrupt_repeatedly(self) -> None:
        """Interrupt the run once in each way, in random order."""
        while self.ways:
            with self.session() as live:
                getattr(self, self.ways.pop())(live)

    @contextmanager
    def session(self) -> Iterator[TrainProcess]:
        """Run the same command; only the number of loader workers differs, which does not affect training."""
        workers = self.random.choice((0, 0, 2))
        flag = "--resume_from_checkpoint"
        with TrainProcess(self.project, flag, **self.settings(), num_dataloader_workers=workers) as live:
            yield live

    def wait(self, live: TrainProcess) -> None:
        """Wait for a random step that leaves enough steps for the remaining sessions."""
        first = live.wait_for_start()
        share = (self.steps - first) // (len(self.ways) + 2)
        live.wait_for_step(first + self.random.randint(1, max(1, share - 3 * EVERY)))

    # --- interruptions -------------------------------------------------------------------------

    def killed(self, live: TrainProcess) -> None:
        """Kill the run, and leave an incomplete last line in the log."""
        self.wait(live)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        with live.log.path.open("ab") as file:
            file.write(self.random.choice(INCOMPLETE_LINES))

    def asked_to_stop(self, live: TrainProcess) -> None:
        self.wait(live)
        assert live.stop(signal.SIGTERM) == RESUMABLE, live.output
        assert live.log.read("stop")[-1]["reason"] == "SIGTERM"

    def killed_while_saving(self, live: TrainProcess) -> None:
        """Kill the run during a save, which leaves an incomplete checkpoint."""
        self.wait(live)
        incomplete = live.wait_for(lambda: self._caught_saving(live), pause=0.001)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        assert incomplete.is_dir()
        assert not incomplete.with_name(incomplete.name.removeprefix(".").removesuffix(".tmp")).exists()

    @staticmethod
    def _caught_saving(live: TrainProcess) -> Path | None:
        """Suspend the process during a save and return the incomplete checkpoint; otherwise let it continue."""
        if not _incomplete_checkpoint(live):
            return None
        live.send(signal.SIGSTOP)
        if incomplete := _incomplete_checkpoint(live):
            return incomplete
        live.send(signal.SIGCONT)
        return None

    def on_a_full_disk(self, live: TrainProcess) -> None:
        """Training continues while checkpoints cannot be written; they are written again once there is space."""
        self.wait(live)
        live.wait_for(lambda: list((live.run / "checkpoints").glob("step-*")))  # without one the run would stop
        live.limit_file_size(SMALL_FILE)
        failed = live.wait_for_event("checkpoint_failed")
        assert "File too large" in failed["reason"]
        assert failed["reason"].endswith("earlier checkpoints are intact")
        live.wait_for_step(failed["step"] + 1)
        live.limit_file_size(None)
        saved = live.wait_for_event("checkpoint", number=len(live.log.read("checkpoint")))
        assert saved["step"] > failed["step"]
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL

    def killed_while_starting(self, live: TrainProcess) -> None:
        """Kill the run before it writes to the log."""
        live.wait_for(lambda: "cache" in live.output)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL

    def killed_while_exporting(self, live: TrainProcess) -> None:
        """Kill the run while its export is being proven; all steps are done and saved."""
        live.wait_for(lambda: list((live.run / "exports").glob(".step-*.tmp")))
        live.wait_for(lambda: (live.run / "checkpoints" / checkpoint_name(self.steps)).is_dir())
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        assert [path.name for path in (live.run / "exports").glob("step-*")] == []


def _incomplete_checkpoint(live: TrainProcess) -> Path | None:
    return next((live.run / "checkpoints").glob(".step-*.tmp"), None)


def train_reference(soak: Soak, project: Project) -> None:
    """Train without interruptions, in this process."""
    with without_proofs():
        project.train(*(f"{key}={value}" for key, value in soak.settings().items()))


def curve(project: Project) -> dict[int, tuple[float, ...]]:
    """Return the last logged values of every step."""
    keys = ("samples", "loss", "flow", "grad_norm", "param_norm", "lr")
    return {event["step"]: tuple(event[key] for key in keys) for event in project.events("step")}


def assert_equal_runs(project: Project, reference: Project, steps: int) -> None:
    assert curve(project) == curve(reference)
    assert sorted(curve(project)) == list(range(1, steps + 1))
    for folder in ("checkpoints", "ema"):
        ours, theirs = (sorted((run.run / folder).glob("step-*")) for run in (project, reference))
        if folder == "checkpoints":
            ours = ours[-len(theirs) :]  # a kill after the last save may leave one more that would have been deleted
        assert [path.name for path in ours] == [path.name for path in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert_same_checkpoint(one, other)
    assert leftovers(project.run) == []


def assert_exported(project: Project, steps: int) -> None:
    (export,) = (project.run / "exports").glob("step-*")
    assert (export.name, (export / "proof.json").is_file()) == (checkpoint_name(steps), True)
    tensors, _ = read_checkpoint(project.run / "checkpoints" / export.name)
    saved = load_file(export / "transformer" / "diffusion_pytorch_model.safetensors")
    average = {name.removeprefix("ema/"): tensor for name, tensor in tensors.items() if name.startswith("ema/")}
    assert len(average) > 50
    assert [name for name, tensor in average.items() if not torch.equal(tensor, saved[name])] == []


def soak_test(project: Project, ways: Sequence[str], seed: int, at_the_end: Sequence[str] = ()) -> None:
    text = project.train_toml.read_text(encoding="utf-8")
    project.train_toml.write_text(text + SECOND_AVERAGE, encoding="utf-8")
    reference = project.copy(project.folder.with_name("reference"))
    soak = Soak(project, ways, seed)
    soak.interrupt_repeatedly()
    for way in at_the_end:
        with soak.session() as live:
            getattr(soak, way)(live)
    with soak.session() as live:
        assert live.end() == 0, live.output
    train_reference(soak, reference)
    assert_equal_runs(project, reference, soak.steps)
    assert_exported(project, soak.steps)
    starts = [*project.events("start"), *project.events("resume")]
    assert len(starts) == len(ways) + len(at_the_end) + 1 - ways.count("killed_while_starting")
    shutil.rmtree(project.folder)  # half a gigabyte


WAYS = ["killed", "asked_to_stop", "killed_while_saving", "on_a_full_disk"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_interruptions_change_nothing(project: Project) -> None:
    soak_test(project, [*(4 * WAYS), *(3 * ["killed_while_starting"])], seed=20, at_the_end=["killed_while_exporting"])
