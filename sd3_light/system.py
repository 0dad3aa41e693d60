"""Facts about this machine and its processes, read from /proc, and about its GPUs, from their driver."""

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple


def machine() -> str:
    """Return an id of the boot and PID namespace, within which a process number is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:  # not Linux: fall back to the host name
        boot = namespace = "0"
    return f"{socket.gethostname()}-{boot}-{namespace}"


def process_exists(pid: int | str) -> bool:
    """Return whether a process of this machine exists."""
    return os.path.exists(f"/proc/{pid}")


def process_start(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it has ended. Detects reused process numbers."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


def available_memory() -> int | None:
    """Return the kernel's estimate of the free host memory in bytes; None if the system does not report it."""
    path = Path("/proc/meminfo")
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


class Gpu(NamedTuple):
    """A GPU's name, as torch reports it, and its memory if known."""

    name: str
    total_bytes: int | None = None


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that a training process would see, without importing torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        rows = [line.rpartition(",") for line in lines]
        return [Gpu(name.strip(), int(mebibytes) << 20) for name, _, mebibytes in rows]
    except (OSError, subprocess.SubprocessError, ValueError):  # a driver without a device, or that does not answer
        return []


def umask() -> int:
    """Return the permissions that this process withholds from new files."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration):  # not Linux: it can be read only by setting it, for all threads
        current = os.umask(0o077)
        os.umask(current)
        return current


def host_bytes() -> int:
    """Return the resident memory of this process plus the unshared memory of its children, in bytes."""
    total, _ = _pages(os.getpid())
    for child in _children():
        resident, shared = _pages(child)
        total += resident - shared
    return total * os.sysconf("SC_PAGE_SIZE")


def _pages(pid: int) -> tuple[int, int]:
    """Return the (resident, shared) pages of a process."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0, 0
    return int(fields[1]), int(fields[2])


def _children() -> list[int]:
    pids: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            pids += map(int, (thread / "children").read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids
