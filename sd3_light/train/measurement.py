"""Measurements against true images during training: [metrics]. Every rank draws its share of the captions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import MetricsConfig
from sd3_light.core.sampling import ImageRequest
from sd3_light.engines.processes import ProcessGroups
from sd3_light.evaluate.comparison import Comparison, Scores, image_features, text_features
from sd3_light.evaluate.feature_model import FeatureModel, load_feature_model
from sd3_light.evaluate.truths import Truth
from sd3_light.export.best import BestMeasurement
from sd3_light.runlog import info
from sd3_light.sample.in_training import Sampler
from sd3_light.sample.loop import Denoise


@dataclass(frozen=True)
class Measurement:
    """A measurement: the fields of its log event, a line that describes it, whether it is the best so far, and why the
    run should stop, if it should."""

    fields: Mapping[str, Any]
    text: str
    is_best: bool
    stop: str | None


@dataclass
class Measurer:
    """Draws the captions of the true images with the weights in the model, and compares them by features."""

    config: MetricsConfig
    sampler: Sampler
    feature_model: FeatureModel
    comparison: Comparison
    groups: ProcessGroups
    best: BestMeasurement

    @staticmethod
    def of_config(config: MetricsConfig, sampler: Sampler, truths: list[Truth], groups: ProcessGroups) -> "Measurer":
        """Load the model of the features on the sampler's device, and compute those of the true images."""
        feature_model = load_feature_model(config.features, sampler.device)
        if config.best == "retrieval" and not feature_model.reads_text:
            raise UserError(f'metrics.best = "retrieval" needs a model that reads text, and {config.features} does not')
        captions = [truth.caption for truth in truths]
        texts = text_features(feature_model, captions) if feature_model.reads_text else None
        comparison = Comparison(image_features(feature_model, [truth.pixels for truth in truths]), texts, captions)
        return Measurer(config, sampler, feature_model, comparison, groups, BestMeasurement(config.best))

    def resume(self, log: Path, step: int) -> None:
        """Take the best measurement up to this step from the log of the run."""
        self.best = self.groups.decide_on_rank_0(lambda: BestMeasurement.of_log(log, self.config.best, step))

    def measure(self, denoise: Denoise, step: int) -> Measurement | None:
        """Return the measurement of the weights in the model, equal on all ranks; None if images are not finite."""
        features = self._features(denoise)
        problem = self.groups.first_problem(self.sampler.fault)
        if problem is not None:
            info(f"nothing was measured at step {step}: {problem}")
            return None
        return self._compare(self.comparison.of_images(features), step)

    def _features(self, denoise: Denoise) -> Tensor:
        """Return the features of one image per caption, drawn and encoded by all ranks."""
        drawn = self.sampler.draw(denoise)
        own = image_features(self.feature_model, [np.asarray(image.convert("RGB")) for _, image in drawn])
        parts = [([row for row, _ in drawn], own)]
        if self.groups.control is not None:
            parts = parts * dist.get_world_size(self.groups.control)
            dist.all_gather_object(parts, parts[0], group=self.groups.control)
        rows = {row: vector for indices, vectors in parts for row, vector in zip(indices, vectors, strict=True)}
        return torch.stack([rows[row] for row in range(len(rows))])

    def _compare(self, scores: Scores, step: int) -> Measurement:
        table = self.config
        best = self.best
        value = scores.estimates[table.best]
        assert value is not None
        is_best = best.add(step, value.value)
        stop = None
        if table.stop_after is not None and best.since >= table.stop_after:
            stop = f"{best.since} measurements without a better {table.best} than {best.value:.4g} of step {best.step}"
        fields = {"set": table.dataset.stem, "best": is_best, **scores.as_dict()}
        text = ", ".join(f"{name} {each.value:.4g}" for name, each in scores.estimates.items() if each is not None)
        return Measurement(fields, text + (f"; the best {table.best} so far" if is_best else ""), is_best, stop)


def caption_requests(config: MetricsConfig, truths: list[Truth]) -> tuple[ImageRequest, ...]:
    """Return the requests of the captions, as `sd3-light evaluate --against` draws them with seed 0."""
    drawing: dict[str, Any] = {"steps": config.steps, "guidance": config.guidance}
    return tuple(
        ImageRequest(truth.caption, row, *truth.size, references=truth.references, **drawing)
        for row, truth in enumerate(truths)
    )
