"""The contract of a family's files: exported folders and their proof, adapter files, single files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.core.sampling import PipelineInputs

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
Ranks = dict[str, list[int]]
"""Fused layer -> the ranks of the layers in it, 0 for one without a LoRA."""


def is_single_file(path: Path) -> bool:
    """Return whether a path names a single file, not a folder."""
    return path.suffix == ".safetensors"


class Padding(NamedTuple):
    """A model of ``num_layers`` blocks in a single file of ``num_blocks``: identity blocks come before the last one."""

    num_layers: int
    num_blocks: int


class Layers(NamedTuple):
    """The diffusers layers that a name refers to: one, or several whose rows are concatenated in a fused weight."""

    names: tuple[str, ...]
    single: str | None = None
    """The single-file name if that naming was used."""


@dataclass(frozen=True)
class AdapterNames:
    """How adapter files name a denoiser's layers, and what they say about it to other programs.

    The defaults hold for every diffusers model: a file has diffusers' own names. An update is a `LoraModule` or a
    `LycorisModule`, with its layer's name as the key. ``denoiser`` is the model in messages, with its article;
    ``comfyui`` says whether ComfyUI reads the files. ``family`` is the one that a file states; a file without a name
    may be SD3's.
    """

    denoiser: str = "a denoiser with diffusers' names"
    comfyui: bool = False
    family: str = ""

    def stem(self, layer: str) -> str:
        """Return the first part of the keys of a LoRA for a layer."""
        return f"transformer.{layer}"

    def find_layers(self, name: str) -> Layers | None:
        """Return the layers for a name in a file, as spelled there without prefix; None if unknown."""
        return Layers((name,)) if "." in name else None

    def fused(self, modules: Mapping[str, Any]) -> tuple[dict[str, Any], Ranks]:
        """Return a LoRA by single-file names with scale 1, and the ranks of fused layers whose ranks differ.

        Raises UserError if the family has no such names.
        """
        raise UserError(f'layout "kohya" is not known for {self.denoiser}; choose the layout "diffusers"')

    def split(self, layers: Layers, module: Any, ranks: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return the updates of the diffusers layers in one entry of a file; ``ranks`` comes from `fused`."""
        return {layers.names[0]: module}

    def pad(self, modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
        """Renumber the model's last block as in a padded single file."""
        raise UserError(f"{self.denoiser} has no padded single file; leave the padding out")

    def unpad(self, modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
        """Undo `pad`; an update of an identity block is a UserError."""
        raise UserError(f"{self.denoiser} has no padded single file; leave the padding out")

    def lycoris_stem(self, layer: str) -> str:
        """Return how the keys of a layer begin in a LoKr or LoHa file."""
        return f"lycoris_{layer.replace('.', '_')}"

    def metadata(self, modules: Mapping[str, Any], layout: str, facts: Mapping[str, Any]) -> dict[str, str]:
        """Return the metadata for programs that list files; empty if there is none."""
        return {}


class Contents(NamedTuple):
    """What a single file contains."""

    vae: bool = True
    text_encoders: bool = False
    pad_blocks: bool = True


@dataclass(frozen=True)
class Conversion:
    """The written path, and notes for its user."""

    path: Path
    notes: tuple[str, ...]


class SingleFiles(ABC):
    """The single file of a model, in the layout that other programs read."""

    @abstractmethod
    def write(self, folder: Path, out: Path, contents: Contents) -> Conversion:
        """Write a complete diffusers folder as the file ``out``, which appears after it was compared bit for bit."""

    @abstractmethod
    def read(self, path: Path, base: Path | None, out: Path, keep_pads: bool = False) -> Conversion:
        """Write a single file as the diffusers folder ``out``; parts that it lacks come from the folder ``base``."""

    @abstractmethod
    def write_denoiser(self, path: Path, folder: Path) -> Path:
        """Write the denoiser of a single file as a new diffusers folder, and return it."""

    @abstractmethod
    def padding_of(self, path: Path) -> Padding | None:
        """Return how a single file written here is padded; None if it is not."""

    @abstractmethod
    def needed_padding(self, config: Mapping[str, Any]) -> Padding | None:
        """Return the padding that readers need of the single file of a denoiser config; None if they need none."""


@dataclass(frozen=True)
class CustomPipeline:
    """A pipeline class whose source file, which imports nothing of this package, becomes an export's `pipeline.py`.

    ``settings`` are its arguments besides the parts, which `model_index.json` stores.
    """

    kind: Any
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class CardTexts:
    """What a model card says about the denoiser, its text, and its use; ``note`` says where stock code differs.

    ``call`` is the line of code that draws with an adapter, ``guidance`` the argument of the guidance scale.
    """

    denoiser: str
    text: str
    code: str
    note: str
    loader: str
    call: str
    guidance: str = "guidance_scale"


class Files(ABC):
    """A family's files. Folders are diffusers folders, of which only the denoiser and the scheduler are written."""

    writes_scheduler: ClassVar[bool] = False
    """Whether an export's scheduler has the shift of training; otherwise it is that of the base."""
    pipeline_settings: ClassVar[tuple[str, ...]] = ()
    """The entries of `model_index.json` that only a custom pipeline has."""

    @property
    @abstractmethod
    def adapters(self) -> AdapterNames:
        """The names in adapter files."""

    @property
    def single(self) -> SingleFiles | None:
        """The family's single files; None if it has none."""
        return None

    @abstractmethod
    def missing(self, folder: Path, denoiser: bool) -> tuple[str, ...]:
        """Return the files missing from a complete folder, including its denoiser's if ``denoiser`` is true."""

    @abstractmethod
    def text_facts(self, model: ModelConfig) -> dict[str, Any]:
        """Return how texts are encoded with a [model] table, for the facts of an export."""

    @abstractmethod
    def text_policy(self, folder: Path, text: Mapping[str, Any]) -> PipelineInputs:
        """Return how a folder's pipeline must be called, given the entries ``text`` in its facts.

        What ``text`` does not say is as in the stock pipeline. Raises UserError for an invalid value.
        """

    def custom_pipeline(self, text: Mapping[str, Any]) -> CustomPipeline | None:
        """Return the pipeline of a model with this text policy; None if it is the stock one."""
        return None

    @abstractmethod
    def denoiser_inputs(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return fixed arguments of a denoiser with this config: small, drawn from a seed, equal in every process.

        ``folder`` has the encoders that it was trained with. Values are tensors, numbers and strings, or lists and
        dicts of them.
        """

    @abstractmethod
    def pipeline_inputs(self, folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """Return fixed arguments of a folder's pipeline for a small image in two steps, from encoded text."""

    @abstractmethod
    def reference_image(self, pipe: Any, inputs: Mapping[str, Any]) -> "Tensor":
        """Return the image of `pipeline_inputs` by the stock pipeline, with the denoiser as training runs it."""

    @abstractmethod
    def card(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> CardTexts:
        """Return the family's part of a model card, for a denoiser config and a text policy."""
