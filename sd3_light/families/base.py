"""The base of families of stock diffusers pipelines: a family's file adds its texts and how its denoiser is called."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sd3_light.config import ModelConfig
from sd3_light.core.columns import Column
from sd3_light.core.family import Family
from sd3_light.core.sampling import EncodedText

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch


class StockFamily(Family):
    """A family of a stock pipeline.

    ``text_parts`` are the subfolders of each text encoder and its tokenizer, ``adapter_targets`` the layers that a LoRA
    changes by default, ``text_length`` the tokens of a caption unless the config says otherwise, ``patch`` the latent
    pixels of a token's side.
    """

    text_parts: ClassVar[Mapping[str, tuple[str, ...]]]
    adapter_targets: ClassVar[tuple[str, ...]]
    text_length: ClassVar[int] = 512
    patch: ClassVar[int] = 2

    # --- what a family's file says ---------------------------------------------------------------

    def refusal(self, folder: Path) -> str | None:
        """Return why a model folder of this pipeline's class cannot be trained, and what to do; None if it can."""
        return None

    @abstractmethod
    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """Return what a cache stores of a caption; no weight is read."""

    @abstractmethod
    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """Return the values of `text_columns` for texts, by a pipeline that has only tokenizers and text encoders.

        A value is a sequence of rows, one for each text; those of a ragged column differ in length.
        """

    def encode_empty(self, pipe: Any, model: ModelConfig) -> "Mapping[str, Tensor]":
        """Return the values of the unconditional text: of the empty caption, unless the pipeline has another one."""
        return {name: rows[0] for name, rows in self.encode_captions(pipe, [""], model).items()}

    @abstractmethod
    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """Return the velocity of a batch with the values noisy, t and those of `text_columns`.

        ``guidance`` is the number that a distilled denoiser takes; others ignore it.
        """

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """Return whether a denoiser with this config takes guidance as a number and runs once per step."""
        return False

    def is_guided(self, guidance: float) -> bool:
        """Return whether this guidance needs the unconditional text."""
        return guidance > 1

    def guide(self, negative: "Tensor", positive: "Tensor", guidance: float) -> "Tensor":
        """Return the guided velocity, as the stock pipeline computes it."""
        return negative + guidance * (positive - negative)

    @abstractmethod
    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """Set a scheduler's timesteps as the stock pipeline does, for an image with this number of tokens."""

    @abstractmethod
    def pipeline_arguments(
        self, texts: Sequence[EncodedText], negative: Sequence[EncodedText] | None, guidance: float
    ) -> dict[str, Any]:
        """Return the arguments of the stock pipeline's call for encoded texts and guidance."""

    def latent_arguments(self, latents: "Tensor") -> dict[str, Any]:
        """Return the arguments of the stock pipeline's call for initial latents [B, C, h, w]."""
        return {"latents": latents}

    def image_part(self, output: Any, batch: "Batch") -> "Tensor":
        """Return the image tokens of a block's output."""
        tokens: Tensor = output[-1] if isinstance(output, tuple) else output
        return tokens
