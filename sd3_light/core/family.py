"""The contract of a model family: everything that generic code needs to know about one kind of model.

A family is a few names and several parts. Each part is loaded at first use, so that `check` imports no torch and a
worker no pipeline. Generic code gets a family from `core.registry` and imports no family.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sd3_light.config import ModelConfig, TrainConfig
from sd3_light.core.checks import ModelChecks
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.cost import Cost
from sd3_light.core.encoding import Encoding
from sd3_light.core.files import Files
from sd3_light.core.sampling import OwnDrawing, Sampling
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import FastBlocks, TrainingParts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.tensor_file import StoredTensor


class Weights(ABC):
    """A family's denoiser: its config, its initial weights, and the module that holds them."""

    @abstractmethod
    def start(self, model: ModelConfig) -> WeightsStart:
        """Return the initial weights of a [model] table. Raises UserError if its folder or file has no denoiser."""

    @abstractmethod
    def require(self, folder: Path) -> None:
        """Raise UserError unless ``folder`` has the config of a denoiser of this family."""

    @abstractmethod
    def load(self, start: WeightsStart, seed: int) -> "nn.Module":
        """Return the denoiser before the first step, in float32 (law 4)."""

    @abstractmethod
    def unread(self, start: WeightsStart) -> "tuple[nn.Module, Mapping[str, StoredTensor]]":
        """Return the denoiser without memory for its weights, and the weights in their files, unread.

        Those of ``start`` are not random. Raises UserError unless they fit the denoiser.
        """

    @abstractmethod
    def empty(self, config: Mapping[str, Any]) -> "nn.Module":
        """Return the denoiser of a config without memory for its weights."""

    @abstractmethod
    def from_state(self, config: Mapping[str, Any], state: "Mapping[str, Tensor]") -> "nn.Module":
        """Return a denoiser that holds the tensors of ``state`` themselves."""


class Family(ABC):
    """One kind of model. ``name`` is the value of `model.type`, ``title`` how messages call it.

    ``pipeline`` is the class in `model_index.json` that loads an export, ``denoiser`` the class of its denoiser.
    ``has_stages`` says whether its layers can be those of a pipeline over several processes, ``starts_random`` whether
    it is trained from random weights, ``loads_adapters`` whether its stock pipeline loads a LoRA, ``has_single_file``
    whether there is a single file of the model. ``media`` is what it draws. ``comfyui``: ComfyUI reads a LoRA with the
    names of its files. ``packages`` are those that its text needs beside transformers. ``text_tokens`` says whether a
    denoiser gets texts that are padded to one length, or their real tokens alone; ``guidance`` by what it is guided:
    a negative prompt, or a number that a distilled denoiser takes. ``references`` is how many images it sees beside the
    text, and ``sets_references`` whether the config says it instead; ``texts_see_references`` whether its texts are
    encoded with them, so that it draws nothing without. ``patch`` are the latent pixels of a token's side.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    pipeline: ClassVar[str]
    denoiser: ClassVar[str]
    has_stages: ClassVar[bool] = False
    starts_random: ClassVar[bool] = False
    media: ClassVar[Literal["image", "video"]] = "image"
    loads_adapters: ClassVar[bool] = True
    has_single_file: ClassVar[bool] = False
    comfyui: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()
    text_tokens: ClassVar[tuple[Literal["padded", "real"], ...]] = ("real",)
    guidance: ClassVar[tuple[Literal["negative prompt", "number"], ...]] = ("negative prompt",)
    references: ClassVar[int] = 0
    sets_references: ClassVar[bool] = False
    texts_see_references: ClassVar[bool] = False
    patch: ClassVar[int] = 2

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The denoiser's weights."""

    @property
    @abstractmethod
    def files(self) -> Files:
        """Exported folders and their proof, adapter files, single files."""

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """The frozen networks that encode images and captions."""

    @property
    @abstractmethod
    def sampling(self) -> Sampling:
        """How images are drawn with the denoiser that trains."""

    @property
    @abstractmethod
    def training(self) -> TrainingParts:
        """What a run needs beside the weights."""

    @property
    @abstractmethod
    def checks(self) -> ModelChecks:
        """What `check` and `new` read in a model folder."""

    @property
    def fast_blocks(self) -> FastBlocks | None:
        """The family's own kernels; None if it has none."""
        return None

    @abstractmethod
    def drawing(self, config: TrainConfig) -> OwnDrawing:
        """Return the steps and the guidance that a run's export states, None where its kind of model says them."""

    def completed(self, config: TrainConfig) -> TrainConfig:
        """Return a config with the family's own values in place of absent keys; those of the schema are SD3's."""
        return config

    def reference_count(self, model: ModelConfig) -> int:
        """Return how many images the denoiser sees beside the text."""
        return model.references if self.sets_references else self.references

    def reference_bucket(self, bucket: Bucket) -> Bucket:
        """Return the size to which the references of a bucket's images are resized and cropped."""
        return bucket

    def refusal(self, folder: Path) -> str | None:
        """Return why a model folder of this pipeline's class cannot be trained, and what to do; None if it can.

        Only configs are read, and those of the denoiser and the VAE exist.
        """
        return None

    def scheduler_fault(self, folder: Path) -> str | None:
        """Return why the stock pipeline cannot draw with the scheduler of a model folder, and what to do."""
        return None

    def no_guidance(self, start: WeightsStart) -> float | None:
        """Return the largest guidance that needs no other text; None: the denoiser takes it as a number."""
        return 1.0

    def recipe(self, folder: Path) -> Mapping[str, Any]:
        """Return the keys of a recipe that `new` writes otherwise for a model folder; None: it leaves the key out.

        ``side_step``, ``frames`` and ``fps`` are keys of the dataset TOML. The recipes themselves are SD3's.
        """
        return {}

    def frame_step(self, folder: Path) -> int | None:
        """Return s if the clips that a model folder's VAE encodes have s·n + 1 frames; None: it has images only."""
        return None

    @abstractmethod
    def cost(self, start: WeightsStart, model: ModelConfig) -> Cost:
        """Return the cost of training the denoiser of ``start``."""

    @abstractmethod
    def columns(self, model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        """Return what a cache stores of the images of a bucket and their captions, in the order of its shards.

        Dtypes and shapes follow from the configs of the model ``folder``; no weight is read. A mask column is
        declared, whether or not a dataset has masks.
        """

    @abstractmethod
    def prepared_columns(self, model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
        """Return the values of a sample in a prepared batch, with noise, for the ``columns`` of a cache.

        Those of a caption are ragged if its length differs from that of others. Draws of a few bytes are left out.
        """
