"""What /proc reports about this machine and its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd3_light import system
from sd3_light.system import (
    ALLOCATOR,
    available_memory,
    host_bytes,
    join_gpu_memory,
    machine,
    process_exists,
    process_start,
    usable_cores,
)


def test_memory_includes_child_processes_and_the_machine_has_one_name() -> None:
    before = host_bytes()
    code = "x = bytearray(200 << 20); print(len(x), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    child.stdout.readline()
    try:
        assert host_bytes() - before > 190 << 20
    finally:
        child.communicate("\n")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = available_memory()
    assert available is not None
    assert 0 < available <= total
    assert machine() == machine()
    assert "~" not in machine()


def test_a_process_has_a_start_time_until_it_ends() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) != ""
    child = subprocess.Popen(["sleep", "60"])
    assert process_exists(child.pid)
    assert process_start(child.pid) not in ("", process_start(os.getpid()))
    child.kill()
    while process_exists(child.pid) and process_start(child.pid):  # a zombie has ended, too
        pass
    assert process_start(child.pid) == ""
    child.wait()
    assert not process_exists(child.pid)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 4 cores with 2 hardware threads each, CPUs n and n + 4, all of which this process may use."""
    for cpu in range(8):
        topology = tmp_path / f"cpus/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "cgroup").write_text("")
    monkeypatch.setattr(system, "_CPUS", tmp_path / "cpus")
    monkeypatch.setattr(system, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(system, "_CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_hardware_threads_of_a_core_count_once(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    assert usable_cores() == 2
    (host / "cpus/cpu6/topology/thread_siblings_list").unlink()
    assert usable_cores() == 2, "a CPU of unknown topology is a core"


PERIOD = {"cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/job\n", {"job/cpu.max": "250000 100000"}, 2),
        ("0::/job/step\n", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/job\n", {"job/cpu.max": "max 100000"}, 4),
        ("0::/job\n", {"job/cpu.max": "damaged"}, 4),
        ("0::/job\n", {}, 4),
        ("5:cpuset:/\n1:cpuacct,cpu:/docker/x\n0::/\n", {"cpu/cpu.cfs_quota_us": "300000", **PERIOD}, 3),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", **PERIOD}, 4),
    ],
)
def test_the_quota_of_a_cgroup_limits_the_cores(host: Path, cgroup: str, files: dict[str, str], cores: int) -> None:
    (host / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = host / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert usable_cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of GNU's C library")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Pieces of four mebibytes, which are freed while a smaller one behind them stays."""
    script = """
import ctypes, sys
from sd3_light.system import release_freed_memory
if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("skip")
if sys.argv[1] == "yes":
    release_freed_memory()
large = bytearray(8 << 20)  # the threshold of the C library rises to what is freed
del large
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
start = resident()
pieces = [bytearray(4 << 20) for _ in range(40)]
marks = [bytearray(100 << 10) for _ in range(40)]
del pieces
print((resident() - start) >> 20)
"""
    grown = {}
    for called in ("yes", "no"):
        done = subprocess.run([sys.executable, "-c", script, called], capture_output=True, text=True, check=False)
        if done.stderr.strip() == "skip":
            pytest.skip("another C library")
        grown[called] = int(done.stdout)
    assert grown["yes"] < 60 < 150 < grown["no"]


def test_the_environment_decides_on_gpu_memory_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATOR, "")
    monkeypatch.delenv(ALLOCATOR)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    join_gpu_memory()
    assert ALLOCATOR not in os.environ
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    join_gpu_memory()
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    monkeypatch.setenv(ALLOCATOR, "max_split_size_mb:64")
    join_gpu_memory()
    assert os.environ[ALLOCATOR] == "max_split_size_mb:64"
