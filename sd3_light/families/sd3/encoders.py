"""The encoders as the cache stage uses them: images to moments, captions to the text tensors of a shard.

Results are CPU tensors that are filled asynchronously. They are complete after `FrozenParts.synchronize`, or once the
function returned by `FrozenParts.waiter` has returned.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sd3_light.encoding.batching import CaptionBatch, image_batches, length_batches, padded_batches, ranges, row_starts
from sd3_light.encoding.half_vae import VaeDtype, load_encoding_vae, resolve_vae_dtype
from sd3_light.encoding.host_copies import AsyncHostCopies
from sd3_light.encoding.residence import ResidentModules, all_fit, free_memory, weight_bytes
from sd3_light.encoding.vae import decode_moments, raw_moments
from sd3_light.families.sd3.text import (
    TEXT_ENCODERS,
    Tokenizer,
    encode_clip,
    encode_t5,
    load_text_model,
    load_tokenizer,
)
from sd3_light.model.device_copy import to_device
from sd3_light.model.folder import vae_shape

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


class FrozenParts:
    """The VAE and the three text encoders of a diffusers folder on one device, each loaded on first use.

    On GPUs the VAE encodes as ``vae_dtype`` says (float32: with TF32 convolutions) and text encoders run in
    ``text_dtype``; on CPUs everything is float32.
    ``one_at_a_time`` keeps only the encoder in use on the device; None decides by the free memory. Batches depend on
    the inputs and ``batch_size`` only. One thread encodes; `tokenize` may run on another.
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
        vae_dtype: VaeDtype = "float32",
        one_at_a_time: bool | None = None,
    ) -> None:
        self.path, self.device = diffusers_path, device
        self.padded, self.batch_size = text_tokens == "padded", batch_size
        self._text_dtype = text_dtype if device.type == "cuda" else torch.float32
        self._t5_max_length, self._vae_setting = t5_max_length, vae_dtype
        self._one_at_a_time = one_at_a_time
        self._modules: ResidentModules | None = None
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tokenizer_lock = threading.Lock()
        self._copies = AsyncHostCopies(device)

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents, read from its config."""
        return vae_shape(self.path)[0]

    @property
    def one_at_a_time(self) -> bool:
        """Whether only the encoder in use is on the device; decided once."""
        if self._one_at_a_time is None:
            weights = [weight_bytes(self.path / "vae", torch.float32)]
            weights += [weight_bytes(self.path / folder, self._text_dtype) for folder, _ in TEXT_ENCODERS.values()]
            self._one_at_a_time = not all_fit(weights, self.batch_size, free_memory(self.device))
        return self._one_at_a_time

    @cached_property
    def vae_dtype(self) -> torch.dtype:
        """The dtype in which the VAE encodes; decided once."""
        return resolve_vae_dtype(self._vae_setting, self.path, self.device)

    def part(self, name: str) -> Any:
        """Return the module ``vae`` or a text encoder on the device, valid as in `ResidentModules.get`."""
        if self._modules is None:
            loaders: dict[str, Callable[[torch.device], nn.Module]] = {
                name: partial(load_text_model, name, self.path, dtype=self._text_dtype) for name in TEXT_ENCODERS
            }
            # float32 is channels first: 7% faster than channels last on an H200
            loaders["vae"] = lambda device: load_encoding_vae(self.path, device, self.vae_dtype)
            self._modules = ResidentModules(loaders, self.device, self.one_at_a_time)
        return self._modules.get(name)

    # --- images ---------------------------------------------------------------------------------

    def encode_images(self, pixels: NDArray[np.uint8] | Tensor, flip: bool) -> dict[str, Tensor]:
        """Encode uint8 pixels [B, H, W, 3] to fp16 ``moments`` [B, v, 2C, h, w]; ``flip`` adds mirrored ones."""
        source = torch.as_tensor(pixels)
        batches = image_batches(len(source), source.shape[1], source.shape[2], self.batch_size)
        vae = self.part("vae")
        encoded: Tensor | None = None
        for rows in batches:
            images = to_device(source[rows], self.device)
            for variant in range(1 + flip):
                with torch.inference_mode():
                    moments = raw_moments(vae, images, flip=variant == 1)
                if encoded is None:
                    encoded = torch.empty(len(source), 1 + flip, *moments.shape[1:], dtype=moments.dtype)
                self._copies.submit(moments, encoded[rows, variant].copy_, self._describe("vae", self.vae_dtype))
        assert encoded is not None, "no images"
        return {"moments": encoded}

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return uint8 pixels [B, H, W, 3] as the VAE decodes them from the means of their moments."""
        moments = self.encode_images(pixels, flip=False)["moments"]
        self.synchronize()
        return decode_moments(self.part("vae"), moments[:, 0])

    # --- captions -------------------------------------------------------------------------------

    def tokenize(self, captions: Sequence[str]) -> CaptionTokens:
        """Return the token ids of distinct captions, for `encode_captions`. Safe to call from another thread."""
        with self._tokenizer_lock:
            if not self._tokenizers:
                length = self._t5_max_length
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
                tokens, pooled = encode_t5(model, padded, lengths_B), None
            else:
                tokens, pooled = encode_clip(model, padded)
            tokens = tokens.flatten(0, 1)
            tokens = tokens if real_index is None else tokens[real_index]
            return tokens.to(STORED_DTYPE), None if pooled is None else pooled.to(STORED_DTYPE)

    def _describe(self, folder: str, dtype: torch.dtype) -> str:
        return f"the encoder {self.path / folder}, computed in {str(dtype).removeprefix('torch.')},"

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

    # --- the device -----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all results so far are complete."""
        self._copies.waiter()()

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until all results so far are complete."""
        return self._copies.waiter()

    def close(self) -> None:
        """Wait for pending results, then free all encoders."""
        self._copies.close()
        if self._modules is not None:
            self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
