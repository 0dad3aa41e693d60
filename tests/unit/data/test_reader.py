"""Rows of a shard: the right bytes, and an error for files that are not shards."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd3_light.data.manifest import SHARDS, ShardEntry
from sd3_light.data.reader import ShardReader
from tests.refusals import refused
from tests.shards import header_of
from tests.unit.data.conftest import toy_content, toy_shard

NUMBERS = (3, 1, 7, 2)


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, ShardEntry]:
    content = toy_content(NUMBERS, captions=2, variants=2, mask=True, real=True)
    entry = toy_shard(tmp_path, "one", content)
    return tmp_path / SHARDS / entry.file, entry


def test_rows_are_what_was_written(shard: tuple[Path, ShardEntry]) -> None:
    reader = ShardReader(*shard)
    assert reader.num_variants == 2
    for row, number in enumerate(NUMBERS):
        assert reader.identity(row) == number
        assert reader.num_captions(row) == 2
        for at in range(2):
            features = reader.caption(row, at)
            counts = {"clip_l": 1 + (number + at) % 3, "clip_g": 1 + number % 2, "t5": number % 4}
            assert {name: len(features[name]) for name in counts} == counts
            for values in features.values():
                assert values.dtype == torch.bfloat16
                assert (values[..., 0] == number).all()
                assert (values[..., 1] == at).all()
            images = reader.images(row, at)
            assert images["moments"].dtype == torch.float16
            assert torch.equal(images["moments"], torch.full((4, 2, 4), 10.0 * number + at).half())
            white = [[0, 0, 255, 255]] * 2 if at else [[255, 255, 0, 0]] * 2
            assert images["mask"].tolist() == white, "mirrored with its image"


def test_a_closed_reader_leaves_no_file_open(shard: tuple[Path, ShardEntry]) -> None:
    def is_open() -> bool:
        names = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return str(shard[0].resolve()) in names

    reader = ShardReader(*shard)
    assert is_open()
    del reader
    assert not is_open()


def test_a_file_truncated_after_opening_is_an_error(shard: tuple[Path, ShardEntry]) -> None:
    reader = ShardReader(*shard)
    os.truncate(shard[0], reader.locate(3, 0, 0).fixed[0] + 8)
    refused("is truncated", reader.images, 3, 0)


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None], **about: object) -> int:
    """Change the tensors of a shard on disk and return its new size."""
    tensors = load_file(path)
    change(tensors)
    header, _ = header_of(path.read_bytes())
    facts = {**json.loads(header["__metadata__"]["shard"]), **about}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"shard": json.dumps(facts)})
    return path.stat().st_size


def set_to(name: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: by(tensors[name])})


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("t5.tokens"), "it has no t5.tokens"),
    "unknown": (lambda t: t.update(extra=torch.zeros(1)), "contains an unknown tensor 'extra'"),
    "dtype": (set_to("sample_id", torch.Tensor.int), "sample_id is I32"),
    "dimensions": (set_to("moments", lambda m: m[:, 0]), "moments is F16"),
    "count": (set_to("sample_id", lambda ids: ids[:-1]), "sample_id has 3 rows, not 4"),
    "mask dtype": (set_to("mask", torch.Tensor.int), "mask is I32"),
    "mask": (set_to("mask", lambda m: m[:, :1]), "sizes of masks and latents differ"),
    "pooled": (set_to("clip_l.pooled", lambda p: p[:-1]), "numbers of captions"),
    "captions": (set_to("caption_start", lambda s: s * 0), "caption counts are inconsistent"),
    "no caption": (set_to("caption_start", lambda s: torch.tensor([0, 0, 2, 4, 8])), "caption counts are inconsistent"),
    "outside": (set_to("caption", lambda c: c + 5), "caption index is out of range"),
    "negative": (set_to("caption", lambda c: c - 1), "caption index is out of range"),
    "tokens": (set_to("t5.start", lambda s: s.flip(0)), "t5: its token counts are inconsistent"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_unexpected_tensors_are_an_error(shard: tuple[Path, ShardEntry], kind: str) -> None:
    path, entry = shard
    change, message = CHANGES[kind]
    size = rewritten(path, change)
    text = refused("", ShardReader, path, replace(entry, bytes=size))
    assert message in text
    assert str(path) in text
    assert "run `sd3-light cache CONFIG`" in text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "'NoneType' object is not iterable"),
        ([["moments", 1]], "must be a mapping"),
        ({"moments": {}}, "reads"),
        ({"moments": {"reads": 5}}, "does not say what 'moments' reads"),
        ({"moments": {"reads": "image", "more": 1}}, "unexpected keyword argument 'more'"),
        ({"moments": {"reads": "image", "ragged": True}}, "it has no moments.tokens"),
        ({"t5": {"reads": "image", "ragged": True}}, "t5.tokens"),
        ({"sample_id": {"reads": "caption"}}, "is not a column that a shard can have"),
        ({"moments": {"reads": "mask"}}, "moments is F16"),
        ({"mask": {"reads": "image"}}, "is not a column that a shard can have"),
        ({"moments": {"reads": "image"}}, "contains an unknown tensor 'clip_g.pooled'"),
        ({"dino": {"reads": "image"}}, "it has no dino"),
    ],
)
def test_wrong_declared_columns_are_an_error(shard: tuple[Path, ShardEntry], columns: object, message: str) -> None:
    path, entry = shard
    size = rewritten(path, lambda tensors: None, columns=columns)
    fault = refused("is damaged or belongs to another cache", ShardReader, path, replace(entry, bytes=size))
    assert message in fault


def test_another_fingerprint_or_size_is_an_error(shard: tuple[Path, ShardEntry]) -> None:
    path, entry = shard
    refused("its fingerprint differs", ShardReader, path, replace(entry, fingerprint="other"))
    refused("the manifest says", ShardReader, path, replace(entry, bytes=entry.bytes + 1))


def with_header(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def shifted(header: dict[str, Any], name: str, begin: int, end: int) -> dict[str, Any]:
    first, last = header[name]["data_offsets"]
    return {**header, name: {**header[name], "data_offsets": [first + begin, last + end]}}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda h, b: (1 << 60).to_bytes(8, "little") + b, "longer than the file"),
        (lambda h, b: with_header(b"not json", b), "Expecting value"),
        (lambda h, b: with_header(b'{"\xff', b), "codec"),
        (lambda h, b: with_header([1, 2], b), ""),
        (lambda h, b: with_header({k: v for k, v in h.items() if k != "__metadata__"}, b), "no entry 'shard'"),
        (lambda h, b: with_header(shifted(h, "moments", 8, 8), b), "does not start where the previous tensor ends"),
        (lambda h, b: with_header(shifted(h, "moments", 0, 8), b), "moments has"),
        (lambda h, b: with_header(h, b + b"more"), "extra bytes after its last tensor"),
        (lambda h, b: b"", ""),
        (lambda h, b: b"\x01", ""),
    ],
)
def test_a_wrong_header_is_an_error(shard: tuple[Path, ShardEntry], spoil: Any, message: str) -> None:
    path, entry = shard
    data = spoil(*header_of(path.read_bytes()))
    path.write_bytes(data)
    fault = refused("is damaged or belongs to another cache", ShardReader, path, replace(entry, bytes=len(data)))
    assert message in fault
