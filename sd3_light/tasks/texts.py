"""Ready-made parts for text: dropout, and texts of unequal length in one batch."""

import math
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.config.base import require_value
from sd3_light.config.faults import UserError
from sd3_light.data.slots import replace_items
from sd3_light.model.device_copy import to_device
from sd3_light.tasks.units import Draw, PipelineUnit, Values

FULL, EMPTY = "full_", "empty_"


def drop_text(encode: Any, probability: Any, **empty: Any) -> tuple[PipelineUnit, PipelineUnit]:
    """Return two units in place of ``encode``, a unit that encodes text: the encoding, and its dropout.

    Each epoch draws again; validation drops nothing. A dropped sample gets what ``encode`` writes for the values in
    ``empty``, by default ``prompt=""``. A data process stores both, so training on its data needs no text encoder.
    """
    if not isinstance(encode, PipelineUnit):
        raise UserError(f"drop_text: {encode!r} is not a unit; give the unit that encodes the text")
    require_value(ModelConfig, "uncond_text_dropout_prob", probability, "drop_text: probability")
    empty = empty or {"prompt": ""}
    if unknown := [name for name in empty if not {name, f"{name}?"} & set(encode.reads)]:
        raise UserError(
            f"drop_text: unit {encode.label} does not read {unknown[0]!r}; name a value of {list(encode.reads)}"
        )
    return _EncodeBoth(encode, empty), _DropText(encode, float(probability))


class _EncodeBoth(PipelineUnit):
    """Runs ``encode`` on the sample, and once on the empty text."""

    def __init__(self, encode: PipelineUnit, empty: Values) -> None:
        self.encode, self.empty = encode, empty
        self.reads, self.uses = encode.reads, encode.uses
        self.writes = tuple(prefix + name for prefix in (FULL, EMPTY) for name in encode.writes)
        self._memo: tuple[Any, Values] | None = None

    @property
    def label(self) -> str:
        """The encoder's name."""
        return self.encode.label

    def settings(self) -> Values:
        """Return the encoder's settings and the empty text."""
        return {**self.encode.settings(), "empty": str(sorted(self.empty.items()))}

    def run(self, module: Any, **values: Any) -> Values:
        """Return both results."""
        if self._memo is None or self._memo[0] is not module:
            # copied: it may hold values of this sample, whose memory later batches use
            written = self.encode.run(module, **{**values, **self.empty})
            self._memo = (module, replace_items(written, Tensor, Tensor.clone))
        results = {FULL: self.encode.run(module, **values), EMPTY: self._memo[1]}
        return {prefix + name: value for prefix, written in results.items() for name, value in written.items()}


class _DropText(PipelineUnit):
    """Chooses the text or the empty text; one draw for everything that the encoder writes."""

    draws = True

    def __init__(self, encode: PipelineUnit, probability: float) -> None:
        self.writes, self.probability = encode.writes, probability
        self.reads = (*(prefix + name for prefix in (FULL, EMPTY) for name in encode.writes), "is_evaluation?")
        self._threshold = math.inf * (probability - 0.5)
        if 0 < probability < 1:
            self._threshold = NormalDist().inv_cdf(probability)

    @property
    def label(self) -> str:
        """The name in errors."""
        return "drop_text"

    def run(self, module: Any, draw: Draw, is_evaluation: bool = False, **values: Any) -> Values:  # type: ignore[override]
        """Return the values under the encoder's names."""
        dropped = not is_evaluation and float(draw("text-dropout", (1,), on_host=True)) < self._threshold
        chosen = EMPTY if dropped else FULL
        return {name: values[chosen + name] for name in (written.rstrip("?") for written in self.writes)}


def positions_below(lengths: Tensor, padded: Tensor) -> Tensor:
    """Return the mask [B, L] of the real positions of texts with these lengths, on the device of ``padded``."""
    return torch.arange(padded.shape[1], device=padded.device) < to_device(lengths, padded.device)[:, None]
