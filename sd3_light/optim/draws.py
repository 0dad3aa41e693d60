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
        self._generators: dict[tuple[str, torch.device], torch.Generator] = {}

    def generator(self, purpose: str, name: str, device: torch.device) -> torch.Generator:
        """Return the generator of one purpose for one weight in this step; use it before the purpose's next call."""
        generator = self._generators.get((purpose, device))
        if generator is None:
            generator = self._generators[purpose, device] = torch.Generator(device)
        generator.manual_seed(sample_id(f"{self._seed}/{purpose}/{self.step}/{name}"))
        return generator


@torch.no_grad()
def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 values in bfloat16: one of the two neighbours, the nearer one more often, right on average.

    A value that bfloat16 can represent stays what it is.
    """
    return round_with(values, draw_rounding(values, generator))


def draw_rounding(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return a number for each value, by which `round_with` rounds it."""
    bits = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    return bits.random_(0, 1 << 16, generator=generator)


def round_with(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values by the numbers of `draw_rounding`, which are overwritten."""
    bits += values.view(torch.int32)  # added to the 16 bits that bfloat16 lacks: a carry rounds up
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
