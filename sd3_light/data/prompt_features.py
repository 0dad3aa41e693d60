"""Text features of the config's prompts, stored in the cache so that training needs no text encoder.

    <cache>/prompts/DIGEST.safetensors   one prompt: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width], bf16

The name is a hash of the prompt and everything that determines its features, so a changed prompt, encoder or setting
gives another file. Prompts are encoded one at a time, so they do not affect each other.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.config.base import CacheLocation
from sd3_light.core.encoding import Encoders
from sd3_light.core.registry import family_of
from sd3_light.files import write_atomically
from sd3_light.inputs import parse_json, read_limited
from sd3_light.tensor_file import read_header
from sd3_light.urls import RemoteNotFound, remote_filesystem

PROMPTS_FOLDER = "prompts"
PromptFeatures = dict[str, Tensor]

_FORMAT = 1
_OF_IMAGES = (
    "format",
    "preprocess",
    "vae",
    "vae_dtype",
    "teacher",
    "columns",
)  # keys of an identity that do not decide a text


def prompt_file(prompt: str, identity: Mapping[str, Any]) -> str:
    """Return the name of a prompt's file in `PROMPTS_FOLDER`, given the cache's identity."""
    of_texts = {key: value for key, value in identity.items() if key not in _OF_IMAGES}
    inputs = {"format": _FORMAT, "prompt": prompt, **of_texts}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    return f"{digest.hexdigest()[:32]}.safetensors"


def write_prompt(cache: Path, prompt: str, identity: Mapping[str, Any], features: PromptFeatures) -> None:
    """Write a prompt's features to a cache folder atomically."""
    folder = cache / PROMPTS_FOLDER
    folder.mkdir(exist_ok=True)
    about = {"prompt": prompt, "sha256": _values_sha256(save(features))}
    write_atomically(folder / prompt_file(prompt, identity), save(features, {"about": json.dumps(about)}))


def read_prompt(cache: CacheLocation, prompt: str, identity: Mapping[str, Any]) -> PromptFeatures | None:
    """Read a prompt's features from a cache folder or URL; None if they are missing or damaged."""
    name = f"{PROMPTS_FOLDER}/{prompt_file(prompt, identity)}"
    try:
        if isinstance(cache, Path):
            return _parse(read_limited(cache / name))
        with remote_filesystem(f"{cache}/{name}") as (files, path):
            return _parse(files.cat_file(path))
    except (FileNotFoundError, RemoteNotFound):
        return None


def _parse(data: bytes) -> PromptFeatures | None:
    try:
        about = parse_json(read_header(BytesIO(data)).metadata["about"])
        return load(data) if about["sha256"] == _values_sha256(data) else None
    except (SafetensorError, ValueError, LookupError, TypeError):  # truncated, or not written by `write_prompt`
        return None


def _values_sha256(data: bytes) -> str:
    """Return the hash of the tensor values in a safetensors file."""
    return hashlib.sha256(data[read_header(BytesIO(data)).start :]).hexdigest()


def has_prompt(cache: CacheLocation, prompt: str, identity: Mapping[str, Any]) -> bool:
    """Return whether a cache has a prompt's features; those in a folder are not read."""
    if isinstance(cache, Path):
        return (cache / PROMPTS_FOLDER / prompt_file(prompt, identity)).is_file()
    return read_prompt(cache, prompt, identity) is not None


def encode_prompts(encoders: Encoders, prompts: Sequence[str], names: Iterable[str]) -> list[PromptFeatures]:
    """Encode prompts with the named text encoders, as captions are encoded for the cache."""
    tokens = [encoders.tokenize([prompt]) for prompt in prompts]
    results: list[PromptFeatures] = [{} for _ in prompts]
    for name in names:  # in the outer loop: perhaps only one of them fits on the device
        for features, ids in zip(results, tokens, strict=True):
            features |= encoders.encode_text(name, ids[name])
    encoders.synchronize()
    return [of_one_caption(features) for features in results]


def of_one_caption(features: Mapping[str, Tensor]) -> PromptFeatures:
    """Return the values of the only caption in the text tensors of a shard."""
    values: PromptFeatures = {}
    for name, tensor in features.items():
        if name.endswith(".tokens"):
            values[name.removesuffix(".tokens")] = tensor
        elif not name.endswith(".start"):
            values[name] = tensor[0]
    return values


def encode_prompts_one_by_one(model: ModelConfig, prompts: Sequence[str], device: torch.device) -> list[PromptFeatures]:
    """Like `encode_prompts`, but each encoder is loaded, used and freed before the next."""
    encoding = family_of(model).encoding
    results: list[PromptFeatures] = [{} for _ in prompts]
    for name in encoding.text_encoders:
        with encoding.encoders(model, device, 1) as encoders:
            for features, encoded in zip(results, encode_prompts(encoders, prompts, [name]), strict=True):
                features |= encoded
    return results
