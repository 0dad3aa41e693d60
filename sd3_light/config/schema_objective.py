"""[objective]: what a run is trained for, a table of terms."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, Strict

from sd3_light.config.base import Allowed, Count, CountOrZero, Positive, Table, word_or_path
from sd3_light.config.family_keys import KnownTo
from sd3_light.config.schema_blocks import BlockPair, LayerSyncConfig

SPELLINGS = {
    "pseudo_huber_c": "objective.flow.pseudo_huber_c",
    "model.text_recon_gamma": "objective.text_recon.weight",
    "model.text_recon_target_layer": "objective.text_recon.target_layer",
    "model.layer_sync": "objective.layer_sync",
}
"""Keys outside of [objective], and the same settings in it."""
_TEXT = KnownTo("only SD3's own blocks return text tokens", only=("sd3",))
LARGEST_WIDTH = 256
"""Features of a vision model that a cache holds per token. Wider ones are projected to as many."""
PAIRED = ("dpo",)
"""Terms that need a rejected image beside every image."""


TeacherModel = Annotated[
    Literal["start", "average"] | Path,
    BeforeValidator(word_or_path("start", "average")),
    Allowed('"start", "average", or the path of a model folder'),
]


class FlowTerm(Table):
    """[objective.flow]: flow matching, the error of the predicted velocity."""

    weight: Positive = 1.0
    """Weight of the term."""
    pseudo_huber_c: Positive | None = None
    """Pseudo-Huber loss with this c. Absent: mean squared error."""


class DpoTerm(Table):
    """[objective.dpo]: preferences between two images of a caption (Diffusion-DPO, arXiv 2311.12908).

    Every `[[directory]]` of the dataset names its `rejected` images.
    """

    weight: Positive = 1.0
    """Weight of the term."""
    beta: Positive = 500.0
    """How strongly a preference counts; a higher one stays closer to the teacher."""
    teacher: TeacherModel = "start"
    """The model that the run is compared with. `start`: the initial weights; with [adapter] they are in memory already,
    otherwise a copy in the compute dtype is kept on every GPU. `average`: the moving average of [ema]. Or the folder of
    another model of the family, which is kept on every GPU too."""


class DistillTerm(Table):
    """[objective.distill]: learn in one pass what a teacher computes in several. It is the only term.

    Without `steps`: its guidance, so that sampling needs no pass without text. With `steps`: its path too, so that
    sampling needs this many calls.
    """

    steps: Annotated[int, Strict(), Ge(1), Le(64)] | None = None
    """Calls of the denoiser per image after training, each without guidance. Absent: as many as before."""
    guidance: Positive = 4.0
    """Guidance scale of the teacher, as its pipeline takes it. At 1 it is not guided."""
    most_guidance: Positive | None = None
    """Each sample draws its scale between `guidance` and this, for a denoiser that takes guidance as a number (Flux.1
    dev). Absent: `guidance` alone."""
    teacher_steps: Annotated[int, Strict(), Ge(1), Le(1000)] = 28
    """Steps of the teacher from noise to image, of which each sample computes those of one call; with `steps` only."""
    teacher: TeacherModel = "start"
    """The model that is distilled. `start`: the initial weights; with [adapter] they are in memory already, otherwise a
    copy in the compute dtype is kept on every GPU. `average`: the moving average of [ema]. Or the folder of another
    model of the family, which is kept on every GPU too."""

    @property
    def is_guided(self) -> bool:
        """Whether the teacher computes a pass without text."""
        return max(self.guidance, self.most_guidance or 0) > 1

    @property
    def teacher_passes(self) -> int:
        """Passes of the teacher per sample."""
        steps = 1 if self.steps is None else -(-self.teacher_steps // self.steps)
        return steps * (1 + self.is_guided)


class TextReconTerm(Table):
    """[objective.text_recon]: reconstruct earlier text tokens from the last ones (SD3 only)."""

    weight: Positive
    """Weight of the term."""
    target_layer: CountOrZero = 0
    """Layer whose text tokens are reconstructed: 0 after the context embedder, k after block k. At most the number of
    blocks minus 2."""


class AlignmentTerm(Table):
    """[objective.alignment]: align a block's image tokens with features of the clean image (REPA, arXiv 2410.06940).

    A small network that is trained beside the denoiser maps the tokens to the features. It is part of checkpoints, and
    of no average or export.
    """

    weight: Positive = 0.5
    """Weight of the term."""
    teacher: Literal["cache", "average"] = "cache"
    """`cache`: features of the vision model `model.teacher_path`, normalised over each image (iREPA, arXiv 2512.10794).
    `average`: tokens of a deeper block of the run's average ([ema]), which sees the image with less noise; a second
    pass per step, without gradients."""
    block: Count | None = Field(default=None, json_schema_extra={"default": "1/3 of the blocks, rounded"})
    """Block whose image tokens are aligned, counted from 1."""
    teacher_block: Count | None = Field(default=None, json_schema_extra={"default": "2/3 of the blocks, rounded"})
    """Block of the average whose tokens they are aligned with; with `teacher = "average"` only."""
    projector: Literal["conv", "mlp"] = "conv"
    """Network that maps tokens to features: a convolution of 3x3 tokens (iREPA), or three layers per token (REPA)."""
    until: Annotated[float, Strict(), Gt(0), Le(1)] = 1.0
    """Share of the run's steps after which the term ends: it helps early, and may hold the model back later."""

    def projector_weights(self, width: int) -> int:
        """Return the weights of the projector of tokens that are ``width`` wide, to as many features or fewer."""
        features = width if self.teacher == "average" else LARGEST_WIDTH
        if self.projector == "conv":
            return 9 * width * features
        return 4 * features * (width + 5 * features)

    def blocks(self, num_blocks: int) -> BlockPair:
        """Return the aligned block of a denoiser with ``num_blocks`` blocks and the average's, valid or not."""
        block = self.block or max(1, round(num_blocks / 3))
        return BlockPair(block, self.teacher_block or max(block + 1, round(2 * num_blocks / 3)))


class ObjectiveConfig(Table):
    """[objective]: all terms of the training loss, a table each. Absent: `flow`, and the terms that `[model]` names."""

    flow: FlowTerm | None = None
    """Flow matching."""
    dpo: DpoTerm | None = None
    """Preferences."""
    distill: DistillTerm | None = None
    """Distillation."""
    text_recon: Annotated[TextReconTerm | None, _TEXT] = None
    """Text reconstruction."""
    layer_sync: LayerSyncConfig | None = None
    """Alignment of two blocks."""
    alignment: AlignmentTerm | None = None
    """Alignment with features of the clean image."""

    def tables(self) -> dict[str, Table]:
        """Return the terms by name, in their order in the sum."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: table for name, table in named.items() if table is not None}

    @property
    def teacher(self) -> Literal["start", "average"] | Path | None:
        """The model that a term compares with; None if no term does."""
        if self.alignment is not None and self.alignment.teacher == "average":
            return "average"
        term = self.taught
        return None if term is None else term[1].teacher

    @property
    def taught(self) -> tuple[str, DpoTerm | DistillTerm] | None:
        """The term that compares with another model, and its name; None if no term does."""
        named: dict[str, DpoTerm | DistillTerm | None] = {"dpo": self.dpo, "distill": self.distill}
        return next(((name, term) for name, term in named.items() if term is not None), None)

    @property
    def teacher_key(self) -> str:
        """The key that names the teacher."""
        if self.taught is None and self.alignment is not None:
            return "objective.alignment.teacher"
        assert self.taught is not None, "no term compares with another model"
        return f"objective.{self.taught[0]}.teacher"

    @property
    def keeps_start(self) -> bool:
        """Whether the loss compares with the start of the run, beside the teacher."""
        return False

    @property
    def trains_prediction(self) -> bool:
        """Whether a term trains the prediction."""
        return self.flow is not None or self.taught is not None

    @property
    def passes(self) -> int:
        """Forward passes with gradients per sample."""
        return 1 if self.dpo is None else 2

    @property
    def teacher_passes(self) -> int:
        """Passes of the teacher per sample, without gradients."""
        aligned = int(self.alignment is not None and self.alignment.teacher == "average")
        return aligned + (2 if self.dpo is not None else 0 if self.distill is None else self.distill.teacher_passes)

    @property
    def reads_teacher(self) -> bool:
        """Whether a term reads the features of `model.teacher_path`."""
        return self.alignment is not None and self.alignment.teacher == "cache"


def alignment_problem(table: AlignmentTerm, num_blocks: int) -> dict[str, str] | None:
    """Return why a denoiser with ``num_blocks`` blocks has no such blocks, as fields of a `Fault`."""
    block, teacher_block = table.blocks(num_blocks)
    last = teacher_block if table.teacher == "average" else block
    if 1 <= block <= last < num_blocks:
        return None
    blocks = f"block {block}" if table.teacher == "cache" else f"blocks {block} and {teacher_block}"
    return {
        "problem": f"tokens after {blocks} of {num_blocks} cannot be aligned",
        "allowed": f"block <= teacher_block <= {num_blocks - 1}: the last block prepares the output",
    }
