"""What made a cache: a changed part changes its own hash and no other."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sd3_light.encoders.fingerprint import FINGERPRINTED_FOLDERS, parts_fingerprint


@pytest.fixture
def parts(tmp_path: Path, demo_parts: Path) -> Path:
    return Path(shutil.copytree(demo_parts, tmp_path / "model"))


def changed(before: dict[str, str], folder: Path) -> set[str]:
    after = parts_fingerprint(folder)
    assert set(after) == set(FINGERPRINTED_FOLDERS)
    return {part for part in FINGERPRINTED_FOLDERS if before[part] != after[part]}


def test_a_copy_is_the_same(parts: Path, demo_parts: Path) -> None:
    assert parts_fingerprint(parts) == parts_fingerprint(demo_parts)


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder_2", "model.safetensors"),
        ("tokenizer_3", "tokenizer.json"),
        ("text_encoder", "config.json"),
    ],
)
def test_one_byte_changes_its_part_alone(parts: Path, part: str, file: str) -> None:
    before = parts_fingerprint(parts)
    path = parts / part / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert changed(before, parts) == {part}


def test_scale_and_shift_are_applied_on_read_and_change_nothing(parts: Path) -> None:
    before = parts_fingerprint(parts)
    path = parts / "vae" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "scaling_factor": 9.0, "shift_factor": 1.0, "_name": "x"}))
    assert changed(before, parts) == set()
    path.write_text(json.dumps({**config, "norm_num_groups": 1}))
    assert changed(before, parts) == {"vae"}


def test_an_index_and_every_file_of_sharded_weights_count(parts: Path) -> None:
    folder = parts / "text_encoder_3"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (folder / "model.safetensors.index.json").write_text("{}")
    before = parts_fingerprint(parts)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"less")
    assert changed(before, parts) == {"text_encoder_3"}
    before = parts_fingerprint(parts)
    (folder / "model.safetensors.index.json").write_text("{ }")
    assert changed(before, parts) == {"text_encoder_3"}


def test_files_that_no_one_loads_do_not_count(parts: Path) -> None:
    before = parts_fingerprint(parts)
    (parts / "vae" / "README.md").write_text("hello")
    assert changed(before, parts) == set()


# --- the memory of hashes ------------------------------------------------------------------------


@pytest.fixture
def settled(parts: Path) -> Path:
    """The parts with files that did not change lately."""
    for path in parts.rglob("*.safetensors"):
        os.utime(path, ns=(10**18, 10**18))
    return parts


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that are read to be hashed."""
    seen: list[str] = []
    digest = hashlib.file_digest

    def spy(file: Any, kind: str) -> Any:
        seen.extend([Path(file.name).parent.name] if file.name.endswith(".safetensors") else [])
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", spy)
    return seen


WEIGHTS = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]


def test_weights_are_read_once(settled: Path, tmp_path: Path, hashed: list[str]) -> None:
    memory = tmp_path / "new" / "hashes.json"
    first = parts_fingerprint(settled, memory)
    assert first == parts_fingerprint(settled)
    assert hashed == WEIGHTS * 2
    assert parts_fingerprint(settled, memory) == first
    assert hashed == WEIGHTS * 2
    assert [path.name for path in memory.parent.iterdir()] == ["hashes.json"], "no temporary file stays"


@pytest.mark.parametrize("change", ["time", "size", "place"])
def test_what_changed_is_read_again(settled: Path, tmp_path: Path, hashed: list[str], change: str) -> None:
    memory = tmp_path / "hashes.json"
    before = parts_fingerprint(settled, memory)
    hashed.clear()
    path = settled / "vae" / "diffusion_pytorch_model.safetensors"
    if change == "place":
        assert parts_fingerprint(Path(shutil.copytree(settled, tmp_path / "copy")), memory) == before
        assert hashed == WEIGHTS
        return
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data + b"0" * (change == "size"))
    os.utime(path, ns=(10**18, 10**18 + (change == "time")))
    after = parts_fingerprint(settled, memory)
    assert {part for part in FINGERPRINTED_FOLDERS if before[part] != after[part]} == {"vae"}
    assert hashed == ["vae"]


def test_a_file_that_changed_just_now_is_not_remembered(parts: Path, tmp_path: Path, hashed: list[str]) -> None:
    """A second change within one tick of the disk's clock would go unnoticed."""
    for path in parts.rglob("*.safetensors"):
        path.touch()
    parts_fingerprint(parts, tmp_path / "hashes.json")
    parts_fingerprint(parts, tmp_path / "hashes.json")
    assert hashed == WEIGHTS * 2


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": "zz"}', "\ud800"], ids=repr)
def test_an_unreadable_memory_is_ignored_and_written_anew(
    settled: Path, tmp_path: Path, hashed: list[str], text: str
) -> None:
    memory = tmp_path / "hashes.json"
    memory.write_bytes(text.encode("utf-8", "surrogatepass"))
    first = parts_fingerprint(settled, memory)
    assert parts_fingerprint(settled, memory) == first == parts_fingerprint(settled)
    assert hashed == WEIGHTS * 2


def test_a_memory_that_cannot_be_written_costs_time_only(settled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert parts_fingerprint(settled, tmp_path / "file" / "hashes.json") == parts_fingerprint(settled)
