"""The process of a queued run: in its own session, and found again by what it is after a restart of the server.

A shell starts training and writes its exit code to a file of the state folder. The name of this file, with a random
token, is part of the shell's command line.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.inputs import read_limited
from sd3_light.other_process import start_training
from sd3_light.system import machine, process_start

_SHELL = '''trap : HUP INT TERM; "$@"; printf %s $? > "$0"'''
_MOST_DIGITS = 8


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of a machine since its boot: a number that was reused has another start or another command."""

    machine: str
    pid: int
    started: str
    token: str

    @staticmethod
    def of(pid: int, token: str) -> "ProcessIdentity":
        """Return the identity of a process with this token."""
        return ProcessIdentity(machine(), pid, process_start(pid), token)

    @property
    def is_alive(self) -> bool:
        """Whether this very process exists."""
        if self.machine != machine() or self.started in ("", "?") or process_start(self.pid) != self.started:
            return False
        # while a process starts a program, the kernel has no command of it for a moment
        return not _command(self.pid) or _has_token(self.pid, self.token)

    def end(self) -> None:
        """Ask the process and those that it started to end, if it is still this process."""
        if self.is_alive:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGTERM)


def start_process(
    config: Path, arguments: Sequence[str], run: Path, exit_file: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the training of a config, which writes its exit code to ``exit_file``, named by the token."""
    parent = ("/bin/sh", "-c", _SHELL, str(exit_file))
    return start_training(config, arguments, run, parent=parent, start_new_session=True, env=variables)


def find_process(token: str) -> ProcessIdentity | None:
    """Return the process with a token; None if there is none. A server may have died before it wrote its number."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    for pid in sorted(pids):
        # the shell leads its session; training, which it starts, has not the token in its command
        if _has_token(pid, token) and (identity := ProcessIdentity.of(pid, token)).started:
            return identity
    return None


def exit_code(exit_file: Path) -> int | None:
    """Return what a process has written; None if it has not ended, or was killed."""
    try:
        text = read_limited(exit_file, _MOST_DIGITS)
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def forget_exit(exit_file: Path) -> None:
    """Remove an exit code that was read."""
    try:
        exit_file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {exit_file}: {error.strerror}") from error


def _command(pid: int) -> bytes:
    """Return the command line of a process; b"" if it has ended, or none yet."""
    try:
        return read_limited(f"/proc/{pid}/cmdline")
    except OSError:
        return b""


def _has_token(pid: int, token: str) -> bool:
    words = _command(pid).split(b"\0")
    return len(words) > 3 and words[1] == b"-c" and token.encode() in words[3]
