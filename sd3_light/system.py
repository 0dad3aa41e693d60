"""Facts about this machine and its processes, read from /proc, and about its GPUs, from their driver."""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CPUS = Path("/sys/devices/system/cpu")
_SPINNING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}  # of GNU's (turns of a loop) and of LLVM's OpenMP (ms)
_M_MMAP_THRESHOLD = -3  # of malloc.h
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable that names torch's folder of compiled code."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The environment variable of torch's GPU memory, by its older name."""


def cache_folder() -> Path:
    """Return the folder of what this package keeps between runs: it can be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sd3_light"


def state_folder() -> Path:
    """Return the folder of what this package remembers for the user. A relative `XDG_STATE_HOME` is ignored: it would
    be a folder of the working directory."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path(os.path.expanduser("~/.local/state"))) / "sd3_light"


def keep_compiled_code() -> None:
    """Let torch keep compiled code in `cache_folder`, unless the environment names a folder.

    Its own default is a temporary folder, which a restart may empty. torch decides while it is imported, so call this
    before. A home that is not writable changes nothing.
    """
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ.setdefault(COMPILED_CODE, str(folder))


def join_gpu_memory() -> None:
    """Let torch's GPU memory grow in segments whose free pieces join, unless the environment says otherwise.

    Its own default keeps what a shape has freed in pieces that another shape does not fit: a LoRA of Flux.2 klein with
    two shapes of images took 36 GiB instead of 29, and encoding images of Wan 20 instead of 10. torch reads this when
    it first allocates; it can do so on Linux.
    """
    if sys.platform == "linux" and not {ALLOCATOR, "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ[ALLOCATOR] = "expandable_segments:True"


def release_freed_memory() -> None:
    """Let this process return memory to the system as soon as it is freed, in pieces of a mebibyte and more.

    The C library would keep it, cut up by smaller tensors that are allocated in between: half as much again as the
    weights of an export. Only GNU's has this setting. It makes allocations slower, so a training process does not
    call this.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


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


def limit_spinning() -> None:
    """Let idle OpenMP threads sleep after a short wait instead of a long one, unless the environment has a policy.

    A thread that spins while it waits takes the core from the one it waits for, if other processes are busy. The
    libraries read these variables when they are loaded, so call this before torch is imported.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SPINNING)):
        os.environ.update(_SPINNING)


def usable_cores() -> int:
    """Return the physical cores that this process may use: its CPU affinity, within the quota of its cgroup."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_thread_siblings(cpu) for cpu in allowed}
    quotas = [quota for group in _cgroups() if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([len(cores), *quotas])))


def _thread_siblings(cpu: int) -> str:
    """Return the hardware threads of the core that a CPU belongs to, as the kernel writes them."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:  # not Linux, or hidden in a container
        return str(cpu)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may limit CPU time, and those of their parents."""
    try:
        lines = _CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:  # number:controllers:path; version 2 has no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = _CGROUPS / "cpu" if controllers else _CGROUPS
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _cpu_quota(group: Path) -> float | None:
    """Return the CPUs that a cgroup may use at once; None if it has no limit."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None


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
