"""Images, folders, tars and scans for tests of the sources."""

import io
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.sources.preprocess import REASONS
from sd3_light.sources.records import Record, Rejected
from sd3_light.sources.scan import occurrences, scan

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
ORIENTATION = 0x0112


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB", left: Any = RED, right: Any = BLUE, size: tuple[int, int] = (32, 16)) -> Image.Image:
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def noise(mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(data.squeeze(), mode) if channels == 1 else Image.merge(mode, Image.fromarray(data).split())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def palette(transparent: int | None = None) -> bytes:
    image = Image.new("P", (32, 16), 0)
    image.putpalette([*RED, *BLUE, *GREEN])
    image.paste(1, (16, 0, 32, 16))
    return save(image, "PNG", **({} if transparent is None else {"transparency": transparent}))


def animated(kind: str, **options: Any) -> bytes:
    first, *rest = halves(), halves(left=GREEN, right=GREEN), halves(left=BLACK, right=BLACK)
    return save(first, kind, save_all=True, append_images=rest, duration=50, **options)


def profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a minimal version 2 ICC profile."""
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data
    size = start + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"none", 0x02400000, b"mntr", space, b"XYZ ").ljust(36, b"\0") + b"acsp"
    head = head.ljust(68, b"\0") + xyz(0.9642, 1.0, 0.8249)[8:]
    return head.ljust(128, b"\0") + table + body


def xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">iii", *(round(value * 65536) for value in values))


def gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))


def words(text: bytes) -> bytes:
    return b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" * 80


# Adobe RGB (1998): primaries adapted to D50, as its specification prints them
WIDE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))


def wide_gamut() -> bytes:
    curves = {name: gamma(2.2) for name in (b"rTRC", b"gTRC", b"bTRC")}
    primaries = {name: xyz(*row) for name, row in zip((b"rXYZ", b"gXYZ", b"bXYZ"), WIDE, strict=True)}
    return profile(b"RGB ", {b"desc": words(b"wide"), b"wtpt": xyz(0.9642, 1.0, 0.8249), **primaries, **curves})


def linear_grey() -> bytes:
    return profile(b"GRAY", {b"desc": words(b"linear"), b"wtpt": xyz(0.9642, 1.0, 0.8249), b"kTRC": gamma(1.0)})


def as_srgb(colour: tuple[int, int, int]) -> np.ndarray:
    """Convert an Adobe RGB colour to sRGB with the standard formulas."""
    light = (np.array(colour) / 255) ** 2.2 @ np.array(WIDE) @ np.linalg.inv(np.array(SRGB))
    light = light.clip(0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def late_exif_png() -> bytes:
    """Return a PNG whose EXIF chunk is after the pixels."""
    data = save(halves(), "PNG", exif=exif(6))
    start = data.index(b"eXIf") - 4
    end = start + 12 + struct.unpack(">I", data[start : start + 4])[0]
    chunk, rest = data[start:end], data[:start] + data[end:]
    return rest.replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")


def png_header(width: int, height: int) -> bytes:
    data = save(Image.new("1", (1, 1)), "PNG")
    body = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


def scrambled_png() -> bytes:
    data = bytearray(save(noise(), "PNG"))
    data[200:260] = bytes(60)
    return bytes(data)


def png(colour: int = 0) -> bytes:
    return save(Image.new("RGB", (16, 16), (colour, 0, 0)), "PNG")


def write_files(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def directory(path: Path, **keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=path, resolutions=[64], **keys)


def scan_items(path: Path, **keys: Any) -> list[Record | Rejected]:
    items = list(scan(directory(path, **keys), 0))
    names = [item.key for item in items]
    assert len(set(names)) == len(names), "keys are unique"
    assert all(item.reason in REASONS for item in items if isinstance(item, Rejected))
    assert all((item.key + item.detail).encode() for item in items if isinstance(item, Rejected)), "is valid UTF-8"
    assert items == list(scan(directory(path, **keys), 0)), "a second scan yields the same items"
    return items


def captions(items: Iterable[Record | Rejected]) -> dict[str, tuple[str, ...]]:
    return {item.key.split("/", 1)[1]: item.captions for item in items if isinstance(item, Record)}


def rejects(items: Iterable[Record | Rejected]) -> dict[str, str]:
    return {item.key.split("/", 1)[1]: item.reason for item in items if isinstance(item, Rejected)}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def structs(count: int) -> list[dict[str, Any]]:
    return [{"bytes": png(n), "path": f"{n}.png"} for n in range(count)]


def scan_all(directories: Iterable[DirectoryConfig]) -> Iterator[Record | Rejected]:
    directories = tuple(directories)
    for directory, index in zip(directories, occurrences(directories), strict=True):
        yield from scan(directory, index)
