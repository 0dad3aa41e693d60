"""What made a cache: hashes of the frozen parts, by their files."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from sd3_light.files import atomic_unsynced_file

FINGERPRINTED_FOLDERS = (
    "vae",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
)
# scale and shift are applied on read, so that a change of them leaves the cache as it is
_VAE_ON_READ = ("scaling_factor", "shift_factor")
# a file that changed this lately may change again within one tick of its clock: its hash is not remembered
_SETTLED_NS = 2 * 10**9

Memory = dict[str, str]
"""File, size and time of change -> hash."""


def parts_fingerprint(diffusers_path: Path, memory: Path | None = None) -> dict[str, str]:
    """PART -> hash over the names and bytes of its files: configs, tokenizers, all weights and their indexes.

    With ``memory``, a JSON file, weights that have kept path, size and time of change are not read again.
    """
    known = _read_memory(memory)
    seen: Memory = {}
    found = {part: _hash_folder(diffusers_path / part, known, seen) for part in FINGERPRINTED_FOLDERS}
    if memory is not None and not seen.items() <= known.items():
        _write_memory(memory, known | seen)
    return found


def _hash_folder(folder: Path, known: Memory, seen: Memory) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".txt", ".model"):
            continue
        if folder.name == "vae" and path.name == "config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: config[key] for key in sorted(config) if key not in _VAE_ON_READ and not key.startswith("_")}
            digest.update(json.dumps(kept).encode())
            continue
        digest.update(path.name.encode())
        digest.update(bytes.fromhex(_hash_file(path, known, seen)))
    return digest.hexdigest()


def _hash_file(path: Path, known: Memory, seen: Memory) -> str:
    """The hash of a file's bytes; weights are looked up in ``known`` and noted in ``seen``."""
    stat = path.stat()  # before reading: a change meanwhile makes the note stale, never wrong
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    with open(path, "rb") as file:
        found = known.get(key) or hashlib.file_digest(file, "sha256").hexdigest()
    if path.suffix == ".safetensors" and time.time_ns() - stat.st_mtime_ns > _SETTLED_NS:
        seen[key] = found
    return found


def _read_memory(memory: Path | None) -> Memory:
    """What was noted; nothing where the file is missing or is not what `_write_memory` wrote."""
    try:
        found = {} if memory is None else json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(found, dict) and all(isinstance(text, str) and _is_hash(text) for text in found.values())
    return found if is_ours else {}


def _is_hash(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _write_memory(memory: Path, notes: Memory) -> None:
    with suppress(OSError):  # e.g. a read-only cache: the next start hashes again
        memory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_unsynced_file(memory) as temporary:
            temporary.write_text(json.dumps(notes, indent=1), encoding="utf-8")
