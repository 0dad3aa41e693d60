"""What /proc reports about this machine and its processes."""

import os
import subprocess
import sys

from sd3_light.system import available_memory, host_bytes, machine, process_exists, process_start


def test_available_memory_is_part_of_the_physical_memory() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = available_memory()
    assert available is not None
    assert 0 < available <= total


def test_host_memory_includes_child_processes() -> None:
    before = host_bytes()
    code = "x = bytearray(200 << 20); print(len(x), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert host_bytes() - before > 190 << 20
    finally:
        child.communicate("\n")


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


def test_the_machine_has_one_name() -> None:
    assert machine() == machine()
    assert "~" not in machine()
