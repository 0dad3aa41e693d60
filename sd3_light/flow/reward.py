"""Training towards a score: the loss of DiffusionNFT (arXiv 2509.16117), and rewards relative to a prompt's images."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Observes, Prediction, Predicts, Teacher
from sd3_light.flow.objective import flow_loss

_ROUNDING = 1e-4
"""Deviations below this share of the largest score are taken for rounding."""
DrawBatch = Callable[[Observes, Batch], Batch]
"""(model, batch) -> noisy latents of images that the run has drawn, their target, and ``reward`` [B] from 0 to 1."""


class Rewarded(Objective):
    """Contrasts good and bad images that the teacher drew.

    With the velocities v of the model and w of the teacher, a share b, the target u and the reward r of an image, the
    loss is r |w + b (v - w) - u|^2 + (1 - r) |w - b (v - w) - u|^2. It pulls v to better images and away from worse
    ones; where all images are equally good, it pulls v to w. `attach` gives it what draws.
    """

    def __init__(self, beta: float = 1.0, kl: float = 0.0, teacher: Teacher = "average") -> None:
        self.beta = beta
        self.teacher = teacher
        self.keeps_start = kl > 0
        self.weights = {"reward": 1.0, "kl": kl} if kl > 0 else {"reward": 1.0}
        self._draw: DrawBatch | None = None
        self._state: Mapping[str, Tensor] = {}

    def attach(self, draw: DrawBatch, state: Mapping[str, Tensor]) -> None:
        """Draw with this function, which keeps its images in ``state``."""
        self._draw = draw
        self._state = state

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See `Objective.state`."""
        return self._state

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """See `Objective.draw`."""
        assert self._draw is not None, "nothing draws the images"
        drawn = self._draw(model, batch)
        values = {"taught": model.teach(drawn).velocity}
        if self.keeps_start:
            values["first"] = model.first(drawn).velocity
        return drawn.with_values(values)

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        taught = batch["taught"].float()
        step = self.beta * (out.velocity.float() - taught)
        good = flow_loss(taught + step, batch["target"])
        bad = flow_loss(taught - step, batch["target"])
        each = {"reward": batch["reward"] * good + (1 - batch["reward"]) * bad}
        return {**each, "kl": flow_loss(out.velocity, batch["first"])} if self.keeps_start else each

    def evaluate(self, model: Predicts, batch: Batch) -> Tensor:
        """Return the flow loss on the evaluation set's own images."""
        return flow_loss(model.predict(batch).velocity, batch["target"], batch.get("mask"))


def relative_rewards(scores_PG: Tensor) -> Tensor:
    """Return rewards from 0 to 1 by the scores of G images of each of P prompts.

    They are 1/2 plus half the number of deviations from the mean of the prompt, which counts at most 1. The deviation
    is the root mean square over all prompts: images of a prompt that hardly differ get about 1/2, equal ones 1/2.
    """
    centred_PG = scores_PG - scores_PG.mean(1, keepdim=True)
    deviation = centred_PG.square().mean().sqrt().clamp(min=_ROUNDING * float(scores_PG.abs().max()))
    return 0.5 + 0.5 * (centred_PG / deviation.clamp(min=1e-30)).clamp(-1, 1)


def diversity(latents_PGN: Tensor) -> float:
    """Return the mean distance of two images of a prompt: the root of the mean squared difference of their latents."""
    scale = latents_PGN.shape[2] ** 0.5
    return float(torch.stack([torch.pdist(each.float()).mean() for each in latents_PGN]).mean() / scale)
