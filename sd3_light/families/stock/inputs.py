"""How a stock pipeline is called to draw images: with texts that are encoded as in training."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.columns import MOST_REFERENCES, Bucket
from sd3_light.core.sampling import UNSTATED, EncodedText, ImageRequest, OwnDrawing, PipelineInputs
from sd3_light.families.stock.sampling import batch_texts
from sd3_light.model.part_configs import read_json
from sd3_light.sources.decode import read_fitted

if TYPE_CHECKING:
    from PIL.Image import Image

    from sd3_light.families.base import StockFamily

_NEGATIVE = "\0"  # before a text that is encoded as a negative prompt
_TOKENIZING = Lock()  # tokenizers change their settings in each call


@dataclass(frozen=True)
class StockInputs(PipelineInputs):
    """See `PipelineInputs`. ``settings`` are those of `Encoding.text_settings`, ``folder`` is that of the model.

    ``trained_at`` is the width and height of the images of a run.
    """

    family: "StockFamily"
    folder: Path
    settings: Mapping[str, Any]
    trained_at: tuple[int, int] | None = None
    stated: OwnDrawing = UNSTATED

    @property
    def largest_batch(self) -> int | None:
        """See `PipelineInputs.largest_batch`."""
        return 1 if self.family.single_prompts else None

    @property
    def shares_references(self) -> bool:
        """See `PipelineInputs.shares_references`."""
        return self.family.sets_references

    @property
    def own_drawing(self) -> OwnDrawing:
        """See `PipelineInputs.own_drawing`."""
        return self.stated.or_else(self.family.own_drawing(read_json(self.folder / "transformer" / "config.json")))

    def stating(self, drawing: OwnDrawing) -> "StockInputs":
        """See `PipelineInputs.stating`."""
        return replace(self, stated=drawing)

    def for_folder(self, folder: Path) -> "StockInputs":
        """See `PipelineInputs.for_folder`."""
        return replace(self, folder=folder)

    def facts(self) -> dict[str, Any]:
        """See `PipelineInputs.facts`."""
        return dict(self.settings)

    def negative_fault(self) -> str | None:
        """See `PipelineInputs.negative_fault`."""
        if not self.family.takes_guidance(read_json(self.folder / "transformer" / "config.json")):
            return None
        return f"this {self.family.title} takes guidance as a number and no negative prompt; leave it out"

    def size_fault(self, pipe: Any, width: int, height: int) -> str | None:
        """See `PipelineInputs.size_fault`."""
        step = self.family.token_side(self.folder)
        tokens = self.family.position_table(pipe.transformer.config)
        if all(side % step == 0 and step <= side <= step * (tokens or side) for side in (width, height)):
            return None
        limit = "" if tokens is None else f" from {step} to {step * tokens}"
        return f"image size {width}x{height}: this model needs sides that are multiples of {step}{limit}"

    def takes_sampler(self, name: str, is_dynamic: bool) -> bool:
        """See `PipelineInputs.takes_sampler`."""
        return name in (self.family.dynamic_samplers if is_dynamic else self.family.samplers)

    def frames_fault(self, frames: int) -> str | None:
        """See `PipelineInputs.frames_fault`."""
        step = self.family.frame_step(self.folder)
        if step is None:
            return super().frames_fault(frames)
        if (frames - 1) % step == 0:
            return None
        below = frames - (frames - 1) % step
        return f"{frames} frames: this model needs {step}·n + 1, such as {below} or {below + step}"

    def references_fault(self, count: int) -> str | None:
        """See `PipelineInputs.references_fault`."""
        most = MOST_REFERENCES if self.family.sets_references else self.family.references
        if not most:
            return super().references_fault(count)
        if not count and self.family.texts_see_references:
            return f"{self.family.title} draws from an image; pass one with --reference"
        return None if count <= most else f"{count} references: this model sees {most}"

    @property
    def default_frames(self) -> int:
        """See `PipelineInputs.default_frames`."""
        return self.family.usual_clip[0]

    def drawn_at(self, size: tuple[int, int] | None) -> "StockInputs":
        """See `PipelineInputs.drawn_at`."""
        return replace(self, trained_at=size)

    def default_size(self, pipe: Any) -> tuple[int, int]:
        """See `PipelineInputs.default_size`: the square with about as many pixels as the images of the run."""
        step = self.family.token_side(self.folder)
        if self.trained_at is not None:
            side = step * max(1, round(math.sqrt(math.prod(self.trained_at)) / step))
            return side, side
        latent = getattr(pipe, "default_sample_size", None) or pipe.transformer.config.get("sample_size")
        side = latent * step // self.family.patch if isinstance(latent, int) else self.family.trained_side
        return side, side

    def text_limits(self, folder: Path) -> list[TextLimit]:
        """See `PipelineInputs.text_limits`."""
        return self.family.encoding.text_limits(folder, self.settings)

    def encode(self, pipe: Any, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts with the pipeline's encoders; equal ones are encoded once."""
        encoded: dict[str, EncodedText] = {}
        for is_negative, encode in ((False, self.family.encode_captions), (True, self.family.encode_negatives)):
            unique = [text for text in dict.fromkeys(texts) if text.startswith(_NEGATIVE) == is_negative]
            if unique:
                plain = [text.removeprefix(_NEGATIVE) for text in unique]
                encoded |= zip(unique, _per_text(encode(pipe, plain, self.model())), strict=True)
        return [encoded[text] for text in texts]

    def arguments(
        self, pipe: Any, batch: Sequence[ImageRequest], encode: Callable[[Sequence[str]], list[EncodedText]]
    ) -> dict[str, Any]:
        """See `PipelineInputs.arguments`."""
        guidance = batch[0].guidance
        assert guidance is not None
        size = batch[0].width, batch[0].height
        seen = batch[:1] if self.shares_references else batch
        files = [path for request in seen for path in request.references]
        references = [read_fitted(path, self.family.reference_bucket(Bucket(*size))) for path in files]
        if self.family.texts_see_references:
            encode = partial(self._encode_with, pipe, references)
        texts = self._batch(pipe, encode([request.prompt for request in batch]))
        negative = None
        if self.family.is_guided(guidance) and not self.family.takes_guidance(pipe.transformer.config):
            negative = self._batch(pipe, encode([_NEGATIVE + request.negative_prompt for request in batch]))
        arguments = self.family.pipeline_arguments(texts, negative, guidance)
        if files or self.family.references:
            arguments |= self.family.reference_arguments(references, size)
        return arguments if self.family.media == "image" else {**arguments, "num_frames": batch[0].frames}

    def _encode_with(self, pipe: Any, images: "Sequence[Image]", texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts with the references that their images have."""
        plain = [text.removeprefix(_NEGATIVE) for text in texts]
        with _TOKENIZING:
            return _per_text(self.family.encode_pairs(pipe, plain, [images] * len(plain), self.model()))

    def _batch(self, pipe: Any, texts: Sequence[EncodedText]) -> Batch:
        # latents get the dtype of the text, and the VAE must accept it
        columns = self.family.text_columns(self.model(), self.folder)
        batch = batch_texts(texts, columns, self.family.pads_text or self.family.pads_prompts)
        return batch.map_tensors(lambda text: text.to(pipe.vae.dtype))

    def model(self) -> ModelConfig:
        """Return a [model] table with the settings."""
        return ModelConfig.model_construct(type=self.family.name, diffusers_path=self.folder, **self.settings)


def _per_text(values: Mapping[str, Sequence[Tensor]]) -> list[EncodedText]:
    """Return the values of each text."""
    return [dict(zip(values, rows, strict=True)) for rows in zip(*values.values(), strict=True)]
