"""Training in another process: its progress is shown, and if one process stops or fails, so does the other.

The other process is a shell script here; `tests/docs/test_commands.py` runs the demo with a real one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sd3_light import journeys, other_process
from sd3_light.config.faults import Stopped, UserError
from sd3_light.other_process import train_beside
from sd3_light.system import process_exists
from tests.waiting import HANG_SECONDS, wait_until

STEP = {"event": "step", "time": 0, "step": 40, "samples": 640, "loss": 0.25, "lr": 1e-3, "samples_per_second": 200.0}
TRAINING = """
trap 'echo "stopped: SIGTERM at step 40 of 60"; echo "continue with: COMMAND"; exit 75' TERM
echo $$ > pid
while true; do sleep 0.01; done
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(other_process, "_POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(path=tmp_path / "a.toml", train=SimpleNamespace(output_dir=tmp_path / "run", max_steps=60))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the interpreter of the other process by a script."""

    def write(body: str) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return write


def training_pid() -> int:
    return int(wait_until(lambda: Path("pid").is_file() and Path("pid").read_text(encoding="ascii").strip()))


def raise_once_training(error: BaseException) -> None:
    training_pid()
    raise error


def finish_deaf(loaded: Any) -> None:
    """Wait for the end of training in a block that no signal interrupts."""
    with train_beside(loaded, [], "pretrain") as finish:
        signal.signal(signal.SIGTERM, lambda *_: None)
        finish()


def test_the_progress_is_shown_and_the_samples_are_returned(loaded: Any, script: Any, capsys: Any) -> None:
    script(f"echo \"$@\" > arguments; echo output; echo '{json.dumps(STEP)}' > run/log.jsonl")
    with train_beside(loaded, ["max_steps=60"], "pretrain") as finish:
        assert finish() == 640
    program = str(Path(journeys.__file__).with_name("__main__.py"))
    arguments = ["-P", program, "train", str(loaded.path), "--set=max_steps=60"]
    assert Path("arguments").read_text(encoding="utf-8").split() == arguments
    assert Path("run/console.txt").read_text(encoding="utf-8") == "output\n"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pretrain 40/60 · 66% · 200 samples/s · ")
    assert last.endswith("loss 0.25 · lr 0.001")


def test_training_that_fails_interrupts_the_block(loaded: Any, script: Any) -> None:
    script("echo start; echo 'error: the disk is full'; exit 2")
    with pytest.raises(UserError) as error, train_beside(loaded, [], "pretrain"):
        time.sleep(HANG_SECONDS)
    console = Path("run/console.txt").absolute()
    assert str(error.value) == f"pretrain ended with exit code 2: the disk is full (see {console})"


LONG = "truncate -s 100M run/console.txt; (echo; echo 'error: the disk is full') >> run/console.txt; exit 2"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (LONG, UserError, "exit code 2: the disk is full"),
        ("kill -9 $$", UserError, "exit code -9: it printed nothing"),
        ("echo 'continue with: COMMAND'; exit 75", Stopped, "pretrain was stopped"),
    ],
)
def test_an_unnoticed_end_is_raised(loaded: Any, script: Any, capsys: Any, body: str, kind: Any, message: str) -> None:
    script(body)
    with pytest.raises(kind, match=message):
        finish_deaf(loaded)
    assert ("pretrain: continue with: COMMAND" in capsys.readouterr().err) == (kind is Stopped)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Stopped, UserError])
def test_a_block_that_ends_early_stops_training(loaded: Any, script: Any, capsys: Any, stop: Any) -> None:
    script(TRAINING)
    with pytest.raises(stop, match="of the block"), train_beside(loaded, [], "pretrain"):
        raise_once_training(stop("an error of the block"))
    assert not process_exists(training_pid())
    shown = capsys.readouterr().err
    assert "pretrain: stopped: SIGTERM at step 40 of 60\npretrain: continue with: COMMAND\n" in shown
    assert shown.splitlines()[-1].endswith("· stopped")


def test_sigterm_stops_both(loaded: Any, script: Any) -> None:
    script(TRAINING)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), train_beside(loaded, [], "pretrain"):
        os.kill(os.getpid(), signal.SIGTERM if training_pid() else 0)
    assert not process_exists(training_pid())
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_error_of_a_block_is_kept_if_training_fails_while_it_stops(loaded: Any, script: Any, capsys: Any) -> None:
    script(TRAINING.replace("exit 75", "exit 2"))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="of the block"), train_beside(loaded, [], "pretrain"):
        raise_once_training(UserError("an error of the block"))
    assert "pretrain ended with exit code 2: continue with: COMMAND" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is handler


def test_training_that_is_stopped_interrupts_the_block(loaded: Any, script: Any, capsys: Any) -> None:
    script(TRAINING)
    with pytest.raises(KeyboardInterrupt), train_beside(loaded, [], "pretrain"):
        time.sleep(HANG_SECONDS if os.kill(training_pid(), signal.SIGTERM) is None else 0)
    assert "pretrain: continue with: COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("cores", [1, 2])
def test_the_demo_pretrains_in_another_process_with_a_second_core(tmp_path: Path, monkeypatch: Any, cores: int) -> None:
    trained: list[str] = []
    score = SimpleNamespace(num_prompts=1, rates={}, by_kind={}, as_grid=lambda title: SimpleNamespace(save=Path.touch))

    def run(loaded: Any, launch: Any = None) -> Any:
        trained.append(loaded.path.stem)
        assert (launch.local_world_size if launch else 1) == (cores if loaded.path.stem == "continue" else 1)
        return SimpleNamespace(samples=7)

    def beside(loaded: Any, overrides: list[str], title: str) -> Any:
        trained.append(f"{loaded.path.stem} beside, {overrides}")
        return journeys.nullcontext(lambda: 7)

    monkeypatch.setattr(journeys, "usable_cores", lambda: cores)
    monkeypatch.setattr(journeys, "limit_threads", lambda processes: trained.append(f"{processes} processes"))
    monkeypatch.setattr(journeys, "train_beside", beside)
    monkeypatch.setattr(journeys, "_score_last_export", lambda *_: score)
    monkeypatch.setattr(journeys, "score_table", lambda rows: " ".join(rows))
    monkeypatch.setattr(journeys.cache, "run", lambda loaded: trained.append("cache"))  # with all threads, so first
    for stage, answer in (("train", run), ("evaluate", lambda *_, **__: score), ("init", lambda *_: None)):
        monkeypatch.setattr(getattr(journeys, stage), "run", answer)
    journeys.run_demo(tmp_path / "demo", steps=3, more_steps=None, images=2, prompts=1)
    runs = ["pretrain beside, ['max_steps=3']", "continue"] if cores > 1 else ["continue", "pretrain"]
    assert trained == ["cache", f"{cores} processes", *runs]


def test_a_demo_in_progress_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".sd3_light_demo").touch()
    monkeypatch.setattr(journeys, "is_locked", lambda folder: folder == tmp_path / "pretrain")
    with pytest.raises(UserError, match="pretrain; stop it, or choose another folder with --out"):
        journeys.run_demo(tmp_path, steps=3, more_steps=None, images=2, prompts=1)
    assert [file.name for file in tmp_path.iterdir()] == [".sd3_light_demo"]
