"""The objectives of flow matching, and the terms that may be added to it."""

from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Prediction
from sd3_light.flow.objective import flow_loss, text_reconstruction_loss


class FlowMatching(Objective):
    """The squared (or pseudo-Huber) error of the velocity."""

    def __init__(self, pseudo_huber_c: float | None = None) -> None:
        self.pseudo_huber_c = pseudo_huber_c
        self.weights = {"flow": 1.0}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {"flow": flow_loss(out.velocity, batch["target"], batch.get("mask"), self.pseudo_huber_c)}


class TextReconstruction(Objective):
    """The distance of the last text tokens from earlier ones, for denoisers that keep both."""

    def __init__(self, gamma: float) -> None:
        self.weights = {"text_recon": gamma}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        extras = out.extras
        return {"text_recon": text_reconstruction_loss(extras["text"], extras["text_target"], extras.get("lengths"))}


class LayerSync(Objective):
    """The angle between the image tokens of two blocks, which the denoiser compares on its way."""

    def __init__(self, weight: float) -> None:
        self.weights = {"layer_sync": weight}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {"layer_sync": out.extras["compared"]}
