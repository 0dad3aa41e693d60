"""The driver with an engine of one weight: what is saved after which error, and how a run ends."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import write_part
from sd3_light.config import EmaConfig
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.engines.processes import ProcessGroups
from sd3_light.engines.protocol import MicroBatch, StepStream, TensorPiece
from sd3_light.export.export_spec import ExportError
from sd3_light.export.proof import ProofError
from sd3_light.optim.ema import Averages
from sd3_light.train.driver import Driver, HookSchedule, RunHooks
from sd3_light.train.loop import every
from sd3_light.train.measurement import Measurement
from tests.unit.train.test_loop import CountingEngine, numbered, run
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("one_thread")


class OneWeight(CountingEngine):
    """Raises ``early`` errors before a step, ``errors`` after it."""

    def __init__(self, bad: Sequence[int] = (), errors: Any = None, early: Any = None) -> None:
        super().__init__(bad)
        self.errors, self.early = errors or {}, early or {}

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> Any:
        number = batches[0][0][0]
        if number in self.early:
            raise self.early[number]
        self.updates_started += 1
        result = super().train_step(batches, lr)
        if number in self.errors:
            raise self.errors[number]
        return result

    def pieces(self) -> Iterator[TensorPiece]:
        return self.like_weights("param", self.weights)

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        yield TensorPiece(f"{kind}/w", held["w"], 0, (1,))

    def gather(self, held: Mapping[str, Tensor], to_host: Any = None) -> dict[str, Tensor]:
        return {"w": held["w"].clone()}


class Case:
    """A driver of 6 steps in a folder, and the events that it logs."""

    def __init__(self, folder: Path, engine: Any = None, start: Progress | None = None, **keys: Any) -> None:
        self.folder, self.engine, self.events = folder, engine or OneWeight(), list[dict[str, Any]]()
        keys = {"hooks": RunHooks(), "schedule": HookSchedule(), "launch": Launch(), **keys}
        ema = EmaConfig(enable=True, decay=0.5)
        self.averages = Averages(self.engine.weights, ema)
        state = {"progress": start or Progress(), "averages": self.averages, "max_nonfinite_steps": 1}
        trained = run(6, self.engine, log=self.log, **state)
        keys |= {"groups": ProcessGroups(), "facts": {"order": "some"}, "keep_last": 0}
        self.driver = Driver(run=trained, folder=folder, out_of_memory="use less", resume_hint="--resume", **keys)

    def log(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def train(self) -> Progress:
        with self.driver.running():
            return self.driver.train()

    def error(self, kind: type[Exception] = UserError) -> str:
        with pytest.raises(kind) as raised:
            self.train()
        return str(raised.value)

    def of(self, event: str, field: str = "step") -> list[Any]:
        return [line[field] for line in self.events if line["event"] == event]

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))


def test_the_last_export_is_announced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is verified for a long time after the progress bar is complete."""
    lines: list[str] = []
    announced = threading.Event()

    def info(text: str) -> None:
        lines.append(text)
        announced.set()

    def export(*_: object) -> Path:
        assert announced.wait(HANG_SECONDS), "nothing was printed while it is written"
        return tmp_path / "exports" / "step-6"

    monkeypatch.setattr("sd3_light.train.driver.info", info)
    Case(tmp_path, hooks=RunHooks(export=export)).train()
    assert re.fullmatch(r"step 6: writing the last (checkpoint and )?export, which is verified by .*", lines[0])


def test_a_run_ends_with_a_checkpoint(tmp_path: Path) -> None:
    case = Case(tmp_path, schedule=HookSchedule(checkpoint=every(4)))
    assert case.train().step == 6
    assert case.of("checkpoint") == [4, 6]
    assert case.of("stop", "reason") == ["finished"]
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-00000006")
    assert (float(checkpoint.tensor("param/w")), checkpoint.facts["order"]) == (6.0, "some")
    assert float(checkpoint.tensor("ema/w")) == float(case.averages.tracks["ema"].shadow["w"])


def test_the_last_step_is_evaluated(tmp_path: Path) -> None:
    hooks = RunHooks(lambda: [("held_out", {"flow": 1.0})])
    for interval, steps in ((4, [4, 6]), (3, [3, 6]), (100, [6])):
        case = Case(tmp_path / str(interval), hooks=hooks, schedule=HookSchedule(every(interval)))
        case.train()
        assert case.of("eval") == steps
    sample = Mock(side_effect=OSError(28, "No space left on device", "x.png"))
    case = Case(tmp_path, hooks=RunHooks(sample=sample), schedule=HookSchedule(sample=every(3)))
    assert case.train().step == 6
    assert case.of("sample_failed") == [3, 6]


def test_hooks_see_the_average_and_the_weights_come_back(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    def record(name: str) -> None:
        seen[name] = float(case.engine.weight)

    def sample(progress: Progress, weights: str) -> Path:
        record(f"sample {weights}")
        return tmp_path / "samples" / "a.png"

    def evaluate() -> Iterator[tuple[str, dict[str, float]]]:
        record(f"evaluate {len(seen)}")
        yield "held_out", {"flow": 1.0}

    hooks = RunHooks(evaluate, True, sample, lambda _: record("save"), finish=lambda _: record("finish"))
    case = Case(tmp_path, hooks=hooks, schedule=HookSchedule(*(3 * [every(6)])))
    case.train()
    average = float(case.averages.tracks["ema"].shadow["w"])
    assert seen == {"evaluate 0": 6.0, **dict.fromkeys(["evaluate 1", "sample ema", "save", "finish"], average)}
    assert float(case.engine.weight) == 6.0
    assert case.of("eval", "weights") == ["raw", "ema"]
    assert case.of("sample", "file") == ["samples/a.png"]


@pytest.mark.parametrize("error", [UserError("a shard is damaged"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_after_an_error_the_last_complete_step_is_saved(tmp_path: Path, error: Exception) -> None:
    def steps(first: int) -> StepStream:
        for batch in numbered(first):
            if batch[0][0][0] == 3:
                raise error
            yield batch

    case = Case(tmp_path)
    case.driver.run.steps = steps
    message = case.error()
    assert message.endswith("(step 3 is saved: --resume continues from there)")
    assert ("use less" in message) == isinstance(error, torch.OutOfMemoryError)
    assert case.saved() == ["step-00000003"]
    (reason,) = case.of("stop", "reason")
    assert message.startswith(f"{reason} (step 3")


def test_errors_are_saved_unless_it_would_do_harm(tmp_path: Path) -> None:
    hooks = RunHooks(save=Mock(side_effect=ValueError("a bug")))
    between = Case(tmp_path / "between", hooks=hooks, schedule=HookSchedule(save=every(3)))
    assert between.error(ValueError) == "a bug"
    assert between.saved() == ["step-00000003"]
    forward = Case(tmp_path / "forward", OneWeight(early={3: ValueError("a bug")}))
    assert forward.error(ValueError) == "a bug"
    assert forward.saved() == ["step-00000003"]
    after = Case(tmp_path / "after", hooks=RunHooks(finish=Mock(side_effect=UserError("no room"))))
    assert after.error() == "no room (step 6 is saved: --resume continues from there)"
    assert after.of("checkpoint") == [6], "it is not written again"
    # weights that diverged, a run in which no step was taken, and several processes, which cannot agree any more.
    diverged = Case(tmp_path / "diverged", OneWeight(bad=[2, 3]))
    assert "2 steps in a row" in diverged.error()
    nothing = Case(tmp_path / "nothing", OneWeight(bad=[5]), start=Progress(5, 20, 0, 5))
    assert "none of 1 steps was taken" in nothing.error()
    several = Case(tmp_path / "several", OneWeight(errors={3: UserError("odd")}), launch=Launch(0, 0, 2))
    assert several.error() == "odd"
    assert (diverged.saved(), several.saved()) == ([], [])


def test_averages_and_models_half_updated_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights may be of this step and others of the last."""
    for error in (ValueError("a bug"), torch.OutOfMemoryError("full"), UserError("odd")):
        case = Case(tmp_path, OneWeight(errors={3: error}))
        case.error(ValueError if isinstance(error, ValueError) else UserError)
        assert case.saved() == []
        assert case.of("stop") == [3]
    case = Case(tmp_path)
    monkeypatch.setattr(case.averages, "update", Mock(side_effect=ValueError("a bug")))
    case.error(ValueError)
    assert case.saved() == []
    # a checkpoint of step 2 with the weights of step 3 would train them twice
    case = Case(tmp_path)

    def fail_at_2(position: int) -> int:
        if position == 2:
            raise ValueError("a defect")
        return 1

    case.driver.run.samples_in = fail_at_2
    assert case.error(ValueError) == "a defect"
    assert case.saved() == []


NO_SPACE = OSError(28, "No space left on device")
FREE = "free disk space or fix the disk, then resume"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of checkpoints that cannot be written."""
    names: set[str] = set()

    def write(folder: Path, *args: Any) -> int:
        if any(name in str(folder) for name in names):
            raise NO_SPACE
        return write_part(folder, *args)

    monkeypatch.setattr("sd3_light.checkpoint.background.write_part", write)
    return names


def slowly(case: Case) -> Case:
    """Let every step begin after all saves have ended."""

    def steps(first: int) -> StepStream:
        for batch in numbered(first):
            assert case.driver.saves.is_idle(HANG_SECONDS)
            yield batch

    case.driver.run.steps = steps
    return case


def test_a_failed_save_ends_the_run_only_if_it_is_the_last(tmp_path: Path, full: set[str]) -> None:
    full.add("step-00000003")
    early = slowly(Case(tmp_path / "early", schedule=HookSchedule(checkpoint=every(1))))
    early.train()
    assert (early.of("checkpoint_failed"), early.of("checkpoint")) == ([3], [1, 2, 4, 5, 6])
    (reason,) = early.of("checkpoint_failed", "reason")
    assert reason == "No space left on device; earlier checkpoints are intact"
    full.add("step-00000006")
    late = Case(tmp_path / "late", schedule=HookSchedule(checkpoint=every(4)))
    failed = "the checkpoint at step 6 failed: No space left on device"
    assert late.error() == f"{failed}; earlier checkpoints are intact; {FREE}"


def test_a_run_stops_if_its_first_save_fails(tmp_path: Path, full: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full.add("step-00000006")
    only = Case(tmp_path)
    message = "the checkpoint at step 6 failed: No space left on device; no checkpoint was ever saved: free disk "
    message += "space or fix the disk, then start again"
    assert only.error() == message
    assert only.of("stop", "reason") == [message]
    both = Case(tmp_path / "both", hooks=RunHooks(export=Mock(side_effect=ProofError("it differs by 1.0"))))
    with monkeypatch.context() as patch:
        refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
        patch.setattr("sd3_light.checkpoint.background.write_part", refuse)
        failed = "the checkpoint at step 6 failed: Permission denied"  # not the export
        assert both.error() == f"{failed}; no checkpoint was ever saved: fix the cause, then start again"
    # at step 3 the failure of step 2 is known; another attempt is made at the end of the next step
    full.add("step-")
    case = slowly(Case(tmp_path, schedule=HookSchedule(checkpoint=every(2))))
    assert case.error().startswith("the checkpoint at step 4 failed: No space left on device; no checkpoint was ever")
    assert (case.of("checkpoint_failed"), case.of("stop")) == ([2, 4], [4])
    assert case.saved() == []
    # a disk that cannot be listed is reported like a full one
    full.add("step-")
    stale = Mock(side_effect=OSError(116, "Stale file handle"))
    monkeypatch.setattr("sd3_light.checkpoint.store.newest_checkpoint", stale)
    case = slowly(Case(tmp_path, schedule=HookSchedule(checkpoint=every(2))))
    assert "no checkpoint was ever saved" in case.error()
    assert case.of("checkpoint_failed") == [2, 4]


def test_the_last_attempt_of_a_run_that_stops_may_succeed(tmp_path: Path, full: set[str]) -> None:
    full.add("step-00000001")
    case = slowly(Case(tmp_path, schedule=HookSchedule(checkpoint=lambda old, new: new.step == 1)))
    failed = "the checkpoint at step 1 failed: No space left on device"
    assert case.error() == f"{failed}; {FREE} (step 3 is saved: --resume continues from there)"
    assert case.saved() == ["step-00000003"]
    # a run may continue after its first save failed
    full.update({"step-00000002", "step-00000004"})
    case = slowly(Case(tmp_path / "other", schedule=HookSchedule(checkpoint=every(2))))
    case.driver.stop_if_first_save_fails = False
    assert case.train().step == 6
    assert (case.of("checkpoint_failed"), case.of("checkpoint")) == ([2, 4], [6])


def converted(error: Exception) -> ExportError:
    """Return the error of an adapter's export that was raised because of another."""
    converted = ExportError("cannot write the file")
    converted.__cause__ = UserError("cannot write")
    converted.__cause__.__cause__ = error
    return converted


@pytest.mark.parametrize(
    ("error", "stops"),
    [
        (NO_SPACE, True),
        (converted(NO_SPACE), True),
        (ProofError("another output"), False),
        (converted(ValueError("another")), False),
        (UserError("the base is gone"), False),
    ],
)
def test_a_failed_first_export_stops_the_run(tmp_path: Path, full: set[str], error: Exception, stops: bool) -> None:
    """If it is written and only its verification fails, checkpoints can be written too."""
    full.add("step-")
    hooks = RunHooks(export=Mock(side_effect=error))
    case = slowly(Case(tmp_path, hooks=hooks, schedule=HookSchedule(export=every(2))))
    assert "no checkpoint was ever saved" in case.error()
    assert case.of("stop") == [4 if stops else 6]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ProofError("its output differs by 1.0"), "resume"),
        (ExportError("w contains NaN"), "resume"),
        (PermissionError(13, "Permission denied"), "resume"),
        (OSError(28, "No space left on device"), FREE),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), FREE),
    ],
    ids=["proof", "weights", "permission", "full", "quota"],
)
def test_a_failed_export_says_what_to_do(tmp_path: Path, error: Exception, remedy: str) -> None:
    """Only errors of the disk ask for disk space; the checkpoint is saved, and the export can be repeated."""
    case = Case(tmp_path, hooks=RunHooks(export=Mock(side_effect=error)))
    assert case.error() == (
        f"the export at step 6 failed: {error}; the checkpoint is intact: {remedy}, or run "
        f"`sd3-light export {tmp_path} OUT` (step 6 is saved: --resume continues from there)"
    )
    assert case.of("export_failed", "reason") == [str(error)]
    assert case.saved() == ["step-00000006"]


def test_a_missing_export_is_written_after_a_resume(tmp_path: Path) -> None:
    """The process was killed between its checkpoint and its export."""
    exported: list[tuple[int, str]] = []

    def export(trained: Mapping[str, Tensor], weights: str, progress: Progress) -> Path:
        exported.append((progress.step, weights))
        return tmp_path / "exports" / "x"

    # buckets have batches of different sizes: an export every 50 samples was due if the last batch passed 50
    for start, due, sizes, expected in (
        (Progress(4, 16, 0, 4), every(2), {3: 4}, [(4, "ema")]),
        (Progress(3, 12, 0, 3), every(2), {2: 4}, []),
        (Progress(4, 84, 0, 4), every(examples=50), {3: 4, 4: 40}, []),
        (Progress(4, 84, 0, 4), every(examples=50), {3: 40, 4: 4}, [(4, "ema")]),
    ):
        exported.clear()
        case = Case(tmp_path, hooks=RunHooks(export=export), schedule=HookSchedule(export=due), start=start)
        case.driver.run.samples_in = sizes.__getitem__
        with case.driver.running():
            case.driver.catch_up(start)
        assert exported == expected


def test_the_best_measurement_is_exported_and_linked_once(tmp_path: Path) -> None:
    """Better at steps 1 and 3; step 3 is also due by the schedule. Two measurements later the run stops."""
    exported: list[tuple[int, float]] = []

    def export(trained: Mapping[str, Tensor], weights: str, progress: Progress) -> Path:
        exported.append((progress.step, float(trained["w"])))
        path = tmp_path / "exports" / f"step-{progress.step:08d}"
        path.mkdir(parents=True)
        return path

    def measure(step: int) -> Measurement | None:
        stop = "no gain" if step == 4 else None
        return None if step == 2 else Measurement({"kid": {"value": step}}, "", step in (1, 3), stop)

    schedule = HookSchedule(measure=every(1), export=every(3))
    case = Case(tmp_path, hooks=RunHooks(measure=measure, export=export), schedule=schedule)
    assert case.train().step == 5
    assert case.of("metrics") == [1, 3, 4, 5]
    assert case.of("metrics", "kid")[0] == {"value": 1}
    assert [step for step, _ in exported] == [1, 3]
    assert exported[1][1] < 3, "the average is exported"
    assert (tmp_path / "exports" / "best").resolve().name == "step-00000003"
    assert case.saved() == ["step-00000005"]
    assert case.of("stop", "reason") == ["no gain"]
