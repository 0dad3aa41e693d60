"""Fingerprints of the encoders that made a cache: one hash per subfolder of the model folder."""

import hashlib
import json
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sd3_light.files import atomic_unsynced_file
from sd3_light.inputs import open_regular, read_json_file
from sd3_light.model.part_configs import read_config

# normalisation is applied on read: changing it does not invalidate a cache
_VAE_ON_READ = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
# a file modified this recently may change again without a new modification time: its hash is not remembered
_SETTLED_NS = 2 * 10**9

Hashes = dict[str, str]
"""File path, size and modification time -> hash."""


def parts_fingerprint(diffusers_path: Path, folders: Iterable[str], memo: Path | None = None) -> dict[str, str]:
    """Return subfolder -> hash of the names and bytes of its configs, tokenizer files and weights.

    ``memo`` is a JSON file of known hashes: weights with the same path, size and modification time are not read again.
    """
    known = _read_memo(memo)
    used: Hashes = {}
    fingerprints = {name: _hash_folder(diffusers_path / name, known, used) for name in folders}
    if memo is not None and not used.items() <= known.items():
        _write_memo(memo, known | used)
    return fingerprints


def _hash_folder(folder: Path, known: Hashes, used: Hashes) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".txt", ".model"):
            continue
        if folder.name == "vae" and path.name == "config.json":
            config = read_config(folder, "vae")
            hashed = {key: config[key] for key in sorted(config) if key not in _VAE_ON_READ and not key.startswith("_")}
            digest.update(json.dumps(hashed).encode())
            continue
        digest.update(path.name.encode())
        digest.update(bytes.fromhex(_hash_file(path, known, used)))
    return digest.hexdigest()


def _hash_file(path: Path, known: Hashes, used: Hashes) -> str:
    """Return the hash of a file's bytes; the hashes of weights are looked up in ``known`` and added to ``used``."""
    stat = path.stat()  # before reading: a change in between makes the entry stale, never wrong
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    with open_regular(path) as file:
        digest = known.get(key) or hashlib.file_digest(file, "sha256").hexdigest()
    if path.suffix == ".safetensors" and time.time_ns() - stat.st_mtime_ns > _SETTLED_NS:
        used[key] = digest
    return digest


def _read_memo(memo: Path | None) -> Hashes:
    """Return the known hashes; none if the file is missing or invalid."""
    try:
        hashes = {} if memo is None else read_json_file(memo)
    except (OSError, ValueError):
        return {}
    values = hashes.values() if isinstance(hashes, dict) else [None]
    valid = all(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in values)
    return hashes if valid else {}


def _write_memo(memo: Path, hashes: Hashes) -> None:
    with suppress(OSError):  # e.g. a read-only cache: the next start hashes again
        memo.parent.mkdir(parents=True, exist_ok=True)
        with atomic_unsynced_file(memo) as temporary:
            temporary.write_text(json.dumps(hashes, indent=1), encoding="utf-8")
