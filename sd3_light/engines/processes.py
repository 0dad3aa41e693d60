"""The processes of a run: their groups, and what they agree on without waiting for each other."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.engines.launch import Launch

_SAVING_TIMEOUT = timedelta(hours=2)
"""A save waits for the slowest disk; training goes on meanwhile."""


@dataclass(frozen=True)
class Groups:
    """Groups that talk through host memory (gloo): ``control`` of all ranks for the main thread, ``saving`` and
    ``snapshots`` of the first ``writers`` ranks, which write, each for a thread of its own, and ``ending`` of all ranks
    with the patience of a save. None where there is nobody to talk to."""

    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    snapshots: dist.ProcessGroup | None = None
    ending: dist.ProcessGroup | None = None
    writers: int = 1

    def meet(self) -> None:
        """Wait for all ranks, as long as a save may take."""
        if self.ending is not None:
            dist.barrier(self.ending)

    def by_first(self, is_first: bool, decide: Callable[[], str | None]) -> str | None:
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


def start_process_group(launch: Launch, device: torch.device, timeout_sec: float, all_write: bool = False) -> Groups:
    """Join the other processes; made after the cache stage, which needs none (law 9).

    Where each holds something of its own, they ``all_write``. Otherwise the processes of the first machine share the
    writing of what is equal on all.
    """
    if launch.world == 1:
        return Groups()
    timeout = timedelta(seconds=timeout_sec)
    if not dist.is_initialized():
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda else None)
    control, ending = (dist.new_group(backend="gloo", timeout=patience) for patience in (timeout, _SAVING_TIMEOUT))
    first_machine = torch.tensor(launch.local_world)  # others may have more processes, or fewer
    dist.broadcast(first_machine, 0, control)
    writers = launch.world if all_write else int(first_machine)
    if writers == 1:
        return Groups(control, ending=ending)
    ranks = list(range(writers))
    saving, snapshots = (dist.new_group(ranks, backend="gloo", timeout=_SAVING_TIMEOUT) for _ in range(2))
    return Groups(control, saving, snapshots, ending, writers)


class Agreement:
    """What any rank wishes, told to all of them a call later, so that nobody waits for the answer.

    With one process the answer is its own wish at once. All ranks ask equally often.
    """

    def __init__(self, group: dist.ProcessGroup | None, wishes: int) -> None:
        self.group = group
        self._wishes = wishes
        self._sent: tuple[Tensor, dist.Work] | None = None

    def ask(self, wishes: tuple[bool, ...]) -> tuple[bool, ...]:
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
