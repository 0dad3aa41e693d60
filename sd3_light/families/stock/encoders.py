"""The encoders of a stock pipeline as the cache stage uses them: captions are encoded by the pipeline's own methods.

A caption's bytes may depend on the captions that it is encoded with. The batches are a function of the captions of a
shard alone, so that equal shards have equal bytes in every process.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.columns import ROWS, START, Column
from sd3_light.core.encoding import Tokens
from sd3_light.encoding.host_copies import require_finite
from sd3_light.encoding.image_encoders import ImageEncoders, Loader
from sd3_light.export.proof_process import make_pipeline
from sd3_light.families.stock.encoding import TEXT
from sd3_light.model.folder import components, is_encoder, pipeline_settings
from sd3_light.model.part_configs import LOAD_ERRORS, check_files, load_part

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

Values = Mapping[str, Sequence[Tensor]]
"""Column -> one value per caption."""


class StockEncoders(ImageEncoders):
    """The VAE and the text encoders of a model's folder; see `ImageEncoders`."""

    def __init__(
        self,
        family: "StockFamily",
        model: ModelConfig,
        device: torch.device,
        batch_size: int,
        one_at_a_time: bool | None = None,
    ) -> None:
        super().__init__(model, device, batch_size, one_at_a_time)
        self.stores_frames = family.media == "video"
        self._family = family
        self._columns = family.text_columns(model, self.path)

    @property
    def _text_folders(self) -> tuple[str, ...]:
        return tuple(encoder for encoder, *_ in self._family.text_parts.values())

    def _text_loaders(self) -> dict[str, Loader]:
        return {TEXT: self._load_text}

    def _load_text(self, device: torch.device) -> nn.Module:
        pipeline = self._family.pipeline
        encoders = {
            name: load_text_encoder(pipeline, self.path / name, self._text_dtype) for name in self._text_folders
        }
        return TextEncoders(pipeline, self.path, encoders).to(device)

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Return the captions themselves: the pipeline tokenizes."""
        return {TEXT: list(captions)}

    def encode_captions(
        self, captions: Sequence[str] | Tokens, columns: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """See `Encoders.encode_captions`."""
        texts = captions[TEXT] if isinstance(captions, Mapping) else captions
        wanted = [column for column in self._columns if columns is None or column.name in columns]
        rows: dict[str, list[Tensor]] = {column.name: [torch.empty(0)] * len(texts) for column in wanted}
        for members in caption_batches(texts, self.batch_size):
            pipe = self.part(TEXT).pipe
            with torch.inference_mode():
                encoded = self._family.encode_columns(pipe, [texts[member] for member in members], self._model, rows)
            for column in wanted:
                values = self._stored(column, encoded[column.name])
                for member, value in zip(members, values, strict=True):
                    rows[column.name][member] = value
        return self._tensors(rows)

    def encode_pairs(
        self,
        captions: Sequence[str],
        images: Sequence[Sequence[NDArray[np.uint8]]],
        columns: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """See `PairEncoders.encode_pairs`."""
        seen = [[Image.fromarray(image) for image in own] for own in images]
        with torch.inference_mode():
            encoded = self._family.encode_pairs(self.part(TEXT).pipe, captions, seen, self._model)
        wanted = [column for column in self._columns if columns is None or column.name in columns]
        return self._tensors({column.name: self._stored(column, encoded[column.name]) for column in wanted})

    def encode_text(self, name: str, ids: Sequence[str]) -> dict[str, Tensor]:
        """See `Encoders.encode_text`."""
        assert name == TEXT, name
        return self.encode_captions(ids)

    def encode_empty(self) -> dict[str, Tensor]:
        """See `Encoders.encode_empty`."""
        pipe = self.part(TEXT).pipe
        with torch.inference_mode():
            encoded = self._family.encode_empty(pipe, self._model)
        return self._tensors({column.name: self._stored(column, [encoded[column.name]]) for column in self._columns})

    def _stored(self, column: Column, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of a column on the host."""
        stored = [value.to("cpu", getattr(torch, column.dtype)).clone() for value in values]
        source = self._describe(column.parts[0], self._text_dtype)
        for value in stored:
            require_finite(value.isfinite().all(), source)
            rows = value.shape[0] if column.ragged else column.shape[0]
            assert value.shape == (rows, *column.shape[1:]) and rows <= column.shape[0], (column, value.shape)
        return stored

    def _tensors(self, rows: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of a shard for the values of its captions."""
        tensors: dict[str, Tensor] = {}
        for column in self._columns:
            if column.name not in rows:
                continue
            values = rows[column.name]
            if column.ragged:
                tensors[column.name + ROWS] = torch.cat(list(values))
                tensors[column.name + START] = torch.tensor([0, *map(len, values)]).cumsum(0)
            else:
                tensors[column.name] = torch.stack(list(values))
        return tensors


def caption_batches(captions: Sequence[str], size: int) -> Iterator[list[int]]:
    """Yield the indices of captions to encode together: the longest first, so that few rows are padding."""
    order = sorted(range(len(captions)), key=lambda index: (-len(captions[index]), index))
    for start in range(0, len(order), size):
        yield order[start : start + size]


class TextEncoders(nn.ModuleDict):
    """Text encoders by the names of their parts; ``pipe`` is a stock pipeline with them, and without other networks."""

    def __init__(self, pipeline: str, folder: Path, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(encoders)
        kinds = components(folder)
        tokenizers = {
            name: _load_tokenizer(kind, folder / name)
            for name, (library, kind) in kinds.items()
            if library == "transformers" and not is_encoder(library, kind)
        }
        parts = {**encoders, **tokenizers, **pipeline_settings(folder)}
        self.pipe = make_pipeline(pipeline, **parts)


def load_text_encoder(pipeline: str, folder: Path, dtype: torch.dtype) -> Any:
    """Load a text encoder from its own folder straight in its compute dtype, frozen."""
    library, kind = components(folder.parent).get(folder.name, ("", "missing"))
    # the package of a pipeline may have its own class of the encoder
    package = sys.modules[getattr(diffusers, pipeline).__module__.rpartition(".")[0]]
    model_class = getattr(package, kind, None) or getattr(transformers, kind, None)
    if library != "transformers" or not hasattr(model_class, "from_pretrained"):
        raise UserError(f"{folder} is {kind!r:.80}, not a model of transformers; download the folder again")
    return load_part(model_class, folder, dtype=dtype).eval().requires_grad_(False)


def _load_tokenizer(kind: str, folder: Path) -> Any:
    check_files(folder)
    tokenizer_class = getattr(transformers, kind, None)
    try:
        if tokenizer_class is None:
            raise ValueError(f"transformers has no {kind:.80}")
        return tokenizer_class.from_pretrained(folder, local_files_only=True)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason:.300}; download or export it again") from error
