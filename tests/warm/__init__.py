"""Fast child processes for tests: a stand-in for `python` whose children start with the large libraries imported.

Most tests that start a process wait for the import of torch, diffusers and transformers, which takes far longer than
what they test. `install` writes a small executable that passes its command line, environment and open files to a server
process (`server.py`), started on first use, that has imported these libraries and nothing of this package. The server
forks, and its child runs the command. Signals, the exit code and death are passed on in both directions.

A test that needs the process itself, not its stand-in, names a file in the variable SD3_LIGHT_TEST_PID_FILE: the child
writes its process id there, and the child's own children do not inherit the variable.

What a fork cannot reproduce runs in a new interpreter as usual: `python -c`, unknown interpreter options, and commands
whose environment differs in a variable that libraries read at import (see `client.py`).
"""

import os
import stat
import sys
from pathlib import Path

REAL_PYTHON = sys.executable
"""The interpreter itself, for tests that measure a process or send signals to its process group."""

_CLIENT = Path(__file__).with_name("client.py")

ENVIRONMENT: dict[str, str] = {}
"""The server's environment, once it is installed."""


def install(folder: Path, owner: int) -> Path:
    """Write the executable into ``folder``, and the command `sd3-light` beside it; return the executable's path.

    The server ends with the process ``owner``. Several processes may install into one folder and share its server.
    """
    client, command = folder / "python", folder / "sd3-light"
    ENVIRONMENT.update({name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    settings = {
        "python": REAL_PYTHON,
        "server": str(_CLIENT.with_name("server.py")),
        "owner": owner,
        "environment": dict(ENVIRONMENT),
    }
    source = _CLIENT.read_text(encoding="utf-8").replace("SETTINGS = {}", f"SETTINGS = {settings!r}")
    _write_program(client, f"#!{REAL_PYTHON} -IS\n{source}")
    _write_program(command, f'#!/bin/sh\nexec {client} -m sd3_light "$@"\n')
    return client


def _write_program(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR)
    temporary.rename(path)
