"""The number of CPU threads that torch uses for one operation; OMP_NUM_THREADS and MKL_NUM_THREADS take precedence.

All threads of an operation wait for the slowest, so one more thread than there are free cores makes every operation
wait for the scheduler.
"""

import os

import torch

from sd3_light.system import usable_cores

FLOPS_PER_THREAD = 10**10
"""FLOPs of a micro-batch that one more thread is worth; with fewer, starting the threads costs more than it saves."""


def limit_threads(processes: int) -> None:
    """Use no more threads than physical cores: torch counts hardware threads, and CPUs beyond a container's quota.

    ``processes`` of this machine share the cores.
    """
    _set(min(torch.get_num_threads(), usable_cores() // processes))


def use_training_threads(flops: int, processes: int) -> int | None:
    """Set the threads of training on a CPU for micro-batches of that many FLOPs; return None if the environment does.

    The number of loader workers does not count: another number of threads adds in another order, and workers must not
    change the training.
    """
    return _set(min(usable_cores() // processes, flops // FLOPS_PER_THREAD))


def _set(count: int) -> int | None:
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return None
    torch.set_num_threads(max(1, count))
    return max(1, count)
