"""The frozen parts at work for the cache: pictures to moments, captions to the text tensors of a shard.

Results are tensors on the CPU that fill while the device goes on; they are whole after `FrozenParts.finish`, or once
the function that `FrozenParts.hand_over` gave has returned.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sd3_light.encoders.batching import (
    CaptionBatch,
    first_rows,
    image_batches,
    length_batches,
    padded_batches,
    rows_in_all,
    rows_in_batch,
)
from sd3_light.encoders.host_copies import AsyncHostCopies
from sd3_light.encoders.residence import ResidentModules, all_fit, free_memory, weight_bytes
from sd3_light.encoders.text import TEXT_ENCODERS, Tokenizer, encode_clip, encode_t5, load_text_model, load_tokenizer
from sd3_light.encoders.vae import load_vae, raw_moments

STORED_DTYPE = torch.bfloat16
"""The type of text features in a shard."""


@dataclass(frozen=True)
class TokenIds:
    """One encoder's token ids of distinct captions, one caption after another, and where each begins: [d + 1]."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def of(captions: Sequence[Sequence[int]]) -> "TokenIds":
        """From a list of ids for each caption."""
        starts = first_rows([len(ids) for ids in captions])
        return TokenIds(np.fromiter(chain.from_iterable(captions), np.int64, int(starts[-1])), starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of each caption."""
        return np.diff(self.starts)


CaptionTokens = Mapping[str, TokenIds]
"""Encoder -> ids, padded or not as the parts want them."""


class FrozenParts:
    """The VAE and the three text encoders of a diffusers folder on one device, each loaded when first used.

    The VAE computes in float32 (TF32 convolutions on GPUs), text encoders in ``text_dtype`` on GPUs and in float32 on
    CPUs. ``one_at_a_time`` keeps only the part in use on the device; None decides by the memory that is free. How work
    is cut into batches hangs on the work and ``batch_size`` alone. One thread encodes; `tokenize` may run on another.
    """

    def __init__(
        self,
        diffusers_path: Path,
        device: torch.device,
        *,
        text_dtype: torch.dtype,
        t5_max_length: int,
        text_tokens: Literal["padded", "real"],
        batch_size: int,
        one_at_a_time: bool | None = None,
    ) -> None:
        self.path, self.device = diffusers_path, device
        self.padded, self.batch_size = text_tokens == "padded", batch_size
        self._text_dtype = text_dtype if device.type == "cuda" else torch.float32
        self._t5_max_length = t5_max_length
        self._one_at_a_time = one_at_a_time
        self._shelf: ResidentModules | None = None
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tokenizing = threading.Lock()
        self._copies = AsyncHostCopies(device)

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents, by its config."""
        config = json.loads((self.path / "vae" / "config.json").read_text(encoding="utf-8"))
        return int(config["latent_channels"])

    @property
    def one_at_a_time(self) -> bool:
        """Whether only the part in use is on the device; decided once."""
        if self._one_at_a_time is None:
            weights = [weight_bytes(self.path / "vae", torch.float32)]
            weights += [weight_bytes(self.path / folder, self._text_dtype) for folder, _ in TEXT_ENCODERS.values()]
            self._one_at_a_time = not all_fit(weights, self.batch_size, free_memory(self.device))
        return self._one_at_a_time

    def part(self, name: str) -> Any:
        """The module of ``vae`` or of a text encoder, on the device; with ``one_at_a_time`` until another is asked."""
        if self._shelf is None:
            loaders: dict[str, Callable[[torch.device], nn.Module]] = {
                name: partial(_load_text, name, self.path, self._text_dtype) for name in TEXT_ENCODERS
            }
            self._shelf = ResidentModules(
                {"vae": partial(_load_vae, self.path), **loaders}, self.device, self.one_at_a_time
            )
        return self._shelf.take(name)

    # --- pictures -------------------------------------------------------------------------------

    def encode_images(self, pixels: NDArray[np.uint8] | Tensor, flip: bool) -> Tensor:
        """uint8 [B, H, W, 3] -> moments fp16 [B, v, 2C, h, w] on the CPU; with ``flip`` the second variant is that of
        the mirrored picture."""
        source = torch.as_tensor(pixels)
        batches = image_batches(len(source), source.shape[1], source.shape[2], self.batch_size)
        vae = self.part("vae")
        found: Tensor | None = None
        for rows in batches:
            images = self._to_device(source[rows])
            for variant in range(1 + flip):
                with torch.inference_mode():
                    moments = raw_moments(vae, images, flip=variant == 1)
                if found is None:
                    found = torch.empty(len(source), 1 + flip, *moments.shape[1:], dtype=moments.dtype)
                self._copies.submit(moments, found[rows, variant].copy_)
        assert found is not None, "no picture"
        return found

    # --- captions -------------------------------------------------------------------------------

    def tokenize(self, captions: Sequence[str]) -> CaptionTokens:
        """The ids of distinct captions, for `encode_captions`. Needs no device and may run on another thread."""
        with self._tokenizing:
            if not self._tokenizers:
                self._tokenizers = {
                    name: load_tokenizer(name, self.path, self._t5_max_length) for name in TEXT_ENCODERS
                }
            return {name: TokenIds.of(self._tokenizers[name](captions, self.padded)) for name in TEXT_ENCODERS}

    def encode_captions(self, captions: Sequence[str] | CaptionTokens) -> dict[str, Tensor]:
        """The text tensors of a shard (``ENCODER.tokens``, ``.start`` and CLIP's ``.pooled``) for distinct captions, or
        for what `tokenize` made of them, in their order; bf16 on the CPU."""
        tokens = captions if isinstance(captions, Mapping) else self.tokenize(captions)
        found: dict[str, Tensor] = {}
        for name in TEXT_ENCODERS:
            found |= self.encode_text(name, tokens[name])
        return found

    def encode_text(self, name: str, ids: TokenIds) -> dict[str, Tensor]:
        """The tensors of one encoder for the ids that `tokenize` made for it."""
        found = {f"{name}.start": torch.from_numpy(ids.starts)}
        for batch in self.caption_batches(name, ids.lengths.tolist()):
            rows = rows_in_all(batch.members, ids.starts)
            tokens, pooled = self._encode_batch(name, batch, ids, rows)
            self._collect(found, f"{name}.tokens", tokens, len(ids.ids), rows)
            if pooled is not None:
                self._collect(found, f"{name}.pooled", pooled, len(ids.lengths), np.array(batch.members))
        return found

    def caption_batches(self, name: str, lengths: Sequence[int]) -> list[CaptionBatch]:
        """What an encoder takes at once of captions with these numbers of ids."""
        if self.padded:
            return padded_batches(lengths, self.batch_size)
        most = self._tokenizers[name].max_length
        # CLIP has no position beyond its last; T5's are relative
        return length_batches(lengths, self.batch_size * most, None if name == "t5" else most)

    def _encode_batch(
        self, name: str, batch: CaptionBatch, ids: TokenIds, rows: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of real tokens, caption after caption, and CLIP's pooled; on the device, as they are stored."""
        lengths = ids.lengths[list(batch.members)]
        used = rows_in_batch(lengths.tolist(), batch.length)
        filled = np.full(len(batch.members) * batch.length, self._tokenizers[name].pad_id)
        filled[used] = ids.ids[rows]
        padded = self._to_device(torch.from_numpy(filled.reshape(-1, batch.length)))
        real = None if self.padded else self._to_device(torch.from_numpy(used))
        mask = None if self.padded else self._to_device(torch.from_numpy(lengths))
        model = self.part(name)
        with torch.inference_mode():
            if name == "t5":
                tokens, pooled = encode_t5(model, padded, mask), None
            else:
                tokens, pooled = encode_clip(model, padded)
            tokens = tokens.flatten(0, 1)
            tokens = tokens if real is None else tokens[real]
            return tokens.to(STORED_DTYPE), None if pooled is None else pooled.to(STORED_DTYPE)

    def _collect(
        self, found: dict[str, Tensor], name: str, values: Tensor, count: int, rows: NDArray[np.int64]
    ) -> None:
        """Have ``values`` stored at ``rows`` of the ``count`` rows of ``found[name]``."""
        if name not in found:
            found[name] = torch.empty(count, values.shape[-1], dtype=values.dtype)
        if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            self._copies.submit(values, found[name][rows[0] : rows[-1] + 1].copy_)
        else:
            self._copies.submit(values, partial(found[name].index_copy_, 0, torch.from_numpy(rows)))

    # --- the device -----------------------------------------------------------------------------

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def finish(self) -> None:
        """Wait until every result so far is whole."""
        self._copies.hand_over()()

    def hand_over(self) -> Callable[[], None]:
        """What waits, on any thread, until every result so far is whole; meanwhile more may be encoded."""
        return self._copies.hand_over()

    def close(self) -> None:
        """Let results arrive, then free all parts and their memory; the end of this object's use."""
        self._copies.close()
        if self._shelf is not None:
            self._shelf.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_vae(path: Path, device: torch.device) -> nn.Module:
    # channels first: 7% faster than channels last on an H200
    module: nn.Module = load_vae(path, device, torch.float32)
    return module


def _load_text(name: str, path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return load_text_model(name, path, device, dtype)
