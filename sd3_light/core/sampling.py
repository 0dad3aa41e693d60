"""How a family's images are generated: with the denoiser that trains, and with its stock pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from sd3_light.config import DEFAULT_GUIDANCE, ModelConfig
from sd3_light.core.caption_lengths import TextLimit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sd3_light.core.batch import Batch

EncodedText = Mapping[str, "Tensor"]
"""One text as a denoiser takes it: name of a `Batch`'s value -> tensor without the dimension of samples."""


@dataclass(frozen=True)
class ImageRequest:
    """One image to generate; sides in pixels. The negative prompt is used only where the model takes one.

    None for `steps` or `guidance` means the usual value. A clip has several frames.
    ``references`` are the files of images that the model sees beside the prompt.
    """

    prompt: str
    seed: int
    width: int
    height: int
    negative_prompt: str = ""
    steps: int | None = None
    guidance: float | None = None
    frames: int = 1
    references: tuple[Path, ...] = ()

    @property
    def size(self) -> tuple[int, ...]:
        """Width and height; of a clip frames too."""
        return (self.width, self.height) if self.frames == 1 else (self.width, self.height, self.frames)


@dataclass(frozen=True)
class OwnDrawing:
    """The steps and the guidance that a model's configs ask for, None where they do not; ``note`` explains them."""

    steps: int | None = None
    guidance: float | None = None
    note: str = ""

    def or_else(self, other: "OwnDrawing") -> "OwnDrawing":
        """Return this with the other's values in place of those that are None."""
        return OwnDrawing(
            other.steps if self.steps is None else self.steps,
            other.guidance if self.guidance is None else self.guidance,
            self.note or other.note,
        )


UNSTATED = OwnDrawing()
"""Neither steps nor guidance."""


class Decoder(Protocol):
    """Decodes latents; inside its context, the VAE is on the device."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def decode(self, latents: "Tensor") -> "Tensor":
        """Return the pixels [B, 3, H, W] from 0 to 1; of latents with frames [B, 3, F, H, W]."""


class Sampling(ABC):
    """How images are drawn with the denoiser that trains, by `sampling.loop`; no text encoder is loaded.

    ``joins_guidance``: guidance runs prompts and negative prompts as one batch, not as two, as the stock pipeline does.
    """

    joins_guidance: bool = True

    @abstractmethod
    def text(self, features: "Mapping[str, Tensor]") -> EncodedText:
        """Return one caption's features of the cache as the denoiser takes them."""

    @abstractmethod
    def negative_text(self, empty: EncodedText, model: ModelConfig) -> EncodedText | None:
        """Return the text of guidance without a negative prompt, given the encoded empty caption.

        None: the denoiser takes guidance as a number, or takes none, and runs once per step.
        """

    @abstractmethod
    def batch(self, texts: Sequence[EncodedText], model: ModelConfig, guidance: float) -> "Batch":
        """Return what the denoiser takes beside ``noisy`` and ``t``, in float32 on the host."""

    @abstractmethod
    def latent_shape(self, model: ModelConfig, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one image's latents; ``size`` is that of `ImageRequest`."""

    @abstractmethod
    def scheduler(self, model: ModelConfig, size: tuple[int, ...], steps: int, device: "torch.device") -> Any:
        """Return a new scheduler of diffusers with its timesteps set, as the stock pipeline sets them."""

    @abstractmethod
    def decoder(self, model: ModelConfig, device: "torch.device") -> Decoder:
        """Load the VAE on the host and return its decoder in float32."""

    def is_guided(self, guidance: float) -> bool:
        """Return whether this guidance needs a negative text."""
        return guidance > 1

    def guide(self, negative: "Tensor", positive: "Tensor", guidance: float) -> "Tensor":
        """Return the guided velocity."""
        return negative + guidance * (positive - negative)


class PipelineInputs(ABC):
    """How a model's stock pipeline must be called, so that it gets the inputs that the model was trained with."""

    @property
    def largest_batch(self) -> int | None:
        """How many images the pipeline draws at once; None: as many as the device holds."""
        return None

    @property
    def shares_references(self) -> bool:
        """Whether the pipeline shows the same references to all prompts of a call."""
        return False

    @property
    def own_drawing(self) -> OwnDrawing:
        """What the model's configs say about steps and guidance."""
        return UNSTATED

    def drawing(self, steps: int | None, guidance: float | None, usual_steps: int = 28) -> tuple[int, float]:
        """Return the steps and the guidance of images: as given, or the model's own, or the usual ones."""
        own = self.own_drawing
        steps = own.steps if steps is None else steps
        guidance = own.guidance if guidance is None else guidance
        return usual_steps if steps is None else steps, DEFAULT_GUIDANCE if guidance is None else guidance

    def stating(self, drawing: OwnDrawing) -> "PipelineInputs":
        """Return the same for a model whose export states steps or guidance."""
        return self

    def for_folder(self, folder: Path) -> "PipelineInputs":
        """Return the same for the model in ``folder``, if an adapter's folder states the settings."""
        return self

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the settings, for the metadata of an image."""

    @abstractmethod
    def negative_fault(self) -> str | None:
        """Return why the model takes no negative prompt, and what to do; None if it takes one."""

    @abstractmethod
    def size_fault(self, pipe: Any, width: int, height: int) -> str | None:
        """Return why the model cannot generate an image of this size; None if it can."""

    @abstractmethod
    def text_limits(self, folder: Path) -> list[TextLimit]:
        """Return how much of a prompt the text encoders of the model's folder read."""

    @abstractmethod
    def encode(self, pipe: Any, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts with the pipeline's encoders, on their device."""

    @abstractmethod
    def arguments(
        self, pipe: Any, batch: Sequence[ImageRequest], encode: Callable[[Sequence[str]], list[EncodedText]]
    ) -> dict[str, Any]:
        """Return the arguments of the pipeline's call for texts and guidance, for requests of one size and guidance.

        ``encode`` returns what `encode` of this class does, perhaps from memory.
        """

    def takes_sampler(self, name: str, is_dynamic: bool) -> bool:
        """Return whether the pipeline draws with another sampler than Euler; ``is_dynamic``: the shift is by size."""
        return True

    def frames_fault(self, frames: int) -> str | None:
        """Return why the model cannot generate a clip of this many frames; None if it can."""
        return None if frames == 1 else f"{frames} frames: this model generates images, not clips; leave them out"

    def references_fault(self, count: int) -> str | None:
        """Return why the model cannot generate an image with this many references; None if it can."""
        return "this model sees no image beside the prompt; leave --reference out" if count else None

    @property
    def default_frames(self) -> int:
        """The frames of a clip whose request names none; 1 for images."""
        return 1

    def drawn_at(self, size: tuple[int, int] | None) -> "PipelineInputs":
        """Return the same for a model that was trained at this width and height, if its own configs do not say it."""
        return self

    def default_size(self, pipe: Any) -> tuple[int, int]:
        """Return the width and height of an image whose request names none."""
        side = pipe.default_sample_size * pipe.vae_scale_factor
        return side, side

    def prepared(self, pipe: Any) -> AbstractContextManager[None]:
        """Return a context in which the pipeline computes as in training."""
        return nullcontext()
