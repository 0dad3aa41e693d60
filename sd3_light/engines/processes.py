"""The process groups of a run, errors of lost peers, and flags that ranks share without waiting for each other."""

import atexit
import os
import re
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sd3_light.config.faults import PeerLost, UserError
from sd3_light.launch import Launch
from sd3_light.runlog import info

_SAVING_TIMEOUT = timedelta(hours=2)
"""A save waits in a thread for the slowest disk. Ranks that wait for it exchange heartbeats meanwhile."""

_HEARTBEAT_SECONDS = 1.0

_MAX_GROUPS = 4  # with gloo: the default group, control, saving, snapshots
_FILES_PER_GROUP = 3  # measured with 2, 4 and 8 processes
_OTHER_FILES = 1024  # open shards, logs, libraries, loaders

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ProcessGroups:
    """Gloo groups, which communicate through host memory; None for a single process.

    ``control`` has all ranks and is used by the main thread. ``saving`` and ``snapshots`` have the first ``writers``
    ranks, and each is used by its own thread.
    """

    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    snapshots: dist.ProcessGroup | None = None
    writers: int = 1

    def wait_for_all(self, is_done: Callable[[float], bool]) -> None:
        """Wait until all ranks are done, without a time limit; ``is_done(seconds)`` waits at most that long.

        A busy rank sends a heartbeat every second, so a lost rank is noticed within `dist_timeout_sec`.
        """
        while True:
            busy = torch.tensor(0 if is_done(_HEARTBEAT_SECONDS) else 1)
            if self.control is not None:
                dist.all_reduce(busy, group=self.control)
            if not busy:
                return

    def decide_on_rank_0(self, decide: Callable[[], Any]) -> Any:
        """Return on all ranks what rank 0 decides; its `UserError` is raised on all ranks too."""
        if self.control is None:
            return decide()
        decision: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                decision[0] = decide()
            except UserError as error:
                decision[1] = str(error)
        dist.broadcast_object_list(decision, 0, self.control)
        if decision[1] is not None:
            raise UserError(decision[1])
        return decision[0]

    def first_problem(self, problem: str | None) -> str | None:
        """Return on all ranks the problem of the first rank that has one; None if no rank has one."""
        return next((each for each in self.gathered(problem) if each is not None), None)

    def gathered(self, value: _Value) -> list[_Value]:
        """Return on all ranks the values of all of them."""
        if self.control is None:
            return [value]
        values = [value] * dist.get_world_size(self.control)
        dist.all_gather_object(values, value, self.control)
        return values


def start_process_group(
    launch: Launch, device: torch.device, timeout_sec: float, all_write: bool = False
) -> ProcessGroups:
    """Join the other processes and return the groups; called after the cache is built, which uses none (law 9).

    Raises a `UserError` if the processes do not connect within ``timeout_sec``. With ``all_write`` every process writes
    its own state to checkpoints; otherwise the processes of the first machine share the writing of replicated state.
    """
    if launch.world_size == 1:
        return ProcessGroups()
    try:
        return _join(launch, device, timedelta(seconds=timeout_sec), all_write)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # torch and gloo raise only these; ValueError: a variable is not set
        address = ":".join(os.environ.get(name) or f"({name} is not set)" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()} could not connect to the other ranks "
            f"at {address} within dist_timeout_sec = {timeout_sec:g} ({_summary(error)}); start every machine with the "
            "address and a free port of the first one, check that it is reachable, and on machines with several "
            "networks set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (docs/reference/multi-node.md)"
        ) from error


def _join(launch: Launch, device: torch.device, timeout: timedelta, all_write: bool) -> ProcessGroups:
    _allow_sockets(launch.world_size)
    gpus = torch.cuda.device_count()
    has_own_gpu = device.type == "cuda" and launch.local_world_size <= gpus
    if device.type == "cuda" and not has_own_gpu and launch.is_main:
        info(f"{launch.local_world_size} processes share {gpus} GPU(s): they communicate through the host")
    backend, device_id = ("nccl", device) if has_own_gpu else ("gloo", None)
    open_default_group(backend, timeout=timeout, device_id=device_id)
    control = dist.new_group(backend="gloo", timeout=timeout)
    first_machine = torch.tensor(launch.local_world_size)  # machines may have different numbers of processes
    dist.broadcast(first_machine, 0, control)
    writers = launch.world_size if all_write else int(first_machine)
    if writers == 1:
        return ProcessGroups(control)
    ranks = list(range(writers))
    saving, snapshots = (dist.new_group(ranks, backend="gloo", timeout=_SAVING_TIMEOUT) for _ in range(2))
    return ProcessGroups(control, saving, snapshots, writers)


def open_default_group(backend: str, **options: Any) -> None:
    """Create the default process group unless it exists, and destroy it when this process exits.

    Without that, an NCCL group's threads can block the interpreter's shutdown forever.
    """
    if not dist.is_initialized():
        dist.init_process_group(backend, **options)
        atexit.register(_leave)


def _leave() -> None:
    if hasattr(sys, "last_value"):  # the script ended with an uncaught error
        abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def abort_process_group() -> None:
    """Leave the group after an error without waiting for other ranks, which may be dead or busy."""
    atexit.unregister(_leave)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        c10d._abort_process_group()


def apply_timeout(groups: ProcessGroups, timeout_sec: float) -> None:
    """Apply our timeout to groups that a library created, except for those used for saving.

    DeepSpeed sets no timeout for its groups, so they would use torch's default: 30 minutes with gloo.
    """
    excluded = (groups.saving, groups.snapshots)
    if groups.control is not None:
        for group in tuple(c10d._world.pg_map):
            if group not in excluded:
                c10d._set_pg_timeout(timedelta(seconds=timeout_sec), group)


def num_sockets(world_size: int) -> int:
    """Return the number of open files of the process groups: one socket per process and group, and a few more."""
    return _MAX_GROUPS * (world_size + _FILES_PER_GROUP)


def _allow_sockets(world_size: int) -> None:
    """Raise this process's limit of open files if needed; many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_sockets(world_size) + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


_GLOO_ERRORS = (
    "/gloo/transport/",  # most begin with a source path
    "Application timeout caused pair closure",  # of a connection on which another operation has timed out
)


def lost_peer(error: RuntimeError) -> PeerLost | None:
    """Return a one-line error if another process died or stopped responding; None for other errors.

    It surfaces in any collective, also inside a backward pass. Gloo raises plain RuntimeErrors, which `_GLOO_ERRORS`
    recognise; errors of NCCL and of the store have a type.
    """
    if not isinstance(error, dist.DistError) and not any(text in str(error) for text in _GLOO_ERRORS):
        return None
    return PeerLost(
        f"{socket.gethostname()} lost another process of the run ({_summary(error)}): the process, its machine or the "
        "network failed; find the first error on the other machines, then restart all of them, training with --resume"
    )


def _summary(error: Exception) -> str:
    """Return the error's first line without source locations and generic advice."""
    text = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] ?", "", str(error).partition("\n")[0])
    return re.split(r"\. (?:This is|The client socket has failed to connect to \S+:\d)", text)[0].rstrip(". ")


class SharedFlags:
    """Flags that any rank can raise and all ranks see one call later, so that no rank waits for the others.

    All ranks must call `exchange` equally often.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int) -> None:
        self.group = group
        self._count = count
        self._sent: tuple[Tensor, dist.Work] | None = None

    def exchange(self, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """Send this rank's flags; return those that any rank raised at the previous call.

        A single process gets its own flags back.
        """
        assert len(flags) == self._count
        if self.group is None:
            return flags
        received = self.close()
        sent = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, self.group, async_op=True)
        assert work is not None
        self._sent = (sent, work)
        return received

    def close(self) -> tuple[bool, ...]:
        """Wait for the exchange in progress and return its flags."""
        if self._sent is None:
            return (False,) * self._count
        sent, work = self._sent
        work.wait()
        self._sent = None
        return tuple(bool(value) for value in sent.tolist())
