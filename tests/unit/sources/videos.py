"""Small videos for tests."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RED, GREEN = (200, 30, 60), (20, 160, 40)


def numbered(count: int, size: tuple[int, int] = (48, 32)) -> list[NDArray[np.uint8]]:
    """Return frames whose left half has the grey level 10 x number and whose right half is red."""
    width, height = size
    frames = np.empty((count, height, width, 3), dtype=np.uint8)
    frames[:] = RED
    frames[:, :, : width // 2] = 10 * np.arange(count)[:, None, None, None]
    return list(frames)


def numbers(pixels: NDArray[np.uint8]) -> list[int]:
    """Return the frame numbers that `numbered` wrote, read from the pixels [F, H, W, 3] of a decoded video."""
    middle = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 4].mean(-1)
    return [round(level / 10) for level in middle]


def encode(
    frames: Sequence[NDArray[np.uint8]],
    fps: float = 16,
    kind: str = "mp4",
    times: Sequence[Fraction] | None = None,
    **settings: Any,
) -> bytes:
    """Return an mp4 (H.264) or webm (VP9) of the frames; ``settings`` are attributes of the codec context."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        codec = {"mp4": "libx264", "webm": "libvpx-vp9"}[kind]
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "4", "g": "8"}
        stream.codec_context.thread_count = 1
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.time_base, frame.pts = Fraction(1, 1000), round(1000 * times[number])
            if "colorspace" in settings:
                frame = frame.reformat(format="yuv420p", dst_colorspace=settings["colorspace"])
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def encode_gif(frames: Sequence[NDArray[np.uint8]], milliseconds: int = 60) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=milliseconds)
    return file.getvalue()


def turned(mp4: bytes) -> bytes:
    """Return the mp4 with the display matrix of a phone that was held upright: a quarter turn clockwise."""
    at = mp4.index(b"tkhd") + 4 + 40
    matrix = (0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)
    return mp4[:at] + b"".join(number.to_bytes(4, "big", signed=True) for number in matrix) + mp4[at + 36 :]
