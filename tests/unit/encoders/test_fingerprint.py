"""What made a cache: a changed part changes its own hash and no other."""

import json
import shutil
from pathlib import Path

import pytest

from sd3_light.encoders.fingerprint import PARTS, parts_fingerprint


@pytest.fixture
def parts(tmp_path: Path, demo_parts: Path) -> Path:
    return Path(shutil.copytree(demo_parts, tmp_path / "model"))


def changed(before: dict[str, str], folder: Path) -> set[str]:
    after = parts_fingerprint(folder)
    assert set(after) == set(PARTS)
    return {part for part in PARTS if before[part] != after[part]}


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


def test_files_that_no_one_loads_do_not_count(parts: Path) -> None:
    before = parts_fingerprint(parts)
    (parts / "vae" / "README.md").write_text("hello")
    assert changed(before, parts) == set()
