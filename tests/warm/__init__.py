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


def install(folder: Path) -> Path:
    """Write the executable into ``folder``, and the command `sd3-light` beside it; return the executable's path.

    The server ends with the calling process.
    """
    client, command = folder / "python", folder / "sd3-light"
    ENVIRONMENT.update({name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    settings = {
        "python": REAL_PYTHON,
        "server": str(_CLIENT.with_name("server.py")),
        "owner": os.getpid(),
        "environment": dict(ENVIRONMENT),
    }
    source = _CLIENT.read_text(encoding="utf-8").replace("SETTINGS = {}", f"SETTINGS = {settings!r}")
    client.write_text(f"#!{REAL_PYTHON} -IS\n{source}", encoding="utf-8")
    command.write_text(f'#!/bin/sh\nexec {client} -m sd3_light "$@"\n', encoding="utf-8")
    for path in (client, command):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return client
