"""Fingerprints of weights that are cheap enough for every image: of samples of each file, and of all configs."""

import hashlib
from functools import lru_cache
from pathlib import Path

from sd3_light.inputs import open_regular

_BLOCKS = 256
_BLOCK_BYTES = 4096
_DIGITS = 16
_PARTS = ("transformer", "text_encoder*", "vae", "scheduler")
_SUFFIXES = (".safetensors", ".json")


def model_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a diffusers folder: of the configs and weights of its parts."""
    digest = hashlib.sha256()
    for path in sorted(path for part in _PARTS for path in folder.glob(f"{part}/*") if path.suffix in _SUFFIXES):
        digest.update(f"{path.relative_to(folder)} {file_fingerprint(path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:_DIGITS]


def file_fingerprint(path: Path) -> str:
    """Return the fingerprint of a file: of its size, and of its bytes up to 1 MiB, spread evenly in larger files.

    Trained weights differ everywhere. A change of a few numbers of a large file may not be seen.
    """
    status = path.stat()
    return _fingerprint(path, status.st_size, status.st_mtime_ns)


@lru_cache(4096)
def _fingerprint(path: Path, size: int, _version: int) -> str:
    digest = hashlib.sha256(f"{size} ".encode())
    with open_regular(path) as file:
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.read(_BLOCKS * _BLOCK_BYTES))
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:_DIGITS]
