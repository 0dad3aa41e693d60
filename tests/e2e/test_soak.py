"""A run that is killed again and again ends as the run that nobody touched, bit for bit."""

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
from tests.checkpoints import read_checkpoint
from tests.e2e.equal import assert_same_end
from tests.e2e.live import Live, leftovers
from tests.project import Project

EVERY = 4  # steps between two checkpoints
LIFE = 24  # steps for each life on average: a full disk alone takes up to ten
SMALL_FILE = 4 << 20  # bytes: room for the log, none for a checkpoint
SECOND_AVERAGE = "snapshot_every_n_steps = 8\n\n[[ema.track]]\nname = 'long'\npower_width = 0.1\n"
TORN_LINES = (b'{"event": "step", "time": 17', b"{", b"\0" * 5000)


class Soak:
    """One run and the ways to end it before its time, at moments that the dice choose."""

    def __init__(self, project: Project, ways: Sequence[str], seed: int) -> None:
        self.project, self.dice = project, random.Random(seed)
        self.ways = self.dice.sample(ways, len(ways))
        self.steps = LIFE * (len(ways) + 1)

    def settings(self) -> dict[str, int]:
        return {"max_steps": self.steps, "checkpoint_every_n_steps": EVERY, "keep_last_n_checkpoints": 3}

    def kill_all_the_time(self) -> None:
        """Every way once, in the order of the dice; then let it come to its end."""
        while self.ways:
            with self.life() as live:
                getattr(self, self.ways.pop())(live)

    @contextmanager
    def life(self) -> Iterator[Live]:
        """The same command each time; only the number of loader workers differs, which changes nothing."""
        workers = self.dice.choice((0, 0, 2))
        wish = "--resume_from_checkpoint"
        with Live(self.project, wish, **self.settings(), num_dataloader_workers=workers) as live:
            yield live

    def wait(self, live: Live) -> None:
        """Until a step that leaves enough of the run to the lives that come after this one."""
        begun = live.begin()
        share = (self.steps - begun) // (len(self.ways) + 2)
        live.reach(begun + self.dice.randint(1, max(1, share - 3 * EVERY)))

    # --- the ways ------------------------------------------------------------------------------

    def killed(self, live: Live) -> None:
        """At once, and the last line of the log is torn."""
        self.wait(live)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        with live.log.path.open("ab") as file:
            file.write(self.dice.choice(TORN_LINES))

    def asked_to_stop(self, live: Live) -> None:
        self.wait(live)
        assert live.stop(signal.SIGTERM) == RESUMABLE, live.words
        assert live.log.read("stop")[-1]["reason"] == "SIGTERM"

    def killed_while_saving(self, live: Live) -> None:
        """A checkpoint that was being written stays behind."""
        self.wait(live)
        half = live.until(lambda: self._caught_saving(live), pause=0.001)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        assert half.is_dir()
        assert not half.with_name(half.name.removeprefix(".").removesuffix(".tmp")).exists()

    @staticmethod
    def _caught_saving(live: Live) -> Path | None:
        """The half-written checkpoint of a process that is halted in the middle of it; otherwise it goes on."""
        if not _half_written(live):
            return None
        live.send(signal.SIGSTOP)
        if half := _half_written(live):
            return half
        live.send(signal.SIGCONT)
        return None

    def on_a_full_disk(self, live: Live) -> None:
        """No checkpoint can be written and training goes on; when there is room, the next one is."""
        self.wait(live)
        live.longest_file(SMALL_FILE)
        failed = live.event("checkpoint_failed")
        assert "File too large" in failed["reason"]
        assert failed["reason"].endswith("earlier checkpoints are intact")
        live.reach(failed["step"] + 1)
        live.longest_file(None)
        saved = live.event("checkpoint", number=len(live.log.read("checkpoint")))
        assert saved["step"] > failed["step"]
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL

    def killed_while_starting(self, live: Live) -> None:
        """Before there is a word of it in the log."""
        live.until(lambda: "cache" in live.words)
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL

    def killed_while_exporting(self, live: Live) -> None:
        """All steps are done and saved, and the export is being proven."""
        live.until(lambda: list((live.run / "exports").glob(".step-*.tmp")))
        live.until(lambda: (live.run / "checkpoints" / checkpoint_name(self.steps)).is_dir())
        assert live.stop(signal.SIGKILL) == -signal.SIGKILL
        assert [path.name for path in (live.run / "exports").glob("step-*")] == []


def _half_written(live: Live) -> Path | None:
    return next((live.run / "checkpoints").glob(".step-*.tmp"), None)


def undisturbed(soak: Soak, project: Project) -> None:
    """The reference, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train(*(f"{key}={value}" for key, value in soak.settings().items()))


def curve(project: Project) -> dict[int, tuple[float, ...]]:
    """What the log says of every step, as it was said last."""
    keys = ("samples", "loss", "flow", "grad_norm", "param_norm", "lr")
    return {event["step"]: tuple(event[key] for key in keys) for event in project.events("step")}


def assert_as_if_nothing_happened(project: Project, reference: Project, steps: int) -> None:
    assert curve(project) == curve(reference)
    assert sorted(curve(project)) == list(range(1, steps + 1))
    for place in ("checkpoints", "ema"):
        ours, theirs = (sorted((run.run / place).glob("step-*")) for run in (project, reference))
        if place == "checkpoints":
            ours = ours[-len(theirs) :]  # a kill after the last save may leave one more that was to be deleted
        assert [path.name for path in ours] == [path.name for path in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert_same_end(one, other)
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
    soak.kill_all_the_time()
    for way in at_the_end:
        with soak.life() as live:
            getattr(soak, way)(live)
    with soak.life() as live:
        assert live.end() == 0, live.words
    undisturbed(soak, reference)
    assert_as_if_nothing_happened(project, reference, soak.steps)
    assert_exported(project, soak.steps)
    begun = [*project.events("start"), *project.events("resume")]
    assert len(begun) == len(ways) + len(at_the_end) + 1 - ways.count("killed_while_starting")
    shutil.rmtree(project.folder)  # half a gigabyte


WAYS = ["killed", "asked_to_stop", "killed_while_saving", "on_a_full_disk"]


def test_four_kills_change_nothing(project: Project) -> None:
    soak_test(project, WAYS, seed=4)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_change_nothing(project: Project) -> None:
    soak_test(project, [*(4 * WAYS), *(3 * ["killed_while_starting"])], seed=20, at_the_end=["killed_while_exporting"])
