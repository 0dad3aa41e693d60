"""The files of a complete SD3 folder in diffusers' layout, and the shapes in its config files. Weights are not read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.inputs import is_inner_path
from sd3_light.model.part_configs import WEIGHTS_STEM, read_config, read_json
from sd3_light.tensor_file import DTYPES, StoredTensor, open_tensors

CLIP_TOKENS = 77  # default of CLIP tokenizers whose config names no length
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model")
_UNLIMITED = 10**6  # transformers writes larger lengths for "no limit"


@dataclass(frozen=True)
class TextShape:
    """Rows and widths of one caption's features from the three text encoders.

    With ``real`` a caption has as many rows as tokens, and the rows given here are the maximum.
    """

    clip_tokens: int
    t5_tokens: int
    clip_l_width: int
    clip_g_width: int
    t5_width: int
    pooled_width: int
    real: bool = False

    @property
    def at_most(self) -> str:
        """The prefix of formulas that hold for the longest caption."""
        return "at most " if self.real else ""

    @property
    def tokens(self) -> int:
        """Text tokens that the denoiser sees: CLIP's, then T5's."""
        return self.clip_tokens + self.t5_tokens

    @property
    def clip_width(self) -> int:
        """Width of both CLIP encoders' features side by side."""
        return self.clip_l_width + self.clip_g_width


@dataclass(frozen=True)
class FolderPart:
    """One part of the folder: at least one of the files ``any_of``, and for a model the stem of its weight files."""

    name: str
    any_of: tuple[str, ...]
    weights: str | None = None

    def missing(self, folder: Path) -> Iterator[str]:
        """Yield the missing files, as paths relative to ``folder``."""
        part = folder / self.name
        if not any((part / file).is_file() for file in self.any_of):
            yield " or ".join(f"{self.name}/{file}".removeprefix("./") for file in self.any_of)
        if self.weights is not None:
            yield from (f"{self.name}/{file}".removeprefix("./") for file in missing_weights(part, self.weights))


TEXT_ENCODER_FOLDERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZER_FOLDERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
WORK = "training"
"""The working folder of `sd3-light parts` in the folder that it writes."""
JUDGE = "judge"
"""The folder of the judge beside the parts that `sd3-light parts` writes."""
REQUIRED_PARTS = (
    FolderPart(".", ("model_index.json",)),
    FolderPart("vae", ("config.json",), WEIGHTS_STEM),
    *(FolderPart(name, ("config.json",), "model") for name in TEXT_ENCODER_FOLDERS),
    *(FolderPart(name, _TOKENIZER_FILES) for name in TOKENIZER_FOLDERS),
    FolderPart("scheduler", ("scheduler_config.json",)),
)
TRANSFORMER = FolderPart("transformer", ("config.json",), WEIGHTS_STEM)
FROZEN = ("vae", *TEXT_ENCODER_FOLDERS, *TOKENIZER_FOLDERS)
CONFIGURED_PARTS = ("vae", *TEXT_ENCODER_FOLDERS, "scheduler")


def missing_parts(folder: Path, transformer: bool) -> tuple[str, ...]:
    """Return the files missing from a complete SD3 folder, including its denoiser if ``transformer`` is true."""
    parts = (*REQUIRED_PARTS, TRANSFORMER) if transformer else REQUIRED_PARTS
    return tuple(file for part in parts for file in part.missing(folder))


def components(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the parts that `model_index.json` names: part -> (library, class), without those that are empty."""
    index = read_json(folder / "model_index.json")
    kinds = {name: kind for name, kind in index.items() if _is_part(kind) and kind != [None, None]}
    for name, kind in kinds.items():
        is_name = is_inner_path(name) and Path(name).name == name
        if not is_name or len(kind) != 2 or not all(isinstance(word, str) for word in kind):
            raise UserError(
                f"{folder / 'model_index.json'} has {name[:80]!r} {kind!r:.80}, which is not a part with its library "
                "and class; download or export the folder again"
            )
    return {name: (kind[0], kind[1]) for name, kind in kinds.items()}


def pipeline_settings(folder: Path) -> dict[str, Any]:
    """Return the arguments of the pipeline's class in `model_index.json` that are not parts."""
    index = read_json(folder / "model_index.json")
    return {name: value for name, value in index.items() if not name.startswith("_") and not _is_part(value)}


def _is_part(value: Any) -> bool:
    """Return whether an entry of `model_index.json` is a part; a setting may be a list of numbers."""
    return isinstance(value, list) and not (value and all(type(item) in (int, float) for item in value))


def is_encoder(library: str, kind: str) -> bool:
    """Return whether a component is a transformers model, not a tokenizer or a processor."""
    return library == "transformers" and not any(word in kind for word in ("Tokenizer", "Processor", "Extractor"))


def missing_components(folder: Path, transformer: bool) -> tuple[str, ...]:
    """Return the files missing from a folder by its `model_index.json`, those of its denoiser only if asked for."""
    if not (folder / "model_index.json").is_file():
        return ("model_index.json",)
    kinds = components(folder)
    parts = [_component(name, *kinds[name]) for name in kinds if transformer or name != TRANSFORMER.name]
    return tuple(file for part in parts for file in part.missing(folder))


def _component(name: str, library: str, kind: str) -> FolderPart:
    if name == "scheduler":
        return FolderPart(name, ("scheduler_config.json",))
    if library == "diffusers":
        return FolderPart(name, ("config.json",), WEIGHTS_STEM)
    if is_encoder(library, kind):
        return FolderPart(name, ("config.json",), "model")
    return FolderPart(name, (*_TOKENIZER_FILES, "tokenizer_config.json", "preprocessor_config.json"))


def is_unfinished(folder: Path) -> bool:
    """Whether `sd3-light parts` has begun to write a folder and not yet written all of its parts."""
    return (folder / WORK).is_dir() and bool(missing_parts(folder, transformer=False))


def check_configs(folder: Path) -> None:
    """Raise a UserError for the first JSON file of the frozen parts that its readers would fail on."""
    for part in REQUIRED_PARTS:
        for path in sorted((folder / part.name).glob("*.json")) if part.name != "." else ():
            read_json(path)
    for name in CONFIGURED_PARTS:
        if any((folder / name / file).is_file() for file in ("config.json", "scheduler_config.json")):
            read_config(folder / name, name)


def missing_denoiser(folder: Path) -> tuple[str, ...]:
    """Return the files missing from a denoiser folder."""
    return tuple(FolderPart(".", ("config.json",), WEIGHTS_STEM).missing(folder))


def missing_weights(folder: Path, stem: str) -> Iterator[str]:
    """Yield the missing safetensors files: the one of that stem, or those that its index names."""
    yield from (file.name for file in weight_files(folder, stem) if not file.is_file())


def weight_files(folder: Path, stem: str) -> list[Path]:
    """Return the safetensors files of a model, existing or not: the one of that stem, or those that its index names."""
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(is_inner_path, weight_map.values())):
        raise UserError(f"{index} has no weight_map of file names in its folder; download or write the folder again")
    if not weight_map:
        raise UserError(f"{index} names no file; download or write the folder again")
    return [folder / name for name in sorted(set(weight_map.values()))]


def text_shape(folder: Path, t5_max_length: int, real: bool = False) -> TextShape:
    """Return the shape of the text features of a folder's encoders; missing keys have transformers' defaults."""
    clip_l, clip_g, t5 = (read_config(folder / name, name) for name in TEXT_ENCODER_FOLDERS)
    return TextShape(
        clip_tokens=tokenizer_length(folder / "tokenizer") or CLIP_TOKENS,
        t5_tokens=t5_max_length,
        clip_l_width=int(clip_l.get("hidden_size", 512)),
        clip_g_width=int(clip_g.get("hidden_size", 512)),
        t5_width=int(t5.get("d_model", 512)),
        pooled_width=int(clip_l.get("projection_dim", 512)) + int(clip_g.get("projection_dim", 512)),
        real=real,
    )


def tokenizer_length(folder: Path) -> int | None:
    """Return the maximum length in a tokenizer's config; None if there is none."""
    path = folder / "tokenizer_config.json"
    length = read_json(path).get("model_max_length") if path.is_file() else None
    if not isinstance(length, int | float) or length >= _UNLIMITED:
        return None
    if not length >= 1:
        raise UserError(f"{path} has model_max_length {length}, which is not a length; download the folder again")
    return int(length)


def clip_positions(folder: Path) -> int:
    """Return the maximum input length of both CLIP encoders."""
    configs = (read_config(folder / name, name) for name in TEXT_ENCODER_FOLDERS[:2])
    return min(int(config.get("max_position_embeddings", CLIP_TOKENS)) for config in configs)


def vae_shape(folder: Path) -> tuple[int, int]:
    """Return the VAE's latent channels, and the pixels per latent pixel in each direction."""
    config = read_config(folder / "vae", "vae")
    return int(config.get("latent_channels", 4)), 2 ** (len(config.get("block_out_channels", [64])) - 1)


def stored_weights(part: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, number of values) of all tensors of a part such as `vae`, from the headers of its files."""
    return ((name, math.prod(tensor.shape)) for name, tensor in _stored_tensors(part))


def count_converted(part: Path, dtype: str) -> int:
    """Return the number of a part's weights that are stored in another dtype; the others are read from mapped files."""
    tensors = (tensor for _, tensor in _stored_tensors(part))
    return sum(math.prod(tensor.shape) for tensor in tensors if DTYPES[tensor.dtype].torch_name != dtype)


def count_weights(folder: Path) -> dict[str, int]:
    """Return the number of weights of each part that `model_index.json` names, from the headers of its files."""
    return {name: sum(count for _, count in stored_weights(folder / name)) for name in components(folder)}


def _stored_tensors(part: Path) -> Iterator[tuple[str, StoredTensor]]:
    for path in (*weight_files(part, "model"), *weight_files(part, WEIGHTS_STEM)):
        if path.is_file():
            yield from open_tensors(path)[0].items()
