"""An objective with everything that an engine must carry: a head, a teacher, another network and drawn batches."""

from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Network, Objective, Objectives, Observes, Prediction
from sd3_light.flow.objective import flow_loss
from sd3_light.flow.objectives import FlowMatching

HEAD = "heads.projector.weight"


class Whole(Objective):
    """Aligns a block's tokens with the pooled text, follows the run's average, and deceives a critic."""

    taps = (1,)
    teacher = "average"

    def __init__(self, width: int) -> None:
        self.weights = {"alignment": 0.5, "distance": 1.0, "deceit": 0.1}
        self.heads = {"projector": nn.Linear(width, 8)}
        self.networks = {"critic": Network(nn.Linear(16, 1), lr=0.01, every=2)}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        live = model.infer(batch).velocity
        taught = model.teach(batch).velocity
        return batch.with_values({"live": live, "taught": taught})

    def _score(self, latents: Tensor) -> Tensor:
        each: Tensor = self.networks["critic"].module(latents.mean((-2, -1)))[:, 0]
        return each

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        projected = self.head("projector", out.features[1]).float().mean(1)
        target = batch["pooled"][:, :8].float()
        return {
            "alignment": 1 - nn.functional.cosine_similarity(projected, target),
            "distance": flow_loss(out.velocity, batch["taught"]),
            "deceit": -self._score(out.velocity),
        }

    def network_losses(self, model: Observes, batch: Batch) -> dict[str, Tensor]:
        return {"critic": self._score(batch["live"]) ** 2 - self._score(batch["target"])}


def whole_objective(denoiser: Any) -> Objectives:
    """Return the objective with the same initial weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Objectives(
            [FlowMatching(), Whole(denoiser.config.num_attention_heads * denoiser.config.attention_head_dim)]
        )
