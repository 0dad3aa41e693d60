"""A family's frozen networks: images and captions in, the values that the cache stores out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from sd3_light.config import ModelConfig
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.columns import Column

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

Tokens = Mapping[str, Any]
"""Text encoder -> the token ids of distinct captions, as this encoder takes them."""


class Encoders(Protocol):
    """Frozen encoders on one device, each loaded at first use.

    Results are CPU tensors that may be filled asynchronously. They are complete after `synchronize`, or once the
    function returned by `waiter` has returned. They depend on the inputs and the batch size only. One thread encodes;
    `tokenize` may run on another.
    """

    @property
    def vae_dtype(self) -> "torch.dtype":
        """The dtype in which the VAE encodes."""

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Return the token ids of distinct captions, without the device. Safe to call from another thread."""

    def encode_captions(
        self, captions: Sequence[str] | Tokens, columns: Collection[str] | None = None
    ) -> "dict[str, Tensor]":
        """Encode distinct captions, or their ids from `tokenize`, to the text tensors of a shard.

        Only ``columns`` of captions are needed, None: all; an encoder that computes none of them need not run.
        A text of varying length is ``NAME.tokens``, the rows of all captions, and ``NAME.start``, the first row of each
        and their number; anything else has one row per caption.
        """

    def encode_empty(self) -> "dict[str, Tensor]":
        """Encode the text of samples without one, as `encode_captions` does for one caption."""

    def encode_text(self, name: str, ids: Any) -> "dict[str, Tensor]":
        """Return the tensors of `encode_captions` that one text encoder computes, for its ids from `tokenize`."""

    def encode_images(self, pixels: "NDArray[np.uint8]", flip: bool) -> "dict[str, Tensor]":
        """Encode uint8 pixels [B, H, W, 3] to the image tensors of a shard [B, v, ...]; ``flip`` adds mirrored ones."""

    def encode_features(self, pixels: "NDArray[np.uint8]", flip: bool, column: Column) -> "Tensor":
        """Encode uint8 pixels [B, H, W, 3] to the features of a teacher [B, v, *shape], the values of its column."""

    def reconstruct(self, pixels: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
        """Return uint8 pixels [B, H, W, 3] as the VAE decodes them again."""

    def synchronize(self) -> None:
        """Wait until all results so far are complete."""

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until all results so far are complete."""

    def close(self) -> None:
        """Wait for pending results, then free all encoders."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class PairEncoders(Encoders, Protocol):
    """The encoders of a family with columns that read captions and images of their samples."""

    def encode_pairs(
        self,
        captions: Sequence[str],
        images: "Sequence[Sequence[NDArray[np.uint8]]]",
        columns: Collection[str] | None = None,
    ) -> "dict[str, Tensor]":
        """Encode captions with the images [H, W, 3] of each, not mirrored, as `encode_captions` does without them.

        The images are those that the columns of captions read, in the order of `beside_captions`.
        """


class Encoding(ABC):
    """How a family encodes images and captions. Only `encoders` imports torch."""

    @property
    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """The subfolders of a model folder that decide the values of a cache: VAE, text encoders and tokenizers."""

    @property
    @abstractmethod
    def text_encoders(self) -> tuple[str, ...]:
        """The names of the text encoders, in the order in which they are loaded."""

    @abstractmethod
    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of [model] that decide the values of a caption, as a cache states them."""

    @abstractmethod
    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[TextLimit]:
        """Return how much of a text the encoders of a model folder read, given their `text_settings`.

        An encoder whose settings or tokenizer cannot be read is left out; encoding reports the damage.
        """

    @abstractmethod
    def encoders(
        self, model: ModelConfig, device: "torch.device", batch_size: int, one_at_a_time: bool | None = None
    ) -> Encoders:
        """Return the encoders of a [model] table, in its dtypes on GPUs and in float32 elsewhere.

        ``one_at_a_time`` keeps only the encoder in use on the device; None decides by the free memory.
        """

    def model_limits(self, model: ModelConfig) -> list[TextLimit]:
        """Return the limits of a [model] table's text encoders."""
        return self.text_limits(model.diffusers_path, self.text_settings(model))
