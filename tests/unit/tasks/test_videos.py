"""`VideoDataset`: clips from folders, tables, tars and Parquet files; unusable ones are left out with a reason."""

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light.config.faults import UserError
from sd3_light.sources.listing import VIDEOS
from sd3_light.sources.scan import scan
from sd3_light.sources.video import has_av
from sd3_light.tasks import VideoDataset
from sd3_light.tasks import datasets as videos
from tests.unit.sources.inputs import directory, rejects, write_files, write_tar
from tests.unit.sources.videos import encode, encode_gif, numbered, numbers

needs_av = pytest.mark.skipif(not has_av(), reason="PyAV (av) is not installed")
LONG, SHORT = encode_gif(numbered(20)), encode_gif(numbered(6))


def dataset(path: Path, frames: Any = 5, **keys: Any) -> VideoDataset:
    return VideoDataset(path, frames, **({"resolutions": [32], "num_workers": 0} | keys))


def prompts(clips: VideoDataset) -> list[str]:
    return [clips[index]["prompt"] for index in range(len(clips))]


def test_a_folder_with_captions_beside_the_clips(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.gif": LONG, "a.txt": "a  cat\n", "b/c.gif": SHORT, "b/c.txt": "a dog", "b/c.jpg": b"x"})
    clips = dataset(tmp_path, [5, 17])
    assert prompts(clips) == ["a cat", "a dog"]
    assert [clips.bucket_of(index) for index in range(2)] == [(17, 32, 32), (5, 32, 32)]
    assert [clips[index]["video"].shape for index in range(2)] == [(17, 32, 32, 3), (5, 32, 32, 3)]
    assert clips.rejects == ()
    copy = pickle.loads(pickle.dumps(clips))  # what a worker process gets
    assert numbers(copy[0]["video"]) == list(range(17))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("metadata.csv", "video,prompt\nclips/a.gif,a cat\nclips/b.gif,a dog\n"),
        (
            "metadata.jsonl",
            '{"video": "clips/a.gif", "text": "a cat"}\n{"video_path": "clips/b.gif", "text": "a dog"}\n',
        ),
        ("captions.json", '{"clips/a.gif": "a cat", "clips/b.gif": ["a dog", "second"]}'),
        ("metadata.csv", "file_name,image,video,caption\nx,thumb.jpg,clips/a.gif,a cat\ny,u.jpg,clips/b.gif,a dog\n"),
    ],
)
def test_a_table_with_a_video_column(tmp_path: Path, name: str, table: str) -> None:
    write_files(tmp_path, {"clips/a.gif": LONG, "clips/b.gif": SHORT, name: table})
    clips = dataset(tmp_path)
    assert prompts(clips) == ["a cat", "a dog"]
    assert clips.rejects == ()


def test_a_named_column_tars_and_parquet_files(tmp_path: Path) -> None:
    columns = {"video_column": "clip", "caption_column": "words", "caption_prefix": "clip: "}
    table = "clip,video,words,text\na.gif,no.gif,a cat,wrong\n"
    folder = write_files(tmp_path / "table", {"a.gif": LONG, "metadata.csv": table})
    assert prompts(dataset(folder, **columns)) == ["clip: a cat"]
    tmp_path = tmp_path / "containers"
    tmp_path.mkdir()
    write_tar(tmp_path / "a.tar", [("0.gif", LONG), ("0.txt", b"from a tar"), ("1.jpg", b"x"), ("1.txt", b"thumbnail")])
    cells = [{"bytes": SHORT, "path": "x.gif"}, {"bytes": b"", "path": "y.gif"}]
    pq.write_table(pa.table({"video": cells, "caption": ["from Parquet", "empty"]}), tmp_path / "b.parquet")
    clips = dataset(tmp_path, num_workers=1)
    assert prompts(clips) == ["from a tar", "from Parquet"]
    assert numbers(clips[1]["video"]) == [0, 1, 2, 3, 4]
    assert rejects(clips.rejects) == {"a.tar/1": "missing_file", "b.parquet/000000001": "empty_file"}


def test_unusable_inputs_are_left_out_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes | str] = {"good.gif": LONG, "short.gif": SHORT, "empty.gif": b"", "page.gif": "<html>"}
    files |= {"cut.gif": LONG[:-200], "old.avi": b"RIFF"}
    captions: dict[str, bytes | str] = {f"{Path(name).stem}.txt": "a caption" for name in files}
    write_files(tmp_path, files | captions | {"silent.gif": LONG, "lost.txt": "no clip"})
    expected = {"short.gif": "too_short", "empty.gif": "empty_file", "page.gif": "not_a_video", "cut.gif": "truncated"}
    expected |= {"old.avi": "unsupported_format", "silent.gif": "no_caption", "lost.txt": "missing_file"}
    clips = dataset(tmp_path, 20)
    assert rejects(clips.rejects) == expected
    assert len(clips) == 1
    details = {item.key: item.detail for item in clips.rejects}
    assert details[f"{tmp_path.name}#0/short.gif"] == "6 frames; at least 20 are needed"
    shown = capsys.readouterr().err
    assert "left out 7 inputs: " in shown
    assert "1 too_short (the video has fewer frames than requested at the requested rate)" in shown


@needs_av
def test_broken_mp4_and_webm_files(tmp_path: Path) -> None:
    mp4, webm = encode(numbered(12)), encode(numbered(12), kind="webm")
    files: dict[str, bytes | str] = {"a.mp4": mp4, "b.webm": webm, "c.mp4": mp4[:800], "d.webm": webm[:-100]}
    write_files(tmp_path, files | {f"{Path(name).stem}.txt": "a caption" for name in files})
    clips = dataset(tmp_path, 12, fps=16)
    assert rejects(clips.rejects) == {"c.mp4": "broken_video", "d.webm": "too_short"}
    assert [numbers(clips[index]["video"]) for index in range(2)] == [list(range(12))] * 2


def test_a_decoder_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = videos.probe_video
    monkeypatch.setattr(
        videos, "probe_video", lambda file, *rest: os._exit(9) if file.name.endswith("b.gif") else real(file, *rest)
    )
    for name in "abc":
        write_files(tmp_path, {f"{name}.gif": LONG, f"{name}.txt": "a caption"})
    clips = dataset(tmp_path, num_workers=2)
    assert rejects(clips.rejects) == {"b.gif": "decoder_crashed"}
    assert len(clips) == 2


def test_buckets_by_aspect_ratio_and_several_resolutions(tmp_path: Path) -> None:
    for name, size in (("wide", (64, 32)), ("tall", (32, 64))):
        write_files(tmp_path, {f"{name}.gif": encode_gif(numbered(3, size)), f"{name}.txt": ""})
    clips = dataset(tmp_path, 3, resolutions=[32, 64], enable_ar_bucket=True, ar_buckets=[0.5, 2.0])
    assert len(clips) == 4
    assert {clips.bucket_of(index)[1:] for index in range(4)} == {(48, 32), (32, 48), (96, 48), (48, 96)}


def test_a_clip_that_changes_later_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.gif": LONG, "a.txt": "a caption"})
    clips = dataset(tmp_path, 20)
    write_files(tmp_path, {"a.gif": SHORT})
    with pytest.raises(UserError, match=r"a.gif has changed since .* \(changed_meanwhile: 6 frames instead"):
        clips[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"frames": 0}, "VideoDataset: frames: .*got 0; .*an integer from 1"),
        ({"frames": []}, r"VideoDataset: frames: .*got \[\]"),
        ({"frames": 2.5}, "VideoDataset: frames: .*got 2.5"),
        ({"fps": 0}, "VideoDataset: fps: .*got 0"),
        ({"fps": "16"}, "VideoDataset: fps: .*got"),
        ({"size": 64}, "VideoDataset does not know 'size'; it knows resolutions"),
        ({"resolutions": [30]}, "VideoDataset: resolutions"),
        ({"resolutions": ()}, "VideoDataset: resolutions"),
        ({"frames": 99}, "has no usable video: 1 too_short"),
    ],
)
def test_wrong_arguments(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    write_files(tmp_path, {"a.gif": LONG, "a.txt": "a caption"})
    with pytest.raises(UserError, match=message):
        dataset(tmp_path, **keys)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        dataset(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no usable video: no file ends in \.gif, \.m4v"):
        dataset(tmp_path)
    write_files(tmp_path, {"a.mp4": b"x", "a.txt": "a", "b.png": b"x", "b.txt": "b", "c.avi": b"x", "d.heic": b"x"})
    keys = [item.key for item in scan(directory(tmp_path), 0)]
    assert keys == [f"{tmp_path.name}#0/{name}" for name in ("b.png", "d.heic")]
    keys = [item.key for item in scan(directory(tmp_path), 0, VIDEOS)]
    assert keys == [f"{tmp_path.name}#0/{name}" for name in ("a.mp4", "c.avi")]


def test_without_pyav_only_gifs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    write_files(tmp_path, {"a.gif": LONG, "a.txt": "a caption"})
    assert len(dataset(tmp_path)) == 1
    for name, files in (("file", {"b.mp4": b"", "b.txt": "a caption"}), ("cells", {})):
        folder = write_files(tmp_path / name, files or {"empty.md": ""})
        pq.write_table(pa.table({"video": [b"\x1aE\xdf\xa3"], "text": ["a caption"]}), folder / "a.parquet")
        with pytest.raises(UserError, match=r"pip install 'sd3-light\[video\]'"):
            dataset(folder, num_workers=1)
