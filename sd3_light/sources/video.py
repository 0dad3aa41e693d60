"""Decode videos to frames at a stated rate, and write them. Every input becomes frames or a `Reject` with a reason.

mp4, mov, webm and mkv are decoded by PyAV (the extra `video`), gif by Pillow. The first bytes of a file determine its
reader, so that formats which refer to other files or addresses, such as playlists, are never opened. Memory is bounded:
a decoder holds a few frames, and only sampled frames are kept, at their final size.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.config.schema_dataset import MOST_FRAMES
from sd3_light.files import atomic_file
from sd3_light.sources.buckets import Resize
from sd3_light.sources.preprocess import BROKEN, MAX_PIXELS, Pixels, Reject, decode, fit
from sd3_light.sources.records import Location, open_location

CLIP_FPS = 16.0
"""The rate of clips that are drawn."""
_START = 16  # bytes that show what a file is
_STILLS = (b"ftypavif", b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1")  # images in the container of videos
_HDR = {16: "PQ", 18: "HLG"}
_ITU709 = 1
_UNSPECIFIED = 2
_UPRIGHT = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
_GIF_DEFAULT_MS = 100  # browsers show a frame without a duration, or with one up to 10 ms, this long


@dataclass(frozen=True)
class VideoSize:
    """The upright size of a video, and the number of frames to sample from it."""

    width: int
    height: int
    frames: int


@dataclass(frozen=True)
class _Frame:
    """A decoded frame: its time and duration in seconds, and a function that returns the upright RGB image."""

    time: Fraction
    duration: Fraction
    image: Callable[[], Image.Image]


_Frames = Generator[_Frame, None, None]


def is_video(file: BinaryIO) -> bool:
    """Return whether the first bytes of a file are those of a video that can be read; it is then at its start."""
    start = file.read(_START)
    file.seek(0)
    return _reader(start) is not None and start[4:12] not in _STILLS


def count_frames(file: BinaryIO, fps: float | None = None) -> VideoSize:
    """Return the size of a video and all its frames at the rate ``fps``, decoding the first only.

    Frames of mp4, mov, webm and mkv are counted by the times of their packets. Damage behind the first frame is found
    when the frames are decoded. Raises Reject.
    """
    return _measured(_sampled(file, fps, packets_only=True), MOST_FRAMES)


def probe_video(file: BinaryIO, counts: Sequence[int], fps: float | None = None) -> VideoSize:
    """Decode as many frames as needed, and return the size and the largest of ``counts`` that the video has.

    ``fps`` is the rate of the samples; None means every frame. Raises Reject if the video is broken or too short.
    """
    size = _measured(_sampled(file, fps), max(counts))
    fitting = [count for count in counts if count <= size.frames]
    if not fitting:
        rate = "" if fps is None else f" at {fps:g} per second"
        raise Reject("too_short", f"{size.frames} frames{rate}; at least {min(counts)} are needed")
    return replace(size, frames=max(fitting))


def _measured(frames: _Frames, most: int) -> VideoSize:
    """Return the size of the first frame, and how many there are, at most ``most``."""
    number = 0
    size = (0, 0)
    with closing(frames):
        for frame in islice(frames, most):
            if number == 0:
                size = frame.image().size  # the first conversion finds unsupported pixel formats
            number += 1
    if number == 0:
        raise Reject("broken_video", "no frame can be decoded")
    return VideoSize(*size, number)


def decode_video(file: BinaryIO, resize: Resize, count: int, fps: float | None = None) -> Pixels:
    """Return the first ``count`` frames at the rate ``fps``, resized and cropped as planned: [frames, H, W, 3].

    Raises Reject if the video is broken, or has fewer frames than when it was probed.
    """
    width, height = resize.size
    pixels = np.empty((count, height, width, 3), dtype=np.uint8)
    number = 0
    with closing(_sampled(file, fps)) as frames:
        for frame in islice(frames, count):
            image = frame.image()
            # the size of a stream may change on the way
            pixels[number] = fit(image if image.size == resize.source else image.resize(resize.source), resize)
            number += 1
    if number < count:
        raise Reject("changed_meanwhile", f"{number} frames instead of {count}")
    return pixels


def open_still(location: Location) -> Image.Image:
    """Return an image, or the first frame of a video, upright in RGB. Raises Reject."""
    with open_location(location) as file:
        start = file.read(_START)
        file.seek(0)
        if not is_video(file) or start.startswith(b"GIF8"):
            return decode(location.read())
        with closing(_sampled(file, None)) as frames:
            for frame in frames:
                return frame.image()
    raise Reject("broken_video", "no frame can be decoded")


def write_video(path: str | Path, frames: Sequence[Any], fps: float = CLIP_FPS) -> Path:
    """Write frames (PIL images, or arrays [H, W, 3] of bytes) as .gif or .webp, or as .mp4 (H.264) with PyAV.

    The sides of an mp4 are even.
    """
    path = Path(path)
    images = [frame if isinstance(frame, Image.Image) else Image.fromarray(np.asarray(frame)) for frame in frames]
    if not images:
        raise UserError(f"{path}: there are no frames to write")
    if path.suffix not in (".gif", ".mp4", ".webp"):
        raise UserError(f"{path}: videos are written as .mp4, .webp or .gif; choose one of these suffixes")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        if path.suffix == ".mp4":
            _write_mp4(temporary, images, fps)
        else:
            duration = max(20, round(1000 / fps))
            kind = path.suffix.removeprefix(".").upper()
            images[0].save(temporary, kind, save_all=True, append_images=images[1:], duration=duration, loop=0)
    return path


def clip_suffix() -> str:
    """Return the suffix of clips that are written: .mp4, or .webp without PyAV."""
    return ".mp4" if has_av() else ".webp"


def _write_mp4(path: Path, images: Sequence[Image.Image], fps: float) -> None:
    with path.open("wb") as file, require_av().open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_fraction(fps))
        stream.width, stream.height = (side + side % 2 for side in images[0].size)
        stream.pix_fmt = "yuv420p"
        for image in images:
            frame = require_av().VideoFrame.from_image(image.convert("RGB"))
            container.mux(stream.encode(frame.reformat(stream.width, stream.height)))
        container.mux(stream.encode())


def require_av() -> Any:
    """Return the module of PyAV; if it is missing, the UserError says how to install it."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"reading and writing mp4 and webm needs PyAV ({error}): pip install 'sd3-light[video]'; gif works without"
        ) from error
    return av


def has_av() -> bool:
    """Return whether PyAV is installed."""
    return find_spec("av") is not None


# --- sampling ------------------------------------------------------------------------------------


def _sampled(file: BinaryIO, fps: float | None, packets_only: bool = False) -> _Frames:
    """Yield the frames at a rate; with ``packets_only`` just the first has an image."""
    start = file.read(_START)
    file.seek(0)
    if not start:
        raise Reject("empty_file")
    reader = _reader(start)
    if reader is None:
        raise Reject("not_a_video", f"starts with {start[:12]!r}")
    frames = _gif_frames(file) if reader == "gif" else _av_frames(file, reader, packets_only)
    with closing(frames):
        yield from frames if fps is None else _at_rate(frames, _fraction(fps))


def _reader(start: bytes) -> str | None:
    """Return what reads a file with these first bytes: "gif" or a demuxer; None if it is not a video."""
    if start.startswith(b"GIF8"):
        return "gif"
    if start.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    return "mov" if start[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip") else None


def _at_rate(frames: _Frames, fps: Fraction) -> _Frames:
    """Yield the frame nearest to each multiple of 1 / fps after the first frame, until the last frame ends."""
    before: _Frame | None = None
    number = 0
    start = Fraction(0)
    for frame in frames:
        if before is None:
            start = frame.time
        elif frame.time <= before.time:
            continue
        # the nearest frame, not the one on display: 29.97 frames per second sampled at 30 would repeat the first
        while before is not None and 2 * (start + number / fps) <= before.time + frame.time:
            yield before
            number += 1
        before = frame
    while before is not None and start + number / fps < before.time + before.duration:
        yield before
        number += 1


def _fraction(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(1001)


# --- PyAV ----------------------------------------------------------------------------------------


def _av_frames(file: BinaryIO, demuxer: str, packets_only: bool) -> _Frames:
    av = require_av()
    try:
        with av.open(file, format=demuxer, metadata_errors="replace") as container:
            stream = next(
                (item for item in container.streams.video if "attached_pic" not in str(item.disposition)), None
            )
            if stream is None or stream.codec_context is None:
                raise Reject("no_video_stream")
            _require_size(stream.codec_context.width, stream.codec_context.height)
            stream.codec_context.thread_count = 1  # each thread holds frames; workers provide the parallelism
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
            if packets_only:
                yield from _packet_frames(av, container, stream)
                return
            for frame in container.decode(stream):
                yield _av_frame(av, frame, stream)
    except av.FFmpegError as error:
        raise Reject("broken_video", f"{type(error).__name__}: {error.strerror}") from error
    except OSError as error:
        raise Reject("unreadable", str(error)) from error


def _packet_frames(av: Any, container: Any, stream: Any) -> _Frames:
    """Yield the first frame, then the others in the order of their times, with its image."""
    first: _Frame | None = None
    times: list[tuple[Fraction, Fraction]] = []
    for packet in container.demux(stream):
        if first is None:
            first = next((_av_frame(av, frame, stream) for frame in packet.decode()), None)
        if packet.pts is not None and not packet.is_discard:
            times.append((packet.pts * packet.time_base, _duration(packet, stream)))
    if first is None:
        return
    yield first
    for time, duration in sorted(times):
        if time > first.time:
            yield _Frame(time, duration, first.image)


def _duration(part: Any, stream: Any) -> Fraction:
    """Return how long a frame or packet is shown, in seconds."""
    rate = stream.average_rate
    seconds: Fraction = (part.duration or 0) * part.time_base or (1 / rate if rate else Fraction(1, 1000))
    return seconds


def _require_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise Reject("too_large", f"{width}x{height}")


def _av_frame(av: Any, frame: Any, stream: Any) -> _Frame:
    if frame.is_corrupt:
        raise Reject("broken_video", "a frame is damaged")
    if frame.pts is None:
        raise Reject("broken_video", "a frame has no time")
    if frame.color_trc in _HDR:
        raise Reject("unsupported_mode", f"HDR ({_HDR[frame.color_trc]}); convert it to SDR")
    aspect = stream.sample_aspect_ratio or Fraction(1)
    return _Frame(frame.pts * frame.time_base, _duration(frame, stream), lambda: _av_image(av, frame, aspect))


def _av_image(av: Any, frame: Any, aspect: Fraction) -> Image.Image:
    flags = av.video.reformatter.Interpolation
    quality = flags.BICUBIC | flags.ACCURATE_RND | flags.FULL_CHR_H_INT | flags.BITEXACT
    # HD video without a tag is BT.709; swscale assumes BT.601 whatever the size
    is_untagged_hd = frame.colorspace == _UNSPECIFIED and (frame.width >= 1280 or frame.height > 576)
    matrix = _ITU709 if is_untagged_hd else None
    rgb = frame.reformat(format="rgb24", src_colorspace=matrix, interpolation=quality, threads=1)
    image: Image.Image = rgb.to_image()
    size = max(1, round(image.width * aspect)), image.height
    image = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
    turn = _UPRIGHT.get(round(frame.rotation) % 360)
    return image if turn is None else image.transpose(turn)


# --- gif -----------------------------------------------------------------------------------------


def _gif_frames(file: BinaryIO) -> _Frames:
    time = Fraction(0)
    try:
        with Image.open(file, formats=("GIF",)) as gif:
            _require_size(*gif.size)
            while True:
                colours = gif.convert("RGBA")
                image = Image.new("RGB", colours.size, "white")
                image.paste(colours, mask=colours.getchannel("A"))
                milliseconds = gif.info.get("duration", 0)
                duration = Fraction(milliseconds if milliseconds > 10 else _GIF_DEFAULT_MS, 1000)
                yield _Frame(time, duration, image.copy)
                time += duration
                try:
                    gif.seek(gif.tell() + 1)
                except EOFError:
                    return
    except Image.DecompressionBombError as error:
        raise Reject("too_large", str(error)) from error
    except BROKEN as error:
        reason = "truncated" if "truncated" in str(error).lower() else "broken_video"
        raise Reject(reason, f"{type(error).__name__}: {error}") from error
