"""Distillation: the student predicts in one pass what its teacher computes in several.

`GuidanceDistillation` saves the pass without text: the student predicts the guided velocity. `StepDistillation` saves
calls too: from one time of the sampler to the next the student goes straight to where the teacher arrives in several
guided steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Model, Objective, Observes, Prediction, Teacher
from sd3_light.core.registry import family_of
from sd3_light.flow.objective import flow_loss, interpolate
from sd3_light.randomness import first_words, uniforms

Guide = Callable[[Tensor, Tensor, Any], Tensor]
"""(velocity without text, velocity, scale) -> guided velocity. The scale is a number, or [B, 1, ...]."""
_LARGE_SIDE = 1024  # pixels
Schedule = Callable[[Batch], Tensor]
"""A batch -> the times [calls + 1] of a sampler's calls for its latents, from 1 down, then 0."""


def stock_guide(negative: Tensor, positive: Tensor, scale: Any) -> Tensor:
    """Return classifier-free guidance, as most stock pipelines compute it."""
    guided: Tensor = negative + scale * (positive - negative)
    return guided


@dataclass(eq=False)
class GuidanceDistillation(Objective):
    """The error of the velocity towards the teacher's guided one.

    With ``most_guidance`` each sample draws its scale between the two, and the denoiser gets it as a number. A scale
    that is not ``is_guided`` takes no pass without text, and the denoiser gets its teacher's number.
    """

    reads = ("words",)
    weights = MappingProxyType({"distill": 1.0})

    guidance: float = 4.0
    most_guidance: float | None = None
    teacher: Teacher = "start"
    guide: Guide = stock_guide
    is_guided: Callable[[float], bool] = lambda scale: scale > 1
    seed: int = 0

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Add the teacher's guided velocity, and the scale of each sample."""
        scale = self.scales(batch)
        taught = self.guided(model, batch, scale)
        return batch.with_values({"taught": taught, **self.numbers(scale)})

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {"distill": flow_loss(out.velocity, batch["taught"], batch.get("mask"))}

    def evaluate(self, model: Model, batch: Batch) -> Tensor:
        """Return the same loss on a validation batch: a distilled model is far from data by intention."""
        drawn = self.draw(model, batch)
        return self.losses(model.predict(drawn), drawn)["distill"]

    def scales(self, batch: Batch) -> Tensor:
        """Return the guidance scale of each sample [B]."""
        if self.most_guidance is None:
            return batch["t"].new_full((batch.size,), self.guidance)
        return self.guidance + (self.most_guidance - self.guidance) * self.uniforms(batch, "distilled-guidance")

    @property
    def has_guidance(self) -> bool:
        """Whether the teacher computes a pass without text."""
        return self.most_guidance is not None or self.is_guided(self.guidance)

    def numbers(self, scale: Tensor) -> dict[str, Tensor]:
        """Return the guidance that the student sees as a number; nothing where it is that of its teacher."""
        return {"guidance": scale} if self.has_guidance else {}

    def guided(self, model: Observes, batch: Batch, scale: Tensor) -> Tensor:
        """Return the teacher's velocity with guidance."""
        positive = model.teach(batch).velocity.float()
        if not self.has_guidance:
            return positive
        negative = model.teach(model.without_text(batch)).velocity.float()
        each = self.guidance if self.most_guidance is None else _per_sample(scale, positive)
        return self.guide(negative, positive, each)

    def uniforms(self, batch: Batch, purpose: str) -> Tensor:
        """Return a number in [0, 1) per sample [B] (law 1)."""
        return drawn_uniforms(batch, self.seed, purpose)


class StepDistillation(GuidanceDistillation):
    """The error of the velocity towards the straight line to where the teacher arrives at the sampler's next time.

    ``schedule`` are the times of the student's calls. Each sample draws one of them; its latents there are the image's
    with its noise. The teacher takes as many Euler steps as it has of ``teacher_steps`` for one of the student's calls.
    """

    def __init__(self, schedule: Schedule, teacher_steps: int = 28, **options: Any) -> None:
        super().__init__(**options)
        self.schedule = schedule
        self.teacher_steps = teacher_steps

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Return the batch at the times of calls, with the mean velocity of the teacher's path to the next one."""
        times = self.schedule(batch)
        calls = len(times) - 1
        call = (calls * self.uniforms(batch, "distilled-call")).long()
        start = times[call]
        end = times[call + 1]
        t = _per_sample(batch["t"], batch["noisy"])
        clean = batch["noisy"] - t * batch["target"]
        latents = interpolate(clean, clean + batch["target"], start)
        scale = self.scales(batch)
        arrived = latents
        steps = teacher_steps_per_call(self.teacher_steps, calls)
        for number in range(steps):
            now = torch.lerp(start, end, number / steps)
            noisy = batch.with_values({"noisy": arrived, "t": now})
            arrived = arrived + _per_sample((end - start) / steps, arrived) * self.guided(model, noisy, scale)
        taught = (arrived - latents) / _per_sample(end - start, arrived)
        return batch.with_values({"noisy": latents, "t": start, "taught": taught, **self.numbers(scale)})


def sampler_times(model: ModelConfig, calls: int) -> Schedule:
    """Return the times at which the sampler of a [model] table calls its denoiser."""
    sampling = family_of(model).sampling
    known: dict[tuple[int, int], Tensor] = {}

    def times(batch: Batch) -> Tensor:
        height, width = batch["noisy"].shape[-2:]
        if (height, width) not in known:
            pixels = _LARGE_SIDE // sampling.latent_shape(model, (_LARGE_SIDE, _LARGE_SIDE))[-1]
            scheduler = sampling.scheduler(model, (width * pixels, height * pixels), calls, torch.device("cpu"))
            drawn = scheduler.timesteps.double() / scheduler.config.num_train_timesteps
            known[height, width] = torch.cat([drawn, drawn.new_zeros(1)])
        return known[height, width].to(batch["t"].device, batch["t"].dtype)

    return times


def drawn_uniforms(batch: Batch, seed: int, purpose: str) -> Tensor:
    """Return a number in [0, 1) per sample [B], from the words of the batch (law 1)."""
    words = batch["words"].cpu().contiguous().view(torch.int64).numpy()
    drawn = torch.from_numpy(uniforms(first_words(seed, purpose, words)[0]))
    return drawn.to(batch["t"].device, batch["t"].dtype)


def teacher_steps_per_call(teacher_steps: int, calls: int) -> int:
    """Return the steps that a teacher takes for a call of its student."""
    return -(-teacher_steps // calls)


def _per_sample(value: Tensor, like: Tensor) -> Tensor:
    """Return values [B] with the dimensions of another tensor."""
    return value.view(-1, *[1] * (like.dim() - 1))
