"""What made a cache: hashes of the frozen parts, by their files."""

import hashlib
import json
from pathlib import Path

PARTS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
# scale and shift are applied on read, so that a change of them leaves the cache as it is
_VAE_ON_READ = ("scaling_factor", "shift_factor")


def parts_fingerprint(diffusers_path: Path) -> dict[str, str]:
    """PART -> hash over the names and bytes of its files."""
    return {part: _hash_folder(diffusers_path / part) for part in PARTS}


def _hash_folder(folder: Path) -> str:
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
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
