"""Who this process is among those of its launcher."""

import os
from dataclasses import dataclass, replace

import torch

from sd3_light.config.faults import UserError


@dataclass(frozen=True)
class Launch:
    """Rank, rank on this machine, and number of processes."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1

    @property
    def local_world(self) -> int:
        """Processes of this machine, as the launcher says."""
        if self.world == 1:
            return 1
        said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # torchrun's, DeepSpeed's
        return min(self.world, int(said or self.world))

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def data_launch(self, stages: int = 1) -> "Launch":
        """As the data sees it: the processes of one pipeline, one a stage, count as one and read the same."""
        replicas = self.world // stages
        return replace(self, rank=self.rank % replicas, world=replicas)

    def reads_data(self, stages: int = 1) -> bool:
        """Whether this process takes anything of its micro-batches: in a pipeline the first stage takes features and
        the last one labels; all that the ones between need comes from their neighbours."""
        stage = self.rank // (self.world // stages)
        return stage in (0, stages - 1)

    @staticmethod
    def detect(local_rank: int | None = None) -> "Launch":
        """From what torchrun (its run id) or the DeepSpeed launcher (``--local_rank``) says.

        RANK, WORLD_SIZE or LOCAL_RANK alone may be left over in a shell and mean nothing to a plain `python train.py`.
        """
        launched = "TORCHELASTIC_RUN_ID" in os.environ or (local_rank is not None and local_rank >= 0)
        if not launched:
            return Launch()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = {name: os.environ.get(name, "") for name in names}
        if all(map(str.isdecimal, given.values())):
            found = Launch(*map(int, given.values()))
            if max(found.rank, found.local_rank) < found.world:
                return found
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UserError(f"the launcher set {said}; start with torchrun or plain python, without --local_rank")

    def device(self, wish: str = "auto") -> torch.device:
        """This process's GPU where there is one and the wish allows it; more processes than GPUs share them."""
        if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UserError("caching_device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())
