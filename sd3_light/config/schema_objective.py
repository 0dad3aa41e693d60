"""[objective]: what a run is trained for, a table of terms."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from sd3_light.config.base import Allowed, CountOrZero, Positive, Table, word_or_path
from sd3_light.config.family_keys import KnownTo
from sd3_light.config.schema_blocks import LayerSyncConfig

SPELLINGS = {
    "pseudo_huber_c": "objective.flow.pseudo_huber_c",
    "model.text_recon_gamma": "objective.text_recon.weight",
    "model.text_recon_target_layer": "objective.text_recon.target_layer",
    "model.layer_sync": "objective.layer_sync",
}
"""Keys outside of [objective], and the same settings in it."""
_TEXT = KnownTo("only SD3's own blocks return text tokens", only=("sd3",))
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


class TextReconTerm(Table):
    """[objective.text_recon]: reconstruct earlier text tokens from the last ones (SD3 only)."""

    weight: Positive
    """Weight of the term."""
    target_layer: CountOrZero = 0
    """Layer whose text tokens are reconstructed: 0 after the context embedder, k after block k. At most the number of
    blocks minus 2."""


class ObjectiveConfig(Table):
    """[objective]: all terms of the training loss, a table each. Absent: `flow`, and the terms that `[model]` names."""

    flow: FlowTerm | None = None
    """Flow matching."""
    dpo: DpoTerm | None = None
    """Preferences."""
    text_recon: Annotated[TextReconTerm | None, _TEXT] = None
    """Text reconstruction."""
    layer_sync: LayerSyncConfig | None = None
    """Alignment of two blocks."""

    def tables(self) -> dict[str, Table]:
        """Return the terms by name, in their order in the sum."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: table for name, table in named.items() if table is not None}

    @property
    def teacher(self) -> Literal["start", "average"] | Path | None:
        """The model that a term compares with; None if no term does."""
        return None if self.dpo is None else self.dpo.teacher

    @property
    def teacher_key(self) -> str:
        """The key that names the teacher."""
        return "objective.dpo.teacher"

    @property
    def keeps_start(self) -> bool:
        """Whether the loss compares with the start of the run, beside the teacher."""
        return False

    @property
    def trains_prediction(self) -> bool:
        """Whether a term trains the prediction."""
        return self.flow is not None or self.dpo is not None

    @property
    def passes(self) -> int:
        """Forward passes with gradients per sample."""
        return 1 if self.dpo is None else 2
