"""A shard keeps every field, appears whole or not at all, and a damaged one is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sd3_light.config.faults import UserError
from sd3_light.data.shards import (
    MANIFEST,
    POOLED,
    TOKENS,
    Manifest,
    Origin,
    Sample,
    ShardEntry,
    ShardReader,
    file_sha256,
    read_entry,
    read_origins,
    write_atomically,
    write_shard,
)

ENTRY = ShardEntry("a.safetensors", "32x16", (32, 32), 2, 0, 0, "", "fingerprint")
MakeShard = Callable[..., ShardEntry]
MakeSample = Callable[..., Sample]


def random_features(generator: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    """Features with ``rows`` T5 tokens: lengths may differ from caption to caption."""
    widths = {"clip_l": 4, "clip_g": 6, "t5": 12}
    tokens = {name: torch.randn(rows if name == "t5" else 3, widths[name], generator=generator) for name in TOKENS}
    return {**tokens, **{f"{name}.pooled": torch.randn(widths[name], generator=generator) for name in POOLED}}


def random_samples(variants: int = 2) -> list[Sample]:
    """Three samples: of 1, 3 and 2 captions, the second with a mask."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, captions in enumerate((1, 3, 2)):
        moments = torch.randn(variants, 8, 2, 4, generator=generator)
        mask = torch.arange(8, dtype=torch.uint8).view(2, 4) if number == 1 else None
        texts = [random_features(generator, rows=1 + at) for at in range(captions)]
        samples.append(Sample(2**62 + number, moments, texts, mask))
    return samples


def origins_of(samples: list[Sample]) -> list[Origin]:
    return [
        Origin(f"pictures#0/{at}.png", f"f{at}", 100 + at, 200, ("a red circle", "一个红色的圆")[: 1 + at % 2])
        for at in range(len(samples))
    ]


def written(folder: Path, samples: list[Sample] | None = None) -> ShardEntry:
    """A shard under ``folder/shards``."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    samples = random_samples() if samples is None else samples
    return write_shard(folder / "shards", ENTRY, samples, origins_of(samples))


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- round trip --------------------------------------------------------------------------------


def test_every_field_comes_back(tmp_path: Path) -> None:
    samples = random_samples()
    reader = ShardReader(tmp_path, written(tmp_path, samples))
    assert reader.sample_id.tolist() == [2**62, 2**62 + 1, 2**62 + 2]
    assert reader.num_variants == 2
    assert [reader.num_captions(row) for row in range(3)] == [1, 3, 2]
    for row, sample in enumerate(samples):
        for variant in (0, 1):
            assert torch.equal(reader.picture(row, variant)[0], sample.moments[variant].half())
        for number, given in enumerate(sample.captions):
            found = reader.caption(row, number)
            assert set(found) == set(given)
            assert all(torch.equal(found[name], given[name].bfloat16()) for name in given)


def test_a_mask_flips_with_its_picture_and_is_white_where_there_was_none(tmp_path: Path) -> None:
    reader = ShardReader(tmp_path, written(tmp_path))
    mask = torch.arange(8, dtype=torch.uint8).view(2, 4)
    assert torch.equal(reader.picture(1, 0)[1], mask)
    assert torch.equal(reader.picture(1, 1)[1], mask.flip(-1))
    assert torch.equal(reader.picture(0, 0)[1], torch.full((2, 4), 255, dtype=torch.uint8))


def test_without_masks_and_flips_there_are_none(tmp_path: Path) -> None:
    samples = [Sample(s.sample_id, s.moments, s.captions) for s in random_samples(variants=1)]
    reader = ShardReader(tmp_path, written(tmp_path, samples))
    assert reader.num_variants == 1
    assert reader.picture(1, 0)[1] is None


def test_the_origins_lie_beside_the_shard(tmp_path: Path) -> None:
    samples = random_samples()
    entry = written(tmp_path, samples)
    assert read_origins(tmp_path / "shards" / entry.file) == origins_of(samples)


def test_the_entry_says_what_the_file_is(tmp_path: Path) -> None:
    entry = written(tmp_path)
    path = tmp_path / "shards" / entry.file
    assert (entry.count, entry.bytes, entry.sha256) == (3, path.stat().st_size, file_sha256(path))
    assert (entry.bucket, entry.resolution, entry.directory, entry.fingerprint) == ("32x16", (32, 32), 2, "fingerprint")
    assert read_entry(tmp_path / "shards", entry.file) == entry
    assert read_entry(tmp_path / "shards", "other.safetensors") is None


def test_a_shard_explains_itself(tmp_path: Path) -> None:
    """Any safetensors reader finds bucket and fingerprint in the header, and only plain tensors."""
    entry = written(tmp_path)
    with safe_open(str(tmp_path / "shards" / entry.file), framework="np") as file:
        assert json.loads(file.metadata()["shard"]) == {"bucket": "32x16", "fingerprint": "fingerprint"}
        assert {"sample_id", "moments", "mask", "caption_start", "t5.tokens", "t5.start"} <= set(file.keys())


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    """Ten times over: what a hash map's order of chance could change shows sooner or later."""
    versions = set()
    for at in range(10):
        written(tmp_path / str(at))
        files = sorted((tmp_path / str(at) / "shards").iterdir())
        assert [path.name for path in files] == ["a.arrow", "a.json", "a.safetensors"]
        versions.add(tuple(path.read_bytes() for path in files))
    assert len(versions) == 1


# --- atomic ------------------------------------------------------------------------------------


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(UserError, match=rf"cannot write {path}: No space left"):
                write_atomically(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("survives", [0, 1, 2])
def test_a_shard_never_stands_without_its_companions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """Killed before any of its three renames, a shard's own name is not there."""
    calls, replace = 0, os.replace

    def killed(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > survives:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path)
    assert read_entry(tmp_path / "shards", ENTRY.file) is None
    monkeypatch.undo()
    assert read_entry(tmp_path / "shards", written(tmp_path).file) is not None, "the next run completes it"


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, -1], ids=["in the header", "in the last tensor"])
def test_one_wrong_bit_is_found_and_the_shard_named(tmp_path: Path, at: int) -> None:
    entry = written(tmp_path)
    path = tmp_path / "shards" / entry.file
    damage(path, at)
    with pytest.raises(UserError, match=rf"shard {path} is damaged"):
        ShardReader(tmp_path, entry)


def test_a_truncated_shard_is_found_without_hashing(tmp_path: Path) -> None:
    entry = written(tmp_path)
    path = tmp_path / "shards" / entry.file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"shard {path} is damaged"):
        ShardReader(tmp_path, entry, verify=False)


def test_a_missing_shard_is_named_with_the_remedy(tmp_path: Path) -> None:
    entry = written(tmp_path)
    path = tmp_path / "shards" / entry.file
    path.unlink()
    with pytest.raises(UserError, match=rf"shard {path} is missing; run `sd3-light cache CONFIG`"):
        ShardReader(tmp_path, entry)


# --- manifest ----------------------------------------------------------------------------------


def manifest(folder: Path) -> Manifest:
    entry = written(folder)
    return Manifest({"t5_max_length": 16, "vae": "abc"}, (entry,), entry, {"used": 3, "rejected: truncated": 1})


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    given = manifest(tmp_path)
    given.save(tmp_path)
    assert Manifest.load(tmp_path) == given


def test_a_folder_without_a_manifest_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"no cache at {tmp_path}; build it with `sd3-light cache CONFIG`"):
        Manifest.load(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    manifest(tmp_path).save(tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(UserError, match="has format 2, this version reads 1"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"format": 1, "sha', b"[]", b'"text"', b"\xff\xfe{}", b'{"format": 1}', b'{"format": 1, "shards": [{}]}'],
    ids=["empty", "cut", "list", "text", "not utf-8", "without shards", "a shard without fields"],
)
def test_a_damaged_manifest_is_the_users_fault_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path / MANIFEST} is damaged .*--regenerate_cache"):
        Manifest.load(tmp_path)
