"""SD3's encoders as the cache stage uses them: images to moments, captions to the text tensors of a shard."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.encoding.batching import CaptionBatch, length_batches, padded_batches, ranges, row_starts
from sd3_light.encoding.image_encoders import ImageEncoders, Loader
from sd3_light.families.sd3.text import (
    TEXT_ENCODERS,
    Tokenizer,
    encode_clip,
    encode_t5,
    load_text_model,
    load_tokenizer,
)
from sd3_light.model.device_copy import to_device

STORED_DTYPE = torch.bfloat16
"""Dtype of text features in a shard."""


@dataclass(frozen=True)
class TokenIds:
    """One encoder's token ids of distinct captions, concatenated, and the start of each caption: [d + 1]."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def of(captions: Sequence[Sequence[int]]) -> "TokenIds":
        """Build from one list of ids per caption."""
        starts = row_starts([len(ids) for ids in captions])
        return TokenIds(np.fromiter(chain.from_iterable(captions), np.int64, int(starts[-1])), starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids per caption."""
        return np.diff(self.starts)


CaptionTokens = Mapping[str, TokenIds]
"""Encoder -> token ids."""


class FrozenParts(ImageEncoders):
    """The VAE and the three text encoders of a diffusers folder; see `ImageEncoders`."""

    _text_folders = tuple(folder for folder, _ in TEXT_ENCODERS.values())

    def __init__(
        self, model: ModelConfig, device: torch.device, batch_size: int, one_at_a_time: bool | None = None
    ) -> None:
        super().__init__(model, device, batch_size, one_at_a_time)
        self.padded = model.text_tokens == "padded"
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tokenizer_lock = threading.Lock()

    def _text_loaders(self) -> dict[str, Loader]:
        return {name: partial(load_text_model, name, self.path, dtype=self._text_dtype) for name in TEXT_ENCODERS}

    def tokenize(self, captions: Sequence[str]) -> CaptionTokens:
        """Return the token ids of distinct captions, for `encode_captions`. Safe to call from another thread."""
        with self._tokenizer_lock:
            if not self._tokenizers:
                length = self._model.t5_max_length
                self._tokenizers = {name: load_tokenizer(name, self.path, length) for name in TEXT_ENCODERS}
            return {name: TokenIds.of(self._tokenizers[name](captions, self.padded)) for name in TEXT_ENCODERS}

    def encode_captions(
        self, captions: Sequence[str] | CaptionTokens, columns: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Encode distinct captions, or their ids from `tokenize`, to the text tensors of a shard, on the CPU.

        With ``columns`` only the encoders of these run.
        """
        tokens = captions if isinstance(captions, Mapping) else self.tokenize(captions)
        features: dict[str, Tensor] = {}
        for name in TEXT_ENCODERS:
            if columns is None or not {name, f"{name}.pooled"}.isdisjoint(columns):
                features |= self.encode_text(name, tokens[name])
        return features

    def encode_empty(self) -> dict[str, Tensor]:
        """Encode the empty caption."""
        return self.encode_captions([""])

    def encode_text(self, name: str, ids: TokenIds) -> dict[str, Tensor]:
        """Return the tensors of one encoder for its ids from `tokenize`."""
        features = {f"{name}.start": torch.from_numpy(ids.starts)}
        for batch in self.caption_batches(name, ids.lengths.tolist()):
            members = list(batch.members)
            rows = ranges(ids.starts[members], ids.lengths[members])
            tokens, pooled = self._encode_batch(name, batch, ids, rows)
            source = self._describe(TEXT_ENCODERS[name][0], self._text_dtype)
            self._collect(features, f"{name}.tokens", tokens, len(ids.ids), rows, source)
            if pooled is not None:
                self._collect(features, f"{name}.pooled", pooled, len(ids.lengths), np.array(members), source)
        return features

    def caption_batches(self, name: str, lengths: Sequence[int]) -> list[CaptionBatch]:
        """Group captions with these numbers of ids into batches for one encoder."""
        if self.padded:
            return padded_batches(lengths, self.batch_size)
        max_length = self._tokenizers[name].max_length
        # CLIP has no positions beyond its maximum; T5's positions are relative
        return length_batches(lengths, self.batch_size * max_length, None if name == "t5" else max_length)

    def _encode_batch(
        self, name: str, batch: CaptionBatch, ids: TokenIds, rows: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of real tokens, caption by caption, and CLIP's pooled vectors, on the device."""
        lengths = ids.lengths[list(batch.members)]
        real_rows = ranges(np.arange(len(lengths)) * batch.length, lengths)
        filled = np.full(len(batch.members) * batch.length, self._tokenizers[name].pad_id)
        filled[real_rows] = ids.ids[rows]
        padded = to_device(torch.from_numpy(filled.reshape(-1, batch.length)), self.device)
        real_index = None if self.padded else to_device(torch.from_numpy(real_rows), self.device)
        lengths_B = None if self.padded else to_device(torch.from_numpy(lengths), self.device)
        model = self.part(name)
        with torch.inference_mode():
            if name == "t5":
                tokens = encode_t5(model, padded, lengths_B)
                pooled = None
            else:
                tokens, pooled = encode_clip(model, padded)
            tokens = tokens.flatten(0, 1)
            tokens = tokens if real_index is None else tokens[real_index]
            return tokens.to(STORED_DTYPE), None if pooled is None else pooled.to(STORED_DTYPE)

    def _collect(
        self, features: dict[str, Tensor], name: str, values: Tensor, count: int, rows: NDArray[np.int64], source: str
    ) -> None:
        """Copy ``values`` to ``rows`` of ``features[name]``, which has ``count`` rows."""
        if name not in features:
            features[name] = torch.empty(count, values.shape[-1], dtype=values.dtype)
        if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            self._copies.submit(values, features[name][rows[0] : rows[-1] + 1].copy_, source)
        else:
            self._copies.submit(values, partial(features[name].index_copy_, 0, torch.from_numpy(rows)), source)
