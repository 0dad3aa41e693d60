"""Errors as one line, also of processes that do not connect or are lost; settings of process groups."""

import multiprocessing
import os
import resource
import socket
import struct
import subprocess
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from sd3_light.config import SIZES
from sd3_light.config.faults import PeerLost, UserError
from sd3_light.engines import Launch, processes
from sd3_light.engines.errors import as_user_error, explain_runtime_errors
from sd3_light.engines.processes import ProcessGroups, apply_timeout, lost_peer, start_process_group
from sd3_light.engines.protocol import assign_writers
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nOf the allocated"
CPU = torch.device("cpu")
GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/"
ADVICE = " This is typically caused by a remote worker crashing. Check the logs."
_EXIT_SCRIPT = """
import atexit
import torch, torch.distributed as dist
from sd3_light.engines.processes import abort_process_group, open_default_group
atexit.register(lambda: print("left" if not dist.is_initialized() else "still there"))
open_default_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
open_default_group("gloo", store=None)  # it exists already
"""


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), EOFError(), RuntimeError("shapes\nand more"), struct.error("odd"), zlib.error("x")]
)
def test_errors_of_user_code_name_it(error: Exception) -> None:
    message = rf"^draw raised {type(error).__name__}.*; fix it$"
    with pytest.raises(UserError, match=message) as raised, as_user_error("draw"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError(MEMORY), UserError, "Tried to allocate 2.00 GiB; lower batch_size (and raise"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:5] closed"), PeerLost, "lost another"),
    ],
)
def test_errors_of_the_machine_are_not_user_code_errors(error: Exception, kind: type[UserError], message: str) -> None:
    for block in (as_user_error("unit Encode"), explain_runtime_errors()):
        with pytest.raises(kind) as raised, block:
            raise error
        assert message in str(raised.value)
        assert "fix it" not in str(raised.value)
        assert "\n" not in str(raised.value)


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("error", "excerpt"),
    [
        (RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:36028.{ADVICE}"), "[10.0.0.2]:36028)"),
        (RuntimeError(f"{GLOO}pair.cc:537] Read error [10.0.0.1]:8601: Connection reset by peer.{ADVICE}"), "by peer)"),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 15000ms for recv"), "(Timed out waiting 15000ms"),
        (RuntimeError("Application timeout caused pair closure"), "(Application timeout caused pair closure)"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error\nmore"), "error)"),
        (dist.DistStoreError("wait timeout after 15000ms, keys: /a"), "(wait timeout after 15000ms, keys: /a)"),
    ],
)
def test_a_lost_process_is_a_one_line_error_with_a_remedy(error: RuntimeError, excerpt: str) -> None:
    text = str(lost_peer(error))
    assert excerpt in text
    assert text.startswith(f"{socket.gethostname()} lost another process of the run")
    assert text.endswith("training with --resume")
    assert not [part for part in ("\n", "pair.cc", "typically") if part in text]
    with pytest.raises(UserError, match="lost another process") as raised, explain_runtime_errors():
        raise error
    assert raised.value.__cause__ is error
    for other in ("shape mismatch in gloo", "DataLoader worker is killed"):
        assert lost_peer(RuntimeError(other)) is None
        with pytest.raises(RuntimeError, match=other), explain_runtime_errors():
            raise RuntimeError(other)


def test_a_failed_rendezvous_names_address_timeout_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    monkeypatch.setenv("MASTER_PORT", "29500")
    timeouts: list[float] = []

    def refuse(backend: str, timeout: Any, device_id: Any) -> None:
        timeouts.append(timeout.total_seconds())
        raise dist.DistNetworkError(
            "The client socket has failed to connect to any network address of (10.0.0.9, 29500). "
            "The client socket has failed to connect to [10f::]:1 (errno: 113).\nException raised from run"
        )

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(UserError) as raised:
        start_process_group(Launch(1, 1, 2), CPU, 7.0)
    text = str(raised.value)
    assert timeouts == [7.0]
    who = f"rank 1 of 2 on {socket.gethostname()}"
    assert text.startswith(f"{who} could not connect to the other ranks at 10.0.0.9:29500 within")
    assert "dist_timeout_sec = 7 (The client socket has failed to connect to any network address of (10.0.0.9" in text
    assert "[10f::]" not in text, "torch misprints this address"
    assert "GLOO_SOCKET_IFNAME" in text
    assert "\n" not in text
    monkeypatch.undo()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"MASTER_ADDR is not set\):\(MASTER_PORT is not set\)"):
        start_process_group(Launch(0, 0, 2), CPU, 1.0)

    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        start_process_group(Launch(0, 0, 2), CPU, 1.0)


@pytest.mark.parametrize(
    ("world", "soft", "hard", "expected"),
    [
        (2, 4096, 4096, []),  # enough for 2 processes
        (1024, 1024, 1 << 20, [4 * 1027 + 1024]),
        (1024, 1024, 4096, [4096]),
        (1024, 1024, resource.RLIM_INFINITY, [4 * 1027 + 1024]),
        (1024, resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_open_file_limit_rises(monkeypatch: Any, world: int, soft: int, hard: int, expected: list[int]) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    processes._allow_sockets(world)
    assert limits_set == [(limit, hard) for limit in expected]


def test_our_timeout_applies_to_all_groups_but_saving() -> None:
    def timeout_of(group: Any) -> float:
        seconds: float = group._get_backend(CPU).options._timeout.total_seconds()
        return seconds

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        control, library = dist.new_group(), dist.new_group()
        saving, snapshots = (dist.new_group(timeout=timedelta(hours=2)) for _ in range(2))
        assert timeout_of(library) == 1800
        apply_timeout(ProcessGroups(control, saving, snapshots), 7.0)
        assert [timeout_of(group) for group in (control, library, saving, snapshots)] == [7, 7, 7200, 7200]
    finally:
        dist.destroy_process_group()


def test_wait_for_all_polls_until_done() -> None:
    is_done = Mock(side_effect=[False, False, True])
    ProcessGroups().wait_for_all(is_done)
    assert is_done.mock_calls == [call(1.0)] * 3
    assert start_process_group(Launch(), CPU, 1.0) == ProcessGroups()


def _share_problem(folder: Path, rank: int, answers: Any) -> None:
    store = dist.FileStore(str(folder / "store"), 3)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    groups = ProcessGroups(dist.new_group())
    problems = (None, f"problem of rank {rank}" if rank else None)
    answers.put([groups.first_problem(problem) for problem in problems])


def test_all_ranks_know_the_first_problem(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_share_problem, args=(tmp_path, rank, answers)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_SECONDS)
        assert rank.exitcode == 0
    assert [answers.get() for _ in ranks] == [[None, "problem of rank 1"]] * 3
    assert ProcessGroups().first_problem("own") == "own"


@pytest.mark.parametrize(
    ("end", "output", "code"),
    [("", "left", 0), ("abort_process_group()", "still there", 0), ("raise OSError", "still there", 1)],
)
def test_a_process_destroys_its_group_at_exit_or_fails(tmp_path: Path, end: str, output: str, code: int) -> None:
    """After an error, waiting for other processes could take forever."""
    script = tmp_path / "script.py"
    script.write_text(_EXIT_SCRIPT + end)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.stdout.strip(), done.returncode) == (output, code), done.stderr


@pytest.mark.parametrize("writers", [1, 2, 8])
def test_writers_get_about_the_same_size(writers: int) -> None:
    """Weights and biases alternate in a model: by index, one of two writers would write nearly everything."""
    layers = SIZES["sd3_light"].linear_layers().values()
    sizes = [size for inputs, outputs in layers for size in (inputs * outputs, outputs)]
    assigned = assign_writers(sizes, writers)
    totals = [0] * writers
    for size, writer in zip(sizes, assigned, strict=True):
        totals[writer] += size
    assert max(totals) < 1.05 * sum(sizes) / writers
    assert assigned == assign_writers(sizes, writers)
    assert sorted(assign_writers([5, 1], 4)) == [0, 1]
    assert assign_writers([], 2) == []
