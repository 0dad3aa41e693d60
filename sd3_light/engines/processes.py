"""The processes of a run: their groups, and what they agree on without waiting for each other."""

import atexit
import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sd3_light.config.faults import PeerLost, UserError
from sd3_light.engines.launch import Launch

_SAVING_TIMEOUT = timedelta(hours=2)
"""A save waits, in a thread, for the slowest disk. Whoever waits for a save hears from the others meanwhile."""

_PULSE = 1.0
"""Seconds between two signs of life of a rank that is not done yet."""

_MOST_GROUPS = 4  # with gloo: the default one, control, saving, snapshots
_FILES_A_GROUP = 3  # measured with 2, 4 and 8 processes
_OTHER_FILES = 1024  # open shards, logs, libraries, loaders


@dataclass(frozen=True)
class ProcessGroups:
    """Groups that talk through host memory (gloo): ``control`` of all ranks for the main thread, ``saving`` and
    ``snapshots`` of the first ``writers`` ranks, which write, each for a thread of its own. None where there is nobody
    to talk to."""

    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    snapshots: dist.ProcessGroup | None = None
    writers: int = 1

    def wait_for_all(self, is_done: Callable[[float], bool]) -> None:
        """Wait until all ranks are done, however long one of them works; ``is_done(seconds)`` waits no longer.

        A rank that is not done says so every second, so that one that is gone is missed within `dist_timeout_sec`.
        """
        while True:
            busy = torch.tensor(0 if is_done(_PULSE) else 1)
            if self.control is not None:
                dist.all_reduce(busy, group=self.control)
            if not busy:
                return

    def decide_on_rank_0(self, is_first: bool, decide: Callable[[], str | None]) -> str | None:
        """What rank 0 decides, on all ranks; a fault of the user that it meets is raised on all of them."""
        decision: list[str | None] = [None, None]
        if is_first:
            try:
                decision[0] = decide()
            except UserError as fault:
                decision[1] = str(fault)
        if self.control is not None:
            dist.broadcast_object_list(decision, 0, self.control)
        if decision[1] is not None:
            raise UserError(decision[1])
        return decision[0]


def start_process_group(
    launch: Launch, device: torch.device, timeout_sec: float, all_write: bool = False
) -> ProcessGroups:
    """Join the other processes; made after the cache stage, which needs none (law 9).

    Whoever does not come within ``timeout_sec`` is a fault of the user in one line. Where each holds something of its
    own, they ``all_write``; otherwise the processes of the first machine share the writing of what is equal on all.
    """
    if launch.world == 1:
        return ProcessGroups()
    with _rendezvous_errors(launch, timeout_sec):
        return _join(launch, device, timedelta(seconds=timeout_sec), all_write)


def _join(launch: Launch, device: torch.device, timeout: timedelta, all_write: bool) -> ProcessGroups:
    _allow_sockets(launch.world)
    open_default_group(device, timeout=timeout, device_id=device if device.type == "cuda" else None)
    control = dist.new_group(backend="gloo", timeout=timeout)
    first_machine = torch.tensor(launch.local_world)  # others may have more processes, or fewer
    dist.broadcast(first_machine, 0, control)
    writers = launch.world if all_write else int(first_machine)
    if writers == 1:
        return ProcessGroups(control)
    ranks = list(range(writers))
    saving, snapshots = (dist.new_group(ranks, backend="gloo", timeout=_SAVING_TIMEOUT) for _ in range(2))
    return ProcessGroups(control, saving, snapshots, writers)


def open_default_group(device: torch.device, **options: Any) -> None:
    """Make the group of all processes, unless there is one; it ends when this process does.

    Whoever leaves NCCL's group to the interpreter's end may wait for its threads there for ever.
    """
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
        atexit.register(_leave)


def _leave() -> None:
    if hasattr(sys, "last_value"):  # a script's own error ends it
        abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def abort_process_group() -> None:
    """Leave the group without a word to the others, who may be dead or in the middle of something: after a fault."""
    atexit.unregister(_leave)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        c10d._abort_process_group()


def apply_timeout(groups: ProcessGroups, timeout_sec: float) -> None:
    """Let groups that a library has made for itself wait no longer than ours, those for saving apart.

    DeepSpeed gives its own no time, so they would have torch's: half an hour with gloo.
    """
    patient = (groups.saving, groups.snapshots)
    if groups.control is not None:
        for group in tuple(c10d._world.pg_map):
            if group not in patient:
                c10d._set_pg_timeout(timedelta(seconds=timeout_sec), group)


def num_sockets(world: int, groups: int = _MOST_GROUPS) -> int:
    """Files that a process holds open for its groups: in each of them a socket to every other process, and a few."""
    return groups * (world + _FILES_A_GROUP)


def _allow_sockets(world: int) -> None:
    """Raise this process's limit of open files where many processes need more; many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_sockets(world) + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _rendezvous_errors(launch: Launch, timeout_sec: float) -> Iterator[None]:
    """What goes wrong while processes look for each other, in one line that names where they meet."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # torch and gloo raise no others here; ValueError: a variable is unset
        where = ":".join(os.environ.get(name) or f"({name} is not set)" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"rank {launch.rank} of {launch.world} on {socket.gethostname()} does not meet the others at {where} "
            f"within dist_timeout_sec = {timeout_sec:g} ({_in_short(error)}); start every machine with the address and "
            "a free port of the first one, see that it can be reached, and where machines have several networks set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (docs/multi-node.md)"
        ) from error


def lost_peer(error: RuntimeError) -> PeerLost | None:
    """Another process's death, or silence, as a fault in one line; None for other errors.

    It shows wherever processes talk, also inside a backward pass. Gloo raises plain RuntimeErrors that begin with a
    place in its transport; those of NCCL and of the store have a type.
    """
    if not isinstance(error, dist.DistError) and "/gloo/transport/" not in str(error):
        return None
    return PeerLost(
        f"{socket.gethostname()} lost another process of the run ({_in_short(error)}): it ended, or its machine or the "
        "network did; look at the first error of the other machines, then start all of them again, a training with "
        "--resume_from_checkpoint"
    )


@contextmanager
def peer_loss_as_user_error() -> Iterator[None]:
    """Inside the block a lost process is a fault of the user in one line, as `lost_peer` says it."""
    try:
        yield
    except RuntimeError as error:
        if fault := lost_peer(error):
            raise fault from error
        raise


def _in_short(error: Exception) -> str:
    """What happened, without places in the sources of others and without their advice."""
    text = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] ?", "", str(error).partition("\n")[0])
    return re.split(r"\. (?:This is|The client socket has failed to connect to \S+:\d)", text)[0].rstrip(". ")


class SharedFlags:
    """What any rank wishes, told to all of them a call later, so that nobody waits for the answer.

    With one process the answer is its own wish at once. All ranks ask equally often.
    """

    def __init__(self, group: dist.ProcessGroup | None, wishes: int) -> None:
        self.group = group
        self._wishes = wishes
        self._sent: tuple[Tensor, dist.Work] | None = None

    def exchange(self, wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which of the wishes some rank had at the call before (with one process: at this one)."""
        assert len(wishes) == self._wishes
        if self.group is None:
            return wishes
        answer = self.close()
        sent = torch.tensor(wishes, dtype=torch.int32)
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, self.group, async_op=True)
        assert work is not None
        self._sent = (sent, work)
        return answer

    def close(self) -> tuple[bool, ...]:
        """The last answer; nothing is under way afterwards."""
        if self._sent is None:
            return (False,) * self._wishes
        sent, work = self._sent
        work.wait()
        self._sent = None
        return tuple(bool(value) for value in sent.tolist())
