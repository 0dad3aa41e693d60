"""Temporary files as a killed process leaves them."""

import subprocess
from pathlib import Path

from sd3_light.system import machine


def ended_process() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def leave(path: Path) -> Path:
    """Create the temporary file of ``path`` that a process, which has ended, was writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{machine()}~{ended_process()}~0.tmp")
    temporary.write_bytes(b"half")
    return temporary
