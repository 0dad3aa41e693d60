"""The identity of a cache: everything that determines a sample's features besides the sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd3_light.config import DatasetConfig, ModelConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.columns import SMALLEST, TEACHER, Bucket, Column, with_pairs
from sd3_light.core.registry import family_of
from sd3_light.data.manifest import CACHE_FORMAT, MANIFEST, Manifest
from sd3_light.data.store import private_temp_folder
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.encoding.fingerprint import parts_fingerprint
from sd3_light.model.vision import cached_columns, vision_settings
from sd3_light.runlog import info
from sd3_light.sources.preprocess import PREPROCESS_VERSION

_DEFAULTS = {"vae_dtype": "auto"}  # of keys that an identity may lack


def make_identity(model: ModelConfig, memo: Path | None = None) -> dict[str, Any]:
    """Return everything that determines a sample's features besides the sample; ``memo`` is a file of known hashes.

    ``columns`` has the fingerprint of each column; the other keys say in words what decides them.
    """
    family = family_of(model)
    parts = parts_fingerprint(model.diffusers_path, family.encoding.folders, memo)
    if model.teacher_path is not None:
        folder = vision_settings(model.teacher_path).folder
        parts[TEACHER] = parts_fingerprint(folder.parent, [folder.name], memo)[folder.name]
    return {
        "format": CACHE_FORMAT,
        "preprocess": PREPROCESS_VERSION,
        **family.encoding.text_settings(model),
        "dtype": model.dtype,
        # precisions that `auto` chooses differ by less than the latents' own noise
        **({} if model.vae_dtype == "auto" else {"vae_dtype": model.vae_dtype}),
        **parts,
        "columns": column_fingerprints(model, parts),
    }


def column_fingerprints(model: ModelConfig, parts: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprint of each column; ``parts`` are the hashes of the model's subfolders.

    Text encoders of every family compute in `dtype` on GPUs, so it decides the columns of captions. It is the dtype
    that the config asks for: CPUs compute in float32 whatever it says, and a cache continues on every device.
    """
    return {
        column.name: column.fingerprint(parts, {"dtype": model.dtype} if column.per_caption else {})
        for column in stored_columns(model)
    }


def stored_columns(model: ModelConfig, bucket: Bucket = SMALLEST) -> tuple[Column, ...]:
    """Return the columns that a cache may store of the images of a bucket."""
    return with_pairs(cached_columns(model, bucket))


def decides_shards(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of an identity decides the bytes of a shard, besides its samples."""
    return {key: identity[key] for key in ("format", "columns") if key in identity}


def is_remote(dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Return whether the cache is at a URL. Such a cache must match the config's encoders and is used as it is."""
    url = dataset.cache_dir
    if isinstance(url, Path):
        return False
    folder = train.stream_cache_dir or private_temp_folder(url)
    hint = "correct [model], or build the cache again with `sd3-light cache CONFIG`"
    _require(url, load_remote_manifest(url, folder), train, folder / "parts.json", hint)
    info(f"using the cache at {url} as it is")
    return True


def is_trusted(dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Return whether a local cache has a manifest. It must match the config's encoders."""
    folder = dataset.cache_dir
    if not isinstance(folder, Path) or not (folder / MANIFEST).is_file():
        return False
    hint = "run without --trust-cache to encode it again"
    _require(str(folder), Manifest.load(folder), train, folder / "parts.json", hint)
    return True


def _require(location: str, manifest: Manifest, train: TrainConfig, memo: Path, hint: str) -> None:
    """Raise a UserError if a cache was built with settings or encoders other than the config's."""
    expected = make_identity(train.model, memo)
    hashes = {*family_of(train.model).encoding.folders, TEACHER, "columns"}
    for key in dict.fromkeys((*expected, *manifest.recipe)):
        value, built = (identity.get(key, _DEFAULTS.get(key)) for identity in (expected, manifest.recipe))
        if built != value:
            is_known = key in {*expected, *_DEFAULTS} - hashes
            other = "other columns" if key == "columns" else f"another {key}"
            difference = f"{key} = {built!r}, the config says {value!r}" if is_known else other
            raise UserError(f"{location} was built with {difference}; {hint}")
