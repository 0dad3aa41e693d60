"""What goes wrong between processes, in words: no one comes, or someone goes."""

import resource
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sd3_light.config.faults import UserError
from sd3_light.engines import Launch, processes
from sd3_light.engines.processes import (
    ProcessGroups,
    apply_timeout,
    lost_peer,
    peer_loss_as_user_error,
    start_process_group,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/"
ADVICE = " This is typically caused by a remote worker crashing. Check the logs."


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:36028.{ADVICE}"), "[10.0.0.2]:36028)"),
        (RuntimeError(f"{GLOO}pair.cc:537] Read error [10.0.0.1]:8601: Connection reset by peer.{ADVICE}"), "by peer)"),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 15000ms for recv"), "(Timed out waiting 15000ms"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error\nmore"), "error)"),
        (dist.DistStoreError("wait timeout after 15000ms, keys: /a"), "(wait timeout after 15000ms, keys: /a)"),
    ],
)
def test_a_lost_process_is_one_line_with_its_remedy(error: RuntimeError, told: str) -> None:
    text = str(lost_peer(error))
    assert told in text
    assert text.startswith(f"{socket.gethostname()} lost another process of the run")
    assert text.endswith("--resume_from_checkpoint")
    assert not [part for part in ("\n", "pair.cc", "typically") if part in text]
    with pytest.raises(UserError, match="lost another process") as fault, peer_loss_as_user_error():
        raise error
    assert fault.value.__cause__ is error


@pytest.mark.parametrize("text", ["shape mismatch in gloo", "DataLoader worker is killed"])
def test_other_errors_stay_what_they_are(text: str) -> None:
    assert lost_peer(RuntimeError(text)) is None
    with pytest.raises(RuntimeError, match=text), peer_loss_as_user_error():
        raise RuntimeError(text)


def test_nobody_is_waited_for_alone() -> None:
    assert start_process_group(Launch(), CPU, 1.0) == ProcessGroups()


def test_a_meeting_that_fails_names_place_time_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    monkeypatch.setenv("MASTER_PORT", "29500")
    patience: list[float] = []

    def refuse(backend: str, timeout: Any, device_id: Any) -> None:
        patience.append(timeout.total_seconds())
        raise dist.DistNetworkError(
            "The client socket has failed to connect to any network address of (10.0.0.9, 29500). "
            "The client socket has failed to connect to [10f::]:1 (errno: 113).\nException raised from run"
        )

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(UserError) as fault:
        start_process_group(Launch(1, 1, 2), CPU, 7.0)
    text = str(fault.value)
    assert patience == [7.0]
    assert text.startswith(f"rank 1 of 2 on {socket.gethostname()} does not meet the others at 10.0.0.9:29500 within")
    assert "dist_timeout_sec = 7 (The client socket has failed to connect to any network address of (10.0.0.9" in text
    assert "[10f::]" not in text, "torch misprints the address here"
    assert "GLOO_SOCKET_IFNAME" in text
    assert "\n" not in text


def test_a_launcher_that_sets_no_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"MASTER_ADDR is not set\):\(MASTER_PORT is not set\)"):
        start_process_group(Launch(0, 0, 2), CPU, 1.0)


def test_too_little_memory_is_no_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dist, "init_process_group", fill)
    with pytest.raises(torch.OutOfMemoryError):
        start_process_group(Launch(0, 0, 2), CPU, 1.0)


@pytest.mark.parametrize(
    ("soft", "hard", "given"),
    [
        (4096, 4096, None),  # 2 processes need no more
        (1024, 1 << 20, 4 * 1027 + 1024),
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 4 * 1027 + 1024),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_many_processes_may_open_a_socket_to_each_other(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, given: int | None
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: seen.append(limits))
    world = 2 if soft == 4096 else 1024
    processes._allow_sockets(world)
    assert seen == ([] if given is None else [(given, hard)])


def test_groups_of_a_library_wait_as_long_as_ours_and_a_save_longer() -> None:
    def patience(group: Any) -> float:
        seconds: float = group._get_backend(CPU).options._timeout.total_seconds()
        return seconds

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        control, theirs = dist.new_group(), dist.new_group()
        saving = dist.new_group(timeout=timedelta(hours=2))
        assert patience(theirs) == 1800
        apply_timeout(ProcessGroups(control, saving), 7.0)
        assert [patience(group) for group in (control, theirs, saving)] == [7, 7, 7200]
    finally:
        dist.destroy_process_group()


def test_waiting_asks_until_the_work_is_done() -> None:
    answers = iter([False, False, True])
    asked: list[float] = []

    def is_done(seconds: float) -> bool:
        asked.append(seconds)
        return next(answers)

    ProcessGroups().wait_for_all(is_done)
    assert asked == [1.0] * 3


_ENDING = """
import atexit
import torch, torch.distributed as dist
from sd3_light.engines.processes import abort_process_group, open_default_group
atexit.register(lambda: print("left" if not dist.is_initialized() else "still there"))
open_default_group(torch.device("cpu"), store=dist.HashStore(), rank=0, world_size=1)
open_default_group(torch.device("cpu"), store=None)  # there is one
"""


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [("", "left", 0), ("abort_process_group()", "still there", 0), ("raise OSError", "still there", 1)],
)
def test_a_process_leaves_its_group_in_order_unless_it_fails(end: str, said: str, code: int) -> None:
    """To wait for others after a fault could be to wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDING + end], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert (done.stdout.strip(), done.returncode) == (said, code), done.stderr
