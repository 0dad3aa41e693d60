"""Encoder fingerprints: a changed subfolder changes its own hash only."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sd3_light.encoding.fingerprint import parts_fingerprint
from sd3_light.families.sd3.encoding import SD3Encoding

FOLDERS = SD3Encoding.folders


@pytest.fixture
def parts(tmp_path: Path, demo_parts: Path) -> Path:
    return Path(shutil.copytree(demo_parts, tmp_path / "model"))


def changed(before: dict[str, str], folder: Path) -> set[str]:
    after = parts_fingerprint(folder, FOLDERS)
    assert set(after) == set(FOLDERS)
    return {part for part in FOLDERS if before[part] != after[part]}


def test_a_copy_has_the_same_fingerprint(parts: Path, demo_parts: Path) -> None:
    assert parts_fingerprint(parts, FOLDERS) == parts_fingerprint(demo_parts, FOLDERS)


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder_2", "model.safetensors"),
        ("tokenizer_3", "tokenizer.json"),
        ("text_encoder", "config.json"),
    ],
)
def test_one_changed_byte_changes_only_its_folder(parts: Path, part: str, file: str) -> None:
    before = parts_fingerprint(parts, FOLDERS)
    path = parts / part / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert changed(before, parts) == {part}


def test_scale_shift_and_files_that_are_not_loaded_do_not_change_the_fingerprint(parts: Path) -> None:
    before = parts_fingerprint(parts, FOLDERS)
    path = parts / "vae" / "config.json"
    config = json.loads(path.read_text())
    (parts / "vae" / "README.md").write_text("hello")
    path.write_text(json.dumps({**config, "scaling_factor": 9.0, "shift_factor": 1.0, "_name": "x"}))
    assert changed(before, parts) == set()
    path.write_text(json.dumps({**config, "norm_num_groups": 1}))
    assert changed(before, parts) == {"vae"}


def test_index_and_all_files_of_sharded_weights_are_hashed(parts: Path) -> None:
    folder = parts / "text_encoder_3"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (folder / "model.safetensors.index.json").write_text("{}")
    before = parts_fingerprint(parts, FOLDERS)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"less")
    assert changed(before, parts) == {"text_encoder_3"}
    before = parts_fingerprint(parts, FOLDERS)
    (folder / "model.safetensors.index.json").write_text("{ }")
    assert changed(before, parts) == {"text_encoder_3"}


MODIFIED_NS = 10**18


@pytest.fixture
def settled(parts: Path) -> Path:
    """The encoders, with files that were not modified recently."""
    for path in parts.rglob("*.safetensors"):
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    return parts


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose weights are read for hashing."""
    folders: list[str] = []
    digest = hashlib.file_digest

    def spy(file: Any, kind: str) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        folders.extend([path.parent.name] if path.suffix == ".safetensors" else [])
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", spy)
    return folders


WEIGHTS = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]


def test_weights_are_read_once(settled: Path, tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "new" / "hashes.json"
    first = parts_fingerprint(settled, FOLDERS, memo)
    assert first == parts_fingerprint(settled, FOLDERS)
    assert hashed == WEIGHTS * 2
    assert parts_fingerprint(settled, FOLDERS, memo) == first
    assert hashed == WEIGHTS * 2
    assert [path.name for path in memo.parent.iterdir()] == ["hashes.json"], "no temporary file is left"


@pytest.mark.parametrize("change", ["time", "size", "path"])
def test_changed_weights_are_read_again(settled: Path, tmp_path: Path, hashed: list[str], change: str) -> None:
    memo = tmp_path / "hashes.json"
    before = parts_fingerprint(settled, FOLDERS, memo)
    hashed.clear()
    path = settled / "vae" / "diffusion_pytorch_model.safetensors"
    if change == "path":
        assert parts_fingerprint(Path(shutil.copytree(settled, tmp_path / "copy")), FOLDERS, memo) == before
        assert hashed == WEIGHTS
        return
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data + b"0" * (change == "size"))
    os.utime(path, ns=(10**18, 10**18 + (change == "time")))
    after = parts_fingerprint(settled, FOLDERS, memo)
    assert {part for part in FOLDERS if before[part] != after[part]} == {"vae"}
    assert hashed == ["vae"]


@pytest.mark.parametrize(("age_seconds", "reads"), [(0, 2), (2, 2), (3, 1)])
def test_the_hash_of_a_recently_modified_file_is_not_remembered(
    settled: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, age_seconds: int, reads: int
) -> None:
    """A second change within one tick of the file system's clock would go unnoticed."""
    monkeypatch.setattr("time.time_ns", lambda: MODIFIED_NS + age_seconds * 10**9)
    parts_fingerprint(settled, FOLDERS, tmp_path / "hashes.json")
    parts_fingerprint(settled, FOLDERS, tmp_path / "hashes.json")
    assert hashed == WEIGHTS * reads


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": "zz"}', "\ud800"], ids=repr)
def test_an_invalid_memo_is_ignored_and_rewritten(settled: Path, tmp_path: Path, hashed: list[str], text: str) -> None:
    memo = tmp_path / "hashes.json"
    memo.write_bytes(text.encode("utf-8", "surrogatepass"))
    first = parts_fingerprint(settled, FOLDERS, memo)
    assert parts_fingerprint(settled, FOLDERS, memo) == first == parts_fingerprint(settled, FOLDERS)
    assert hashed == WEIGHTS * 2


def test_an_unwritable_memo_is_ignored(settled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert parts_fingerprint(settled, FOLDERS, tmp_path / "file" / "hashes.json") == parts_fingerprint(settled, FOLDERS)
