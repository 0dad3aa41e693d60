"""Videos in a dataset: what is read of them, their buckets, and what is left of a directory without `frames`."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.config import DatasetConfig, DirectoryConfig
from sd3_light.core.clips import clip_faults, with_clip_lengths
from sd3_light.data.cache_plan import decode_task
from sd3_light.data.split import split_images
from sd3_light.randomness import sample_id
from sd3_light.sources.buckets import clip_length, fits, misfit
from sd3_light.sources.decode import decode_images
from sd3_light.sources.groups import group_images
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes
from sd3_light.sources.signature import signature
from sd3_light.sources.video import count_frames, has_av, is_video, open_still, probe_video
from tests.unit.sources.catalogues import directory, list_and_probe, plan_for
from tests.unit.sources.inputs import png, write_tar
from tests.unit.sources.videos import encode, encode_gif, numbered, numbers

pytestmark = pytest.mark.skipif(not has_av(), reason="PyAV (av) is not installed")


def write(folder: Path, **files: bytes) -> Path:
    """Write captioned files; `a_mp4` becomes a.mp4."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"a caption of {name}", encoding="utf-8")
    return folder


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return write(
        tmp_path / "clips",
        a_mp4=encode(numbered(20, (64, 32)), 16),
        b_webm=encode(numbered(7, (64, 32)), 16, "webm"),
        c_gif=encode_gif(numbered(12, (64, 32)), 50),
        d_png=png(),
        e_gif=encode_gif(numbered(1, (64, 32)), 50),
        f_mp4=encode(numbered(3, (64, 32)), 16),
        g_mp4=encode(numbered(20, (64, 32)), 16)[:150],
    )


def test_probing_counts_frames(clips: Path, cache: Path) -> None:
    rows = list_and_probe(cache, directory(clips, frames=17))
    counts = {name: row.frames for name, row in rows.items() if not row.reason}
    assert counts == {"a.mp4": 20, "b.webm": 7, "c.gif": 12, "d.png": 0, "e.gif": 1, "f.mp4": 3}
    assert rows["g.mp4"].reason == "broken_video"
    assert (rows["a.mp4"].width, rows["a.mp4"].height) == (64, 32)


def test_a_rate_resamples(clips: Path, cache: Path) -> None:
    keys: dict[str, Any] = {"frames": 17}
    own, half = (list_and_probe(cache, directory(clips, **keys, **rate)) for rate in ({}, {"fps": 8.0}))
    assert (own["a.mp4"].frames, half["a.mp4"].frames) == (20, 10)
    assert own["a.mp4"].digest != half["a.mp4"].digest
    assert own["d.png"].digest == half["d.png"].digest
    again = list_and_probe(cache, directory(clips, frames=[5, 9]))
    assert again["a.mp4"] == own["a.mp4"], "another length needs no new probe"


def test_packets_count_like_decoded_frames() -> None:
    for kind in ("mp4", "webm"):
        for source in (16, 30000 / 1001):
            data = encode(numbered(23), source, kind)
            for fps in (None, 8, 30):
                expected = probe_video(io.BytesIO(data), range(1, 99), fps)  # decodes all
                assert count_frames(io.BytesIO(data), fps) == expected, (kind, source, fps)


@pytest.mark.parametrize(
    ("frames", "lengths", "expected"),
    [(0, (5, 9), 1), (1, (5, 9), 1), (2, (5, 9), None), (5, (5, 9), 5), (8, (5, 9), 5), (99, (5, 9), 9), (7, (1,), 1)],
)
def test_the_longest_clip_that_a_video_has(frames: int, lengths: tuple[int, ...], expected: int | None) -> None:
    keys = DirectoryConfig(path=Path("clips"), resolutions=[64], frames=list(lengths))
    assert clip_length(frames, keys) == expected
    assert misfit(64, 64, keys, frames) == ("" if expected else "too_short")
    assert [bucket.frames for _, bucket, _ in fits(64, 64, keys, frames)] == ([expected] if expected else [])


def test_a_plan_has_a_shard_per_length(clips: Path, cache: Path) -> None:
    (resolved,) = with_clip_lengths(DatasetConfig(clips, cache, (directory(clips, frames=17),)), 4).directories
    assert resolved.clip_lengths == (5, 9, 13, 17)
    plan = plan_for(cache, [resolved])
    planned = {str(shard.bucket): [member.row.key[-5:] for member in plan.members(shard)] for shard in plan.shards}
    assert planned == {"64x64x17": ["a.mp4"], "64x64x5": [".webm"], "64x64x9": ["c.gif"], "64x64": ["d.png", "e.gif"]}
    reasons = {row.key[-5:]: (row.reason, row.detail) for row in plan.rejected()}
    assert reasons["f.mp4"] == ("too_short", "64x32, 3 frames")
    assert reasons["g.mp4"][0] == "broken_video"
    for shard in plan.shards:
        tasks = [decode_task(member, plan.source(shard).root) for member in plan.members(shard)]
        for decoded in decode_images(tasks):
            assert decoded.pixels is not None
            frames = shard.bucket.frames
            assert decoded.pixels.shape == ((frames, 64, 64, 3) if frames > 1 else (64, 64, 3))
            if frames > 1:
                assert numbers(decoded.pixels) == list(range(frames)), "the first frames"


def test_shards_of_long_clips_are_smaller(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "clips", **{f"{n}_mp4": encode(numbered(5 + n, (64, 32)), 16) for n in range(8)})
    assert [shard.count for shard in plan_for(cache, [directory(folder, frames=[5])], size=8).shards] == [1] * 8


def test_damage_behind_the_first_frame_is_a_reject(tmp_path: Path, cache: Path) -> None:
    grain = np.random.default_rng(0).integers(0, 255, (60, 32, 64, 3), dtype=np.uint8)
    data = encode(list(grain), 16)
    middle = len(data) // 2
    damaged = data[:middle] + bytes(len(data) // 10) + data[middle + len(data) // 10 :]
    folder = write(tmp_path / "clips", a_mp4=damaged)
    plan = plan_for(cache, [directory(folder, frames=[57])])
    (shard,) = plan.shards
    (result,) = decode_images([decode_task(plan.members(shard)[0], folder)])
    assert (result.pixels, result.reason) == (None, "broken_video")


def test_the_mask_of_a_clip(clips: Path, cache: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    halves = np.zeros((32, 64), dtype=np.uint8)
    halves[:, :32] = 255
    Image.fromarray(halves).save(masks / "a.png")
    plan = plan_for(cache, [directory(clips, frames=[5], mask_path=masks)])
    shard = next(shard for shard in plan.shards if shard.bucket.frames == 5)
    (result,) = decode_images([decode_task(plan.members(shard)[0], clips)])
    assert result.mask is not None
    assert result.mask.shape == (8, 8)


def test_without_frames_videos_are_not_read(clips: Path, cache: Path) -> None:
    keys = directory(clips)
    assert set(list_and_probe(cache, keys)) == {"c.gif", "d.png", "e.gif"}
    before = signature(keys, 0)
    (clips / "h.mp4").write_bytes(b"another video")
    assert signature(keys, 0) == before
    assert signature(directory(clips, frames=5), 0) != before


def test_a_video_of_a_tar_comes_before_its_preview(tmp_path: Path, cache: Path) -> None:
    members = [("a.jpg", png()), ("a.mp4", encode(numbered(9))), ("a.json", b'{"caption": "a stripe"}')]
    path = write_tar(tmp_path / "clips.tar", members)
    (row,) = list_and_probe(cache, directory(path, frames=5)).values()
    assert (row.frames, json.loads(row.image)[0]) == (9, "")
    (other,) = list_and_probe(tmp_path / "other", directory(path)).values()
    assert other.frames == 0


def test_images_in_the_container_of_videos_are_images() -> None:
    assert is_video(io.BytesIO(encode(numbered(2))))
    assert not is_video(io.BytesIO(b"\0\0\0\x1cftypavif\0\0\0\0avif"))
    assert not is_video(io.BytesIO(png()))


def test_the_still_of_a_video(clips: Path) -> None:
    for name in ("a.mp4", "b.webm", "c.gif", "d.png"):
        assert open_still(FileBytes(str(clips / name))).mode == "RGB"
    with pytest.raises(Reject):
        open_still(FileBytes(str(clips / "g.mp4")))


def test_clips_are_held_out_with_their_copies_alone(tmp_path: Path, cache: Path) -> None:
    """Clips of one start are not similar; a second copy of a file is."""
    clips = {f"{name}_gif": encode_gif(numbered(number, (64, 32)), 50) for number, name in enumerate("abcdefgh", 5)}
    folder = write(tmp_path / "clips", **clips, copy_gif=clips["c_gif"])
    rows = list_and_probe(cache, directory(folder, frames=17, validation=True))
    split = split_images(lambda: [(row, True) for row in rows.values()], tmp_path / "sides.arrow")
    held = {name for name, row in rows.items() if sample_id(row.key) in split.validation}
    assert len(held) == 2
    assert {"c.gif", "copy.gif"} <= held or not {"c.gif", "copy.gif"} & held
    groups = group_images([([row.digest], row.thumbnail) for row in rows.values()])
    assert len(np.unique(groups)) == len(rows) - 1


def test_lengths_that_a_family_does_not_allow(tmp_path: Path) -> None:
    def faults(step: int | None, frames: int | list[int]) -> list[str]:
        keys = directory(tmp_path, frames=frames)
        found = clip_faults(DatasetConfig(tmp_path, tmp_path, (keys,)), step, "X")
        return [f"{fault.problem}; {fault.hint}" for fault in found]

    assert faults(4, 81) == faults(4, 1) == faults(4, [5, 81]) == []
    assert faults(4, 80) == ["clips of X have 4·n + 1 frames; write 77 or 81"]
    assert faults(8, [9, 12]) == ["clips of X have 8·n + 1 frames; write 9 or 17"]
    assert faults(None, 5) == ["X trains on images only; remove frames"]
    assert not list(clip_faults(DatasetConfig(tmp_path, tmp_path, (directory(tmp_path),)), None, "X"))
