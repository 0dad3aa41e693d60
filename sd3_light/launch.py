"""Rank and world size of this process, as its launcher set them."""

import os
from dataclasses import dataclass, replace

import torch

from sd3_light.config.faults import UserError


@dataclass(frozen=True)
class Launch:
    """Rank, rank on this machine, and number of processes (world).

    ``neighbours`` are processes on this machine that train something else, if this one is alone in its world.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    neighbours: int = 0

    @property
    def local_world_size(self) -> int:
        """Number of processes that share this machine."""
        if self.world_size == 1:
            return 1 + self.neighbours
        size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # torchrun's, DeepSpeed's
        return min(self.world_size, int(size or self.world_size))

    @property
    def spans_machines(self) -> bool:
        """Whether there are processes on other machines. Not for a `data_launch`, whose world may be one machine's."""
        return self.local_world_size < self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process logs and decides for all (rank 0)."""
        return self.rank == 0

    def data_launch(self, stages: int = 1) -> "Launch":
        """Return rank and world for data loading: the stages of one pipeline count as one and read the same data."""
        replicas = self.world_size // stages
        return replace(self, rank=self.rank % replicas, world_size=replicas)

    def reads_data(self, stages: int = 1) -> bool:
        """Whether this process needs micro-batches.

        In a pipeline the first stage reads features and the last one labels; stages in between receive everything from
        their neighbours.
        """
        return self.stage(stages) in (0, stages - 1)

    def stage(self, stages: int) -> int:
        """Return the pipeline stage of this process: the first ranks of all pipelines, then the second ranks, ..."""
        return self.rank // (self.world_size // stages)

    @staticmethod
    def detect(local_rank: int | None = None) -> "Launch":
        """Return the launch that torchrun (by its run id) or the DeepSpeed launcher (by ``--local_rank``) set up.

        RANK, WORLD_SIZE or LOCAL_RANK alone may be left over in a shell; plain `python train.py` ignores them.
        """
        launched = "TORCHELASTIC_RUN_ID" in os.environ or (local_rank is not None and local_rank >= 0)
        if not launched:
            return Launch()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        variables = {name: os.environ.get(name, "") for name in names}
        if all(map(str.isdecimal, variables.values())):
            launch = Launch(*map(int, variables.values()))
            if max(launch.rank, launch.local_rank) < launch.world_size:
                return launch
        listed = ", ".join(f"{name}={value!r}" for name, value in variables.items())
        raise UserError(
            f"the launcher set {listed}, which is not valid; start with torchrun or plain python, without --local_rank"
        )

    def device(self, preference: str = "auto") -> torch.device:
        """Return this process's GPU, or the CPU if preferred or if there is no GPU; surplus processes share GPUs."""
        if preference == "cpu" or (preference == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UserError("caching_device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())
