"""Videos become frames at a rate, or a reject with a reason."""

import io
import random
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.sources import video
from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.video import VideoSize, decode_video, probe_video, write_video
from tests.refusals import refused
from tests.unit.sources.videos import RED, encode, encode_gif, numbered, numbers, turned
from tests.warm import REAL_PYTHON

HAS_AV = video.has_av()
needs_av = pytest.mark.skipif(not HAS_AV, reason="PyAV (av) is not installed")
NEAR = 6  # levels of grey that compression may change


def probe(data: bytes, *counts: int, fps: float | None = None) -> VideoSize:
    return probe_video(io.BytesIO(data), counts or (1,), fps)


def decode(data: bytes, count: int, fps: float | None = None, size: tuple[int, int] = (48, 32)) -> Any:
    result = probe(data, count, fps=fps)
    return decode_video(io.BytesIO(data), resize_for(result.width, result.height, Bucket(*size)), count, fps)


def reason(data: bytes, *counts: int, fps: float | None = None) -> str:
    with pytest.raises(Reject) as caught:
        probe(data, *counts, fps=fps)
    return caught.value.reason


@pytest.fixture(scope="module", params=["mp4", "webm", "gif"])
def clip(request: pytest.FixtureRequest) -> bytes:
    """Twenty numbered frames at 16 (gif: 20) per second."""
    if request.param == "gif":
        return encode_gif(numbered(20), 50)
    if not HAS_AV:
        pytest.skip("PyAV (av) is not installed")
    return encode(numbered(20), kind=request.param)


def test_every_frame_without_a_rate(clip: bytes) -> None:
    pixels = decode(clip, 20)
    assert pixels.shape == (20, 32, 48, 3)
    assert pixels.dtype == np.uint8
    assert numbers(pixels) == list(range(20))
    assert abs(pixels[:, 16, 40].astype(int) - RED).max() <= NEAR


def test_the_largest_count_that_a_video_has(clip: bytes) -> None:
    assert probe(clip, 5, 17, 33) == VideoSize(48, 32, 17)
    assert probe(clip, 20).frames == 20
    assert reason(clip, 21) == "too_short"


@needs_av
@pytest.mark.parametrize(
    ("source", "fps", "expected"),
    [
        (16, 8, [0, 2, 4, 6, 8]),
        (16, 16, [0, 1, 2, 3, 4]),
        (30000 / 1001, 30, [0, 1, 2, 3, 4]),
        (30, 30000 / 1001, [0, 1, 2, 3, 4]),
        (8, 16, [0, 0, 1, 1, 2]),  # a tie goes to the earlier frame
        (25, 10, [0, 2, 5, 7, 10]),
    ],
)
def test_frames_nearest_to_the_rate(source: float, fps: float, expected: list[int]) -> None:
    assert numbers(decode(encode(numbered(12), source), 5, fps)) == expected


@needs_av
def test_the_last_frame_counts_to_its_end() -> None:
    clip = encode(numbered(10), 10)  # one second
    assert probe(clip, *range(1, 40), fps=16).frames == 16
    assert probe(clip, *range(1, 40), fps=10).frames == 10
    with pytest.raises(Reject, match="too_short: 16 frames at 16 per second; at least 17 are needed"):
        probe(clip, 17, fps=16)


@needs_av
def test_frames_of_variable_and_missing_durations() -> None:
    times = [Fraction(number, 10) if number < 5 else Fraction(number - 4, 2) for number in range(10)]
    clip = encode(numbered(10), 1000, "webm", times)
    assert numbers(decode(clip, 5, 10)) == [0, 1, 2, 3, 4]
    assert numbers(decode(clip, 5, 2)) == [0, 5, 6, 7, 8]
    assert numbers(decode(encode_gif(numbered(12), 0), 5, 5)) == [0, 2, 4, 6, 8]


@needs_av
def test_a_video_of_a_phone_is_upright_and_wide_pixels_are_stretched() -> None:
    frame = np.zeros((32, 64, 3), dtype=np.uint8)
    frame[:, :16] = 255  # the left of the sensor is the top of the scene
    clip = turned(encode([frame] * 3))
    assert probe(clip) == VideoSize(32, 64, 1)
    pixels = decode(clip, 1, size=(32, 64))[0]
    assert pixels[4].min() > 240
    assert pixels[40].max() < 16
    assert probe(encode(numbered(2), sample_aspect_ratio=Fraction(4, 3))) == VideoSize(64, 32, 1)


@needs_av
@pytest.mark.parametrize(("tag", "size"), [(1, (64, 48)), (5, (64, 48)), (None, (64, 48)), (1, (64, 640))])
def test_the_colour_matrix_of_the_file(tag: int | None, size: tuple[int, int]) -> None:
    """Tagged BT.709 and BT.601 files show the same colours; untagged ones follow the size."""
    frame = np.full((size[1], size[0], 3), RED, dtype=np.uint8)
    pixels = decode(encode([frame] * 2, **({"colorspace": tag} if tag else {})), 1, size=(64, 48))
    assert abs(pixels[0, 20, 20].astype(int) - RED).max() <= NEAR


@needs_av
def test_untagged_hd_is_bt709() -> None:
    frame = np.full((640, 64, 3), RED, dtype=np.uint8)
    tagged = encode([frame] * 2, colorspace=1)
    untagged = tagged.replace(b"colrnclx\x00\x01", b"colrnclx\x00\x02")
    assert abs(decode(untagged, 1)[0, 20, 20].astype(int) - decode(tagged, 1)[0, 20, 20]).max() <= 1


def test_resized_and_cropped_like_an_image() -> None:
    frames = numbered(3, (96, 40))
    pixels = decode(encode_gif(frames), 3, size=(32, 32))
    expected = video.fit(Image.fromarray(frames[1]), resize_for(96, 40, Bucket(32, 32)))
    assert abs(pixels[1].astype(int) - expected).max() <= NEAR


@needs_av
def test_hdr_and_sound_alone_are_rejected() -> None:
    assert reason(encode(numbered(2), color_trc=16)) == "unsupported_mode"
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert reason(file.getvalue()) == "no_video_stream"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty_file"),
        (b"<!DOCTYPE html><title>404 Not Found</title>", "not_a_video"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://localhost/a.ts\n", "not_a_video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not_a_video"),
        (b"GIF89a", "broken_video"),
        (encode_gif(numbered(4))[:-300], "truncated"),
        (b"GIF89a\xff\xff\xff\xff\x00\x00\x00" + encode_gif(numbered(1))[13:], "too_large"),
        pytest.param(b"\x00\x00\x00\x18ftypisom" + bytes(40), "broken_video", marks=needs_av),
        pytest.param(b"\x1aE\xdf\xa3" + bytes(40), "broken_video", marks=needs_av),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_files_that_are_not_videos(data: bytes, expected: str) -> None:
    assert reason(data, 4) == expected


@needs_av
def test_a_cut_mp4_is_broken_and_a_cut_webm_is_too_short() -> None:
    mp4, webm = encode(numbered(20)), encode(numbered(20), kind="webm")
    assert reason(mp4[: len(mp4) // 2], 20) == "broken_video"
    assert reason(webm[: len(webm) // 2], 20) == "too_short"


@needs_av
def test_a_damaged_frame_is_not_concealed() -> None:
    """H.264 decoders fill damaged parts with guesses; such a video is rejected."""
    noise = np.random.default_rng(0).integers(0, 255, (12, 32, 48, 3), dtype=np.uint8)
    data = bytearray(encode(list(noise)))
    at = data.index(b"mdat") + 15000
    data[at : at + 50] = bytes(byte ^ 0x5A for byte in data[at : at + 50])
    assert reason(bytes(data), 12) == "broken_video"


@pytest.mark.parametrize("kind", [pytest.param("mp4", marks=needs_av), pytest.param("webm", marks=needs_av), "gif"])
def test_damage_is_always_a_reject(kind: str) -> None:
    data = encode_gif(numbered(12)) if kind == "gif" else encode(numbered(12), kind=kind)
    draw, rejected = random.Random(0), 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 5, 50))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            probe(bytes(damaged[: draw.choice((len(data), draw.randrange(len(data))))]), 8, fps=16)
        except Reject:
            rejected += 1
    assert rejected > 10


@needs_av
def test_memory_does_not_grow_with_the_length() -> None:
    """After a clip of 2 s, one of 12 s needs no memory for its additional frames."""
    script = """
import io, os, resource, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # a decoder has a frame per core in work
from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.video import decode_video, probe_video
from tests.unit.sources.videos import encode
import numpy as np
frames = [np.full((720, 1280, 3), level, dtype=np.uint8) for level in (0, 255)]
def peak(seconds):
    data = encode([frames[number % 2] for number in range(4 * seconds)], 4, options={"preset": "ultrafast"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = probe_video(io.BytesIO(data), (seconds,), 1)
    decode_video(io.BytesIO(data), resize_for(size.width, size.height, Bucket(64, 64)), seconds, 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
peak(2)
print(peak(12))
"""
    done = subprocess.run([REAL_PYTHON, "-c", script], capture_output=True, text=True, check=True)
    frame_kb = 1280 * 720 * 3 / 1024
    assert int(done.stdout) < 10 * frame_kb, "48 decoded frames need 66 MB as YUV"


@pytest.mark.parametrize("suffix", [".gif", pytest.param(".mp4", marks=needs_av)])
def test_written_frames_are_read_back(tmp_path: Path, suffix: str) -> None:
    frames = numbered(9)
    path = write_video(tmp_path / "new" / f"clip{suffix}", frames, 10)
    assert numbers(decode(path.read_bytes(), 9, 10)) == list(range(9))
    images = [Image.fromarray(frame) for frame in frames]
    assert write_video(tmp_path / f"images{suffix}", images, 10).read_bytes() == path.read_bytes()


@needs_av
def test_odd_sides_are_written(tmp_path: Path) -> None:
    path = write_video(tmp_path / "odd.mp4", numbered(2, (33, 31)))
    assert probe(path.read_bytes()) == VideoSize(34, 32, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: write_video("a.avi", numbered(1)), "a.avi: videos are written as .mp4, .webp or .gif"),
        (lambda: write_video("a.gif", []), "a.gif: there are no frames"),
    ],
)
def test_what_cannot_be_written(call: Callable[[], object], message: str) -> None:
    refused(message, call)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    refused(r"pip install 'sd3-light\[video\]'", probe, b"\x1aE\xdf\xa3" + bytes(40))
    assert probe(encode_gif(numbered(2)), 2).frames == 2
