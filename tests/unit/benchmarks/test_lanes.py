"""Lanes on one GPU: NVIDIA's daemon around them (a stand-in here), their ends, and what failed."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import wait_until

DAEMON = """#!/bin/sh
echo "$* $(test -t 0 || cat) $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_LOG"
exit ${MPS_CODE:-0}
"""
WRITE = "import os, sys; open(sys.argv[1], 'a').write(os.environ.get('CUDA_MPS_PIPE_DIRECTORY', '-') + chr(10))"


@pytest.fixture
def daemon(scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in for the daemon's program notes its calls."""
    program = tmp_path / "bin" / scripts.processes.CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_LOG", str(tmp_path / "calls"))
    return tmp_path / "calls"


def run(scripts: SimpleNamespace, out: Path, wanted: bool = True) -> list[str]:
    with scripts.processes.mps(wanted) as environment:
        command = [sys.executable, "-c", WRITE, str(out)]
        assert scripts.processes.run_lanes(command, 3, None, environment) == []
    return out.read_text(encoding="utf-8").splitlines()


def test_lanes_share_the_daemon_that_ends_after_them(scripts: SimpleNamespace, daemon: Path, tmp_path: Path) -> None:
    pipes = run(scripts, tmp_path / "out")
    calls = [line.split() for line in daemon.read_text(encoding="utf-8").splitlines()]
    assert [call[0] for call in calls] == ["-d", "quit"]
    assert len(pipes) == 3
    assert {*pipes} == {call[-1] for call in calls}
    assert pipes[0] != "-"
    assert not Path(pipes[0]).exists()


def test_failures_of_lanes_are_reported_and_end_the_daemon(scripts: SimpleNamespace, daemon: Path) -> None:
    with pytest.raises(ZeroDivisionError), scripts.processes.mps():
        raise ZeroDivisionError
    assert daemon.read_text(encoding="utf-8").count("quit") == 1
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    failures = scripts.processes.run_lanes(command, 2, None, dict(os.environ))
    assert failures == [f"lane {number} failed with exit code 3" for number in (1, 2)]


@pytest.mark.parametrize("how", ["absent", "fails", "unwanted"])
def test_lanes_without_the_daemon(scripts: Any, daemon: Path, tmp_path: Path, monkeypatch: Any, how: str) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("MPS_CODE", "1" if how == "fails" else "0")
    if how == "absent":
        (tmp_path / "bin" / scripts.processes.CONTROL).unlink()
    assert run(scripts, tmp_path / "out", how != "unwanted") == ["-"] * 3
    assert not daemon.exists() or "quit" not in daemon.read_text(encoding="utf-8")


def test_lanes_end_at_the_deadline(scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "pid"

    class Lane(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or timeout < 1000:
                return super().wait(timeout)
            wait_until(lambda: started.is_file() and started.read_text(encoding="utf-8").endswith("\n"))
            raise subprocess.TimeoutExpired(self.args, timeout)  # as at the deadline

    monkeypatch.setattr(scripts.processes.subprocess, "Popen", Lane)
    command = ["sh", "-c", 'sleep 600 & echo $! > "$0"; wait', str(started)]
    failures = scripts.processes.run_lanes(command, 1, time.monotonic() + 2000, dict(os.environ))
    assert failures == ["lane 1 was ended at the time limit; the same command continues its row"]
    state = Path(f"/proc/{started.read_text(encoding='utf-8').strip()}/stat")
    wait_until(lambda: not state.exists() or state.read_text(encoding="utf-8").split()[2] == "Z")


def test_a_run_list_uses_the_daemon(scripts: SimpleNamespace, daemon: Path, tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "write.py"
    script.write_text(WRITE, encoding="utf-8")
    run_line = f"{sys.executable} {script} {{out}}/pipe"
    (tmp_path / "list.toml").write_text(f"[[all]]\nrun = '{run_line}'\n[[all]]\nrun = '{run_line}'\nlane = 'b'\n")
    arguments = ["run_list.py", str(tmp_path / "list.toml"), str(tmp_path / "out"), "--group", "all", "--mps"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    scripts.run_list.main()
    pipes = {(tmp_path / "out" / number / "pipe").read_text(encoding="utf-8").strip() for number in ("1", "2")}
    assert len(pipes) == 1
    assert pipes != {"-"}
    assert "quit" in daemon.read_text(encoding="utf-8")
