"""The terms of [objective]: flow matching, preferences, distillation, text reconstruction, LayerSync and alignment.

To add one, write its table in `config/schema_objective.py`, its class here and its curve's title in `runlog/log.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sd3_light.config import TrainConfig
from sd3_light.config.schema_blocks import BlockPair, LayerSyncConfig
from sd3_light.config.schema_objective import AlignmentTerm, DistillTerm, DpoTerm, FlowTerm, TextReconTerm
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Objectives, Observes, Prediction, Predicts, Teacher
from sd3_light.core.registry import family_of
from sd3_light.flow.alignment import Alignment
from sd3_light.flow.distill import GuidanceDistillation, StepDistillation, sampler_times
from sd3_light.flow.objective import alignment_loss, flow_loss, text_reconstruction_loss
from sd3_light.flow.reward import Rewarded


class FlowMatching(Objective):
    """The squared (or pseudo-Huber) error of the velocity."""

    def __init__(self, pseudo_huber_c: float | None = None, weight: float = 1.0) -> None:
        self.pseudo_huber_c = pseudo_huber_c
        self.weights = {"flow": weight}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {"flow": flow_loss(out.velocity, batch["target"], batch.get("mask"), self.pseudo_huber_c)}


class Preference(Objective):
    """Diffusion-DPO on pairs of images (Wallace et al. 2023, equation 14, with the flow's velocity error).

    The preferred image is the sample's own, the other is in the column ``moments.rejected``; both share noise and time.
    The loss is ``-log sigmoid(-beta / 2 * ((e_w - r_w) - (e_l - r_l)))`` with the errors e of the model and r of the
    teacher. It decreases as the model improves on the teacher for the preferred image, or gets worse for the other.
    """

    reads = ("moments.rejected",)

    def __init__(self, beta: float = 500.0, teacher: Teacher = "start", weight: float = 1.0) -> None:
        self.beta = beta
        self.teacher = teacher
        self.weights = {"dpo": weight}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Add how much worse the teacher is at the preferred image."""
        chosen = _error(model.teach(batch), batch)
        rejected = _rejected(batch)
        return batch.with_values({"teacher.gap": chosen - _error(model.teach(rejected), rejected)})

    def __call__(self, model: Predicts, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.__call__`."""
        rejected = _rejected(batch)
        gap = _error(model.predict(batch), batch) - _error(model.predict(rejected), rejected)
        return {"dpo": -functional.logsigmoid(-self.beta / 2 * (gap - batch["teacher.gap"]))}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Not used: a pair takes two predictions."""
        raise NotImplementedError

    def evaluate(self, model: Predicts, batch: Batch) -> Tensor:
        """Return the error at the preferred image: evaluation sets need no pairs."""
        return _error(model.predict(batch), batch)


def _rejected(batch: Batch) -> Batch:
    return batch.with_values({name: batch[f"{name}.rejected"] for name in ("noisy", "target")})


def _error(out: Prediction, batch: Batch) -> Tensor:
    return flow_loss(out.velocity, batch["target"], batch.get("mask"))


class TextReconstruction(Objective):
    """The distance of the last text tokens from earlier ones, for denoisers that keep both."""

    def __init__(self, gamma: float) -> None:
        self.weights = {"text_recon": gamma}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        extras = out.extras
        return {"text_recon": text_reconstruction_loss(extras["text"], extras["text_target"], extras.get("lengths"))}


class LayerSync(Objective):
    """The angle between the image tokens of two blocks; without a ``pair`` the denoiser compares them on its way."""

    def __init__(self, weight: float, pair: BlockPair | None = None) -> None:
        self.weights = {"layer_sync": weight}
        self.taps = () if pair is None else tuple(pair)

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        if not self.taps:
            return {"layer_sync": out.extras["compared"]}
        early, late = self.taps
        return {"layer_sync": alignment_loss(out.features[early], out.features[late])}


def configured_term(table: Any, config: TrainConfig, num_blocks: int) -> Objective:
    """Return the term of a table in [objective], or of [reward]."""
    match table:
        case FlowTerm():
            return FlowMatching(table.pseudo_huber_c, table.weight)
        case DpoTerm():
            return Preference(table.beta, table.teacher, table.weight)
        case DistillTerm():
            return _distillation(table, config)
        case TextReconTerm():
            return TextReconstruction(table.weight)
        case LayerSyncConfig():
            return LayerSync(table.weight, table.pair(num_blocks) if num_blocks else None)
        case AlignmentTerm():
            return Alignment.of(table, num_blocks, config)
    return Rewarded(table.beta, table.kl, table.teacher)


def _distillation(table: DistillTerm, config: TrainConfig) -> GuidanceDistillation:
    """Return the term for guidance alone, or for guidance and fewer calls."""
    sampling = family_of(config.model).sampling
    options: dict[str, Any] = {
        "guidance": table.guidance,
        "most_guidance": table.most_guidance,
        "teacher": table.teacher,
        "guide": sampling.guide,
        "is_guided": sampling.is_guided,
        "seed": config.seed,
    }
    if table.steps is None:
        return GuidanceDistillation(**options)
    return StepDistillation(sampler_times(config.model, table.steps), table.teacher_steps, **options)


def configured_objective(config: TrainConfig, num_blocks: int = 0) -> Objectives:
    """Return the objective of a config; ``num_blocks`` is 0 for a denoiser that compares blocks by itself.

    Heads get the same initial weights in every process, from the config's seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Objectives([configured_term(table, config, num_blocks) for table in config.terms.tables().values()])
