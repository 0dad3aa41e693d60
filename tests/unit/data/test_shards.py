"""Shards and manifests: round trips and atomic writes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.feather as feather
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sd3_light.data import shards as module
from sd3_light.data.manifest import CACHE_FORMAT, MANIFEST, Manifest, ShardEntry, read_entry
from sd3_light.data.shards import Origin, ShardContent, read_origins, write_shard
from sd3_light.files import file_sha256
from tests.refusals import refused
from tests.unit.data.conftest import toy_content

ENTRY = ShardEntry("a.safetensors", "32x16", (32, 32), "images#0", 0, 0, "", "fingerprint")
IDS = (2**62, 1, 2**63 - 1)
ORIGINS = [
    Origin("images#0/0.png", "f0", 100, 200, ("a red circle",), image='["0.png"]'),
    Origin(
        "images#0/1.png", "f1", 101, 200, ("a red circle", "一个红色的圆"), image='["x.tar",512,99]', mask='["m.png"]'
    ),
    Origin("images#0/子/2.png", "f2", 102, 200, ("",)),
]


@pytest.fixture
def content() -> ShardContent:
    made = toy_content((3, 1, 7), captions=2, variants=2, mask=True, real=True)
    return replace(made, sample_id=torch.tensor(IDS))


def written(folder: Path, content: ShardContent) -> ShardEntry:
    folder.mkdir(parents=True, exist_ok=True)
    return write_shard(folder, ENTRY, content, ORIGINS)


def test_the_precision_is_recorded_unless_it_is_float32(tmp_path: Path, content: ShardContent) -> None:
    for vae_dtype, expected in (("float32", None), ("float16", "float16")):
        entry = write_shard(tmp_path, ENTRY, content, ORIGINS, vae_dtype)
        with safe_open(tmp_path / entry.file, "pt") as file:
            assert json.loads(file.metadata()["shard"]).get("vae_dtype") == expected


def test_every_tensor_round_trips(tmp_path: Path, content: ShardContent) -> None:
    entry = written(tmp_path, content)
    path = tmp_path / entry.file
    tensors = load_file(path)
    encoders = {f"{name}.{kind}" for name in ("clip_l", "clip_g", "t5") for kind in ("tokens", "start")}
    encoders |= {"clip_l.pooled", "clip_g.pooled"}
    assert set(tensors) == {"sample_id", "moments", "mask", "caption_start", "caption"} | encoders
    for name, tensor in content.tensors().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert tensors["sample_id"].tolist() == list(IDS), "including the largest id"
    assert tensors["moments"].dtype == torch.float16
    assert tensors["t5.tokens"].dtype == torch.bfloat16
    assert (entry.count, entry.bytes, entry.sha256) == (3, path.stat().st_size, file_sha256(path))
    assert replace(entry, count=0, bytes=0, sha256="") == ENTRY
    assert read_entry(tmp_path, entry.file) == entry
    assert read_entry(tmp_path, "other.safetensors") is None
    assert read_origins(path) == ORIGINS
    assert feather.read_table(path.with_suffix(".arrow"), columns=["sample_id"])["sample_id"].to_pylist() == list(IDS)
    with safe_open(str(path), framework="np") as file:
        about = json.loads(file.metadata()["shard"])
    text = {name: {"reads": "caption", "ragged": True} for name in ("clip_l", "clip_g", "t5")}
    text |= {name: {"reads": "caption"} for name in ("clip_l.pooled", "clip_g.pooled")}
    columns = {"moments": {"reads": "image"}, "mask": {"reads": "mask"}, **text}
    assert about == {"bucket": "32x16", "fingerprint": "fingerprint", "columns": columns}
    assert list(about["columns"]) == list(columns), "in the declared order"
    written(tmp_path / "again", content)
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["a.arrow", "a.json", "a.safetensors"]
    for again in (tmp_path / "again").iterdir():
        assert again.read_bytes() == (tmp_path / again.name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(more=torch.zeros(3)),
        lambda values: values.pop("t5.start"),
        lambda values: values.update({"clip_l.pooled": values["clip_l.pooled"].float()}),
        lambda values: values.update({"moments": values["moments"].mT}),
        lambda values: values.update({"t5.start": torch.tensor([0, 6, 6, 6, 6, 6, 8])}),
    ],
    ids=["unknown", "missing", "dtype", "shape", "too long"],
)
def test_a_shard_has_the_tensors_of_its_columns(tmp_path: Path, content: ShardContent, change: Any) -> None:
    values = dict(content.values)
    change(values)
    with pytest.raises(AssertionError):
        written(tmp_path, replace(content, values=values))
    assert os.listdir(tmp_path) == []
    with pytest.raises(AssertionError):
        write_shard(tmp_path, ENTRY, content, ORIGINS[:2])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("survives", [0, 1, 2])
def test_a_killed_write(tmp_path: Path, content: ShardContent, monkeypatch: pytest.MonkeyPatch, survives: int) -> None:
    """A process killed before any of the three renames leaves no shard file."""
    calls, real = 0, os.replace

    def killed(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > survives:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, content)
    assert not (tmp_path / ENTRY.file).exists()
    assert read_entry(tmp_path, ENTRY.file) is None
    monkeypatch.undo()
    entry = written(tmp_path, content)
    assert read_entry(tmp_path, entry.file) == entry, "the next run completes it"


def test_a_full_disk_is_reported(tmp_path: Path, content: ShardContent, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = Mock(side_effect=module.SafetensorError("I/O error: No space left on device"))
    monkeypatch.setattr("safetensors.torch.save_file", no_room)
    refused(rf"cannot write {tmp_path / 'a.safetensors'}: .*No space left", written, tmp_path, content)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def manifest(tmp_path: Path, content: ShardContent) -> Manifest:
    entry = written(tmp_path / "shards", content)
    return Manifest(
        {"t5_max_length": 16, "vae": "abc"},
        (entry, replace(entry, file="b.safetensors", resolution=(96, 64))),
        entry,
        {"used": 3, "rejected: truncated": 1},
        {"directory:images#0": "/somewhere/图片"},
    )


def test_manifest_round_trips_atomically(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(rf"no cache at {tmp_path}; build it with `sd3-light cache CONFIG`", Manifest.load, tmp_path)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == Manifest.from_json((tmp_path / MANIFEST).read_bytes(), "there") == manifest
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    refused("cannot write", replace(manifest, shards=()).save, tmp_path)
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize("other", [2, 4, CACHE_FORMAT + 1])
def test_another_format_is_rejected(tmp_path: Path, manifest: Manifest, other: int) -> None:
    manifest.save(tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**data, "format": other}))
    line = f"has format {other}, this version reads {CACHE_FORMAT}; `sd3-light cache CONFIG` encodes it again"
    refused(line, Manifest.load, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"format": 5, "sha', b"[]", b'"text"', b"\xff\xfe{}", b'{"format": 5}'),
        *(b'{"format": 5, "shards": [{}]}', b'{"format": 5, "shards": [{"colour": 1}]}'),
        *(b"[" * 100_000 + b"]" * 100_000, b"5", b'{"format": 5, "shards": ' + b"9" * 6000 + b"}"),
    ],
)
def test_a_damaged_manifest_is_reported(tmp_path: Path, content: bytes) -> None:
    assert CACHE_FORMAT == 5
    (tmp_path / MANIFEST).write_bytes(content)
    refused(rf"{tmp_path / MANIFEST} is damaged .*`sd3-light cache CONFIG` writes it again", Manifest.load, tmp_path)
    refused(r"s3://there is damaged", Manifest.from_json, content, "s3://there")


def test_damaged_offsets_of_the_origins_are_an_error_not_a_crash(tmp_path: Path) -> None:
    columns = {"key": pa.array(["x" * 777]), "captions": pa.array([["a"]])}
    columns |= {name: pa.array([1]) for name in ("width", "height")}
    columns |= {name: pa.array([""]) for name in ("image_fingerprint", "mask_fingerprint", "image", "mask")}
    path = tmp_path / "x.arrow"
    feather.write_feather(pa.table(columns), str(path), compression="uncompressed")
    end, far = (777).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little")
    before, offsets, after = path.read_bytes().rpartition(bytes(4) + end)  # the first match is the buffer's length
    assert offsets
    path.write_bytes(before + bytes(4) + far + after)
    with pytest.raises(pa.ArrowInvalid):
        read_origins(tmp_path / "x.safetensors")
