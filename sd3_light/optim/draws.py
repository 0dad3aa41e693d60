"""Random numbers for the update of a weight: functions of seed, step and name, so that runs resume exactly."""

import torch
from torch import Tensor

from sd3_light.randomness import sample_id


class StepDraws:
    """Gives every update its own generator. ``step`` counts the steps before it.

    Numbers do not depend on the layout of a run, and no state has to be saved. A CPU and a GPU draw different ones.
    """

    def __init__(self, seed: int = 0) -> None:
        self.step = 0
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, purpose: str, name: str, device: torch.device) -> torch.Generator:
        """Return the generator of one purpose for one weight in this step; use it before the next call."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        generator.manual_seed(sample_id(f"{self._seed}/{purpose}/{self.step}/{name}"))
        return generator


@torch.no_grad()
def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 values in bfloat16: one of the two neighbours, the nearer one more often, right on average.

    A value that bfloat16 can represent stays what it is.
    """
    bits = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    bits.random_(0, 1 << 16, generator=generator)  # added to the 16 bits that bfloat16 lacks: a carry rounds up
    bits += values.view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
