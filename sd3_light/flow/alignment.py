"""Alignment of a block's image tokens with features of the clean image.

The features are those of a vision model, which the cache stores (REPA, arXiv 2410.06940; iREPA, arXiv 2512.10794), or
tokens of a deeper block of the run's average, which sees the image with less noise (SRA, arXiv 2505.02831). Shapes: B
samples, N image tokens on a grid of h x w, D width of the tokens, F features.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sd3_light.config import TrainConfig
from sd3_light.config.schema_objective import AlignmentTerm
from sd3_light.core.batch import Batch
from sd3_light.core.columns import TEACHER
from sd3_light.core.objective import Objective, Observes, Prediction
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.flow.distill import drawn_uniforms
from sd3_light.flow.objective import alignment_loss
from sd3_light.model.vision import teacher_width

_HEAD = "alignment"
_HIDDEN = 4  # the inner layers of an MLP are as many times wider than the features


class FeatureAlignment(Objective):
    """1 - cosine of a projection of a block's tokens and the cached features of their place in the image.

    Places that a sample's mask excludes do not count. It ends at the share ``until`` of the run. Of a block that some
    tokens skip, those that run through it are compared.
    """

    reads = (TEACHER,)

    def __init__(self, width: int, features: int, block: int, table: AlignmentTerm) -> None:
        self.block = block
        self.until = table.until
        self.taps = (block,)
        self.weights = {"alignment": table.weight}
        self.heads = {_HEAD: make_projector(table.projector, width, features)}

    @property
    def draws(self) -> bool:
        """See `Objective.draws`: whether something happens at the end of the term."""
        return self.until < 1

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Return the batch without features once the term has ended."""
        return batch.with_values({}, without=(TEACHER,)) if self.has_ended(model) else batch

    def has_ended(self, model: Observes) -> bool:
        """Return whether the step is after the share of the run."""
        return model.steps is not None and model.step >= self.until * model.steps

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`. Without features the loss is 0, and the projector gets gradients of 0."""
        tokens_BND = out.features[self.block]
        features_BFHW = batch.get(TEACHER)
        if features_BFHW is None:
            one_BD11 = tokens_BND[:, 0, :, None, None]
            return {"alignment": 0 * self.head(_HEAD, one_BD11).float().flatten(1).mean(1)}
        grid = features_BFHW.shape[-2], features_BFHW.shape[-1]
        kept = batch.get("kept")
        if tokens_BND.shape[1] >= math.prod(grid):
            tokens_BND = tokens_BND[:, : math.prod(grid)]  # tokens of references follow
            kept = None
        else:
            assert kept is not None, (tokens_BND.shape, grid)
            tokens_BND = on_grid(tokens_BND, kept, math.prod(grid))
        compared = [self.head(_HEAD, tokens_BND.transpose(1, 2).unflatten(2, grid)), features_BFHW]
        mask_BHW = batch.get("mask")
        if mask_BHW is not None:
            compared.append(functional.adaptive_avg_pool2d(mask_BHW[:, None], grid))
        rows = [values.flatten(2).transpose(1, 2) for values in compared]
        if kept is not None:
            rows = [values.take_along_dim(kept.long()[:, :, None], 1) for values in rows]
        projected_BND, features_BND, *mask_BN1 = rows
        return {"alignment": alignment_loss(projected_BND, features_BND, *(mask[..., 0] for mask in mask_BN1))}


class SelfAlignment(FeatureAlignment):
    """The same with tokens after ``teacher_block`` of the run's average, at a time between 0 and that of the sample."""

    reads = ("words",)
    teacher = "average"

    def __init__(
        self,
        width: int,
        block: int,
        teacher_block: int,
        table: AlignmentTerm,
        patch: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(width, width, block, table)
        self.teacher_block = teacher_block
        self.patch = patch
        self.seed = seed

    @property
    def draws(self) -> bool:
        """See `Objective.draws`."""
        return True

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Return the batch with the average's tokens at the clearer image, until the term ends."""
        if self.has_ended(model):
            return batch
        t = batch["t"]
        earlier = t * drawn_uniforms(batch, self.seed, "alignment-time")
        step = (t - earlier).view(-1, *[1] * (batch["noisy"].dim() - 1))
        clearer = batch.with_values({"noisy": batch["noisy"] - step * batch["target"], "t": earlier})
        height, width = (side // self.patch for side in batch["noisy"].shape[-2:])
        tokens_BND = model.teach(clearer, (self.teacher_block,)).features[self.teacher_block][:, : height * width]
        return batch.with_values({TEACHER: tokens_BND.transpose(1, 2).unflatten(2, (height, width))})


class Alignment:
    """The term of [objective.alignment]: with cached features, or with the run's average."""

    @staticmethod
    def of(table: AlignmentTerm, num_blocks: int, config: TrainConfig) -> FeatureAlignment:
        """Return the term of a table."""
        family = family_of(config.model)
        cost = family.cost(starting_weights(config.model), config.model)
        block, teacher_block = table.blocks(cost.num_blocks)
        if table.teacher == "cache":
            assert config.model.teacher_path is not None, "checked with the config"
            return FeatureAlignment(cost.width, teacher_width(config.model.teacher_path), block, table)
        return SelfAlignment(cost.width, block, teacher_block, table, family.patch, config.seed)


def make_projector(kind: Literal["conv", "mlp"], width: int, features: int) -> nn.Module:
    """Return a network that maps tokens on a grid [B, D, h, w] to features [B, F, h, w]."""
    if kind == "conv":
        return nn.Conv2d(width, features, 3, padding=1)
    hidden = _HIDDEN * features
    layers = (nn.Conv2d(width, hidden, 1), nn.SiLU(), nn.Conv2d(hidden, hidden, 1), nn.SiLU())
    return nn.Sequential(*layers, nn.Conv2d(hidden, features, 1))


def on_grid(tokens_BKD: Tensor, kept_BK: Tensor, count: int) -> Tensor:
    """Return ``count`` tokens: zeros where an image has none of the kept ones."""
    size, _, width = tokens_BKD.shape
    places = kept_BK.long()[:, :, None].expand(-1, -1, width)
    return torch.zeros(size, count, width, dtype=tokens_BKD.dtype, device=tokens_BKD.device).scatter(
        1, places, tokens_BKD
    )
