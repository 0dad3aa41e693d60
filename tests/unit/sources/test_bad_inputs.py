"""A table of bad and unusual inputs, each processed from the disk to pixels, and the expected outcomes.

A case lays files into a folder; its outcome is what becomes of each input: a reason, or what is used of it.
"""

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.sources.buckets import fits, misfit
from sd3_light.sources.preprocess import REASONS, Reject, decode, decode_mask, fit, fit_mask, probe
from sd3_light.sources.records import Record, Rejected
from sd3_light.sources.scan import scan
from tests.unit.sources.inputs import (
    BLUE,
    RED,
    WHITE,
    directory,
    exif,
    halves,
    noise,
    png,
    png_header,
    save,
    scrambled_png,
    write_files,
    write_tar,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")

MB = 1 << 20
PAGE = "<!DOCTYPE html><title>404 Not Found</title>"


@dataclass(frozen=True)
class Used:
    """A usable input: its colours at the left and right (None: any), captions and mask weights there."""

    left: Any = None
    right: Any = None
    captions: tuple[str, ...] = ("a caption",)
    mask: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """Expected outcomes per input (a list for several of one name), files, keys and further changes to the folder."""

    outcome: dict[str, Any]
    files: dict[str, bytes | str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    then: Callable[[Path], object] = lambda root: None


def image(data: bytes, outcome: str | Used, name: str = "a.jpg") -> Case:
    return Case({name: outcome}, {name: data, f"{Path(name).stem}.txt": "a caption"})


def caption(data: bytes | str, outcome: str | tuple[str, ...]) -> Case:
    expected = outcome if isinstance(outcome, str) else Used(captions=outcome)
    return Case({"a.png": expected}, {"a.png": png(), "a.txt": data})


def table(name: str, text: str | bytes, outcome: dict[str, str | Used], **keys: Any) -> Case:
    return Case(outcome, {"a.png": png(), name: text}, keys)


def masked(mask: bytes, outcome: str | Used, data: bytes = b"") -> Case:
    files = {"a.png": data or save(halves(size=(64, 64)), "PNG"), "a.txt": "a caption", "masks/a.png": mask}
    return Case({"a.png": outcome}, files, {"mask_path": "masks"})


def in_tar(name: str, outcome: Any, *members: tuple[str, bytes]) -> Case:
    return Case({f"x.tar/{name}": outcome}, then=tarred(*members))


def in_parquet(outcomes: list[Any], columns: dict[str, Any], **keys: Any) -> Case:
    return Case({f"x.parquet/{n:09d}": end for n, end in enumerate(outcomes)}, {}, keys, parquet(columns))


def tarred(*members: tuple[str, bytes]) -> Callable[[Path], object]:
    return lambda root: write_tar(root / "x.tar", members)


def declaring(size: int, kind: bytes = tarfile.REGTYPE) -> Callable[[Path], object]:
    """A tar with a good sample, then a header that declares ``size`` bytes."""

    def write(root: Path) -> None:
        write_tar(root / "x.tar", [("a.png", png()), ("a.txt", b"a caption"), ("b.txt", b"a caption")])
        header = tarfile.TarInfo("b.png")
        header.size, header.type = size, kind
        data = (root / "x.tar").read_bytes().rstrip(bytes(1))
        data += bytes(-len(data) % 512) + header.tobuf(tarfile.GNU_FORMAT)
        (root / "x.tar").write_bytes(data + bytes(1024))

    return write


def sparse(name: str, size: int = 1 << 40) -> Callable[[Path], object]:
    return lambda root: os.truncate(root / name, size)


def cut_tar(root: Path) -> None:
    members = [(f"{n}.{end}", data) for n in range(2) for end, data in (("txt", b"a caption"), ("png", png(n)))]
    path = write_tar(root / "x.tar", members)
    path.write_bytes(path.read_bytes()[:2600])


def garbled_tar(root: Path) -> None:
    members = [(f"{n}.{end}", data) for n in range(3) for end, data in (("txt", b"a caption"), ("png", png(n)))]
    data = write_tar(root / "x.tar", members).read_bytes()
    last = data.index(b"2.txt")
    (root / "x.tar").write_bytes(data[:last] + b"\x07" * 512 + data[last + 512 :])


def parquet(columns: dict[str, list[Any]]) -> Callable[[Path], object]:
    return lambda root: pq.write_table(pa.table(columns), root / "x.parquet")


def cut_parquet(root: Path) -> None:
    parquet({"image": [png()], "text": ["a caption"]})(root)
    (root / "x.parquet").write_bytes((root / "x.parquet").read_bytes()[:-20])


def hollow_parquet(root: Path) -> None:
    """Write a Parquet file with an intact footer and damaged pages."""
    parquet({"image": [noise_png(n) for n in range(3)], "text": ["a caption"] * 3})(root)
    data = (root / "x.parquet").read_bytes()
    (root / "x.parquet").write_bytes(data[:200] + bytes(400) + data[600:])


def noise_png(seed: int) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return save(Image.fromarray(values), "PNG")


def edge_mask() -> bytes:
    """Return a mask that is white only at the left edge, which a square crop cuts off."""
    mask = Image.new("L", (640, 64))
    mask.paste(255, (0, 0, 64, 64))
    return save(mask, "PNG")


def loop(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub/up").symlink_to(root)


def dangling(root: Path) -> None:
    (root / "a.jpg").symlink_to(root / "nowhere.jpg")


def closed(root: Path) -> None:
    (root / "a.png").chmod(0)


A, A_TEXT = ("a.png", png()), ("a.txt", b"a caption")
LONG = " ".join(f"word{n}" for n in range(8000))
NESTED = "[" * 100_000
ROWS_WITHOUT_FILE = '{"text": "nameless"}\n{"file": "a.png", "text": "a caption"}'
GOOD_ROW = '{"file": "a.png", "text": "a caption"}'

GOOD: dict[str, bytes | str] = {"a.png": png(), "a.txt": "a caption"}
GOOD_B: dict[str, bytes | str] = {"b.png": png(), "b.txt": "a caption"}
HUGE_MEMBER = {"x.tar/a.png": Used(), "x.tar/b.png": "file_too_large", "x.tar": "broken_tar"}
HUGE_HEADER = {"x.tar/a.png": Used(), "x.tar/b": "missing_file", "x.tar": "broken_tar"}


def broken_table(name: str, text: str | bytes, **keys: Any) -> Case:
    return table(name, text, {name: "broken_table", "a.png": "no_caption"}, **keys)


CASES: dict[str, Case] = {
    # --- images that cannot be used
    "a JPEG cut short": image(save(noise(), "JPEG")[:-1500], "truncated"),
    "a PNG cut short": image(save(noise(), "PNG")[:-3000], "truncated", "a.png"),
    "a GIF cut short": image(save(noise("L"), "GIF")[:-1500], "truncated", "a.gif"),
    "a WebP cut short": image(save(noise(), "WEBP")[:-500], "truncated|broken_image|not_an_image", "a.webp"),
    "a PNG of a few bytes": image(save(noise(), "PNG")[:20], "truncated", "a.png"),
    "a JPEG of a few bytes": image(save(noise(), "JPEG")[:30], "truncated"),
    "a PNG scrambled in the middle": image(scrambled_png(), "broken_image", "a.png"),
    "an empty file": image(b"", "empty_file"),
    "a web page": image(PAGE.encode(), "not_an_image"),
    "zeros": image(bytes(5000), "not_an_image"),
    "EPS by another name": image(save(halves(), "EPS"), "not_an_image"),
    "a decompression bomb": image(png_header(20_000, 20_000), "too_large", "a.png"),
    "a bomb just past the limit": image(png_header(178_000, 1_001), "too_large", "a.png"),
    "a sparse file of 1 TB": Case({"a.png": "file_too_large"}, GOOD, then=sparse("a.png")),
    "a sparse mask of 1 TB": Case(
        {"a.png": "file_too_large"}, {**GOOD, "masks/a.png": png()}, {"mask_path": "masks"}, sparse("masks/a.png")
    ),
    "an image without a rejected one": Case(
        {"a.png": "no_rejected", "b.png": Used()}, {**GOOD, **GOOD_B, "worse/b.png": png()}, {"rejected": "worse"}
    ),
    "a sparse caption of 1 TB": Case({"a.png": "caption_too_long"}, GOOD, then=sparse("a.txt")),
    "a file above a configured limit": Case(
        {"a.png": "file_too_large", "b.png": Used()},
        {**GOOD, **GOOD_B, "a.png": save(noise(), "PNG")},
        {"max_image_mb": 0.002},
    ),
    "an image below min_side": Case({"a.png": "too_small"}, GOOD, {"min_side": 1000}),
    "an image that loses too much": Case(
        {"a.png": "crop_too_large", "b.png": Used()},
        {**GOOD, **GOOD_B, "a.png": save(Image.new("RGB", (640, 64)), "PNG")},
        {"max_crop": 0.8},
    ),
    "an image that would be enlarged": Case({"a.png": "would_be_enlarged"}, GOOD, {"no_upscale": True}),
    "a TIFF of floats": image(save(Image.new("F", (8, 8), 0.5), "TIFF"), "unsupported_mode", "a.tif"),
    "a TIFF of 32-bit integers": image(save(Image.new("I", (8, 8), 1 << 20), "TIFF"), "unsupported_mode", "a.tif"),
    "a LAB TIFF": image(save(Image.new("LAB", (8, 8)), "TIFF"), "unsupported_mode", "a.tif"),
    "a format that is not read": image(b"\0\0\0\x18ftypheic", "unsupported_format", "a.heic"),
    "a dangling link": Case({"a.jpg": "unreadable"}, {"a.txt": "a caption"}, then=dangling),
    "a closed file": Case({"a.png": "unreadable"}, GOOD, then=closed),
    "a name that is not UTF-8": image(png(), "name_not_utf8", os.fsdecode(b"caf\xe9.png")),
    # --- unusual images that are used
    "a PNG named .jpg": image(save(halves(), "PNG"), Used(RED, BLUE)),
    "a suffix in capitals": image(save(halves(), "PNG"), Used(RED, BLUE), "a.PNG"),
    "on its side by EXIF": image(save(halves(size=(32, 32)), "JPEG", quality=95, exif=exif(6)), Used(RED, RED)),
    "one pixel": image(save(Image.new("RGB", (1, 1), RED), "PNG"), Used(RED, RED), "a.png"),
    # --- captions
    "no caption": Case({"a.png": "no_caption"}, {"a.png": png()}),
    "an empty caption, kept": caption("", ("",)),
    "an empty caption, unwanted": Case(
        {"a.png": "empty_caption", "b.png": Used(captions=("photo: b",))},
        {"a.png": png(), "a.txt": " \n", "b.png": png(), "b.txt": "b"},
        {"skip_empty_caption": True, "caption_prefix": "photo: "},
    ),
    "latin-1": caption("café".encode("latin-1"), "caption_not_utf8"),
    "UTF-16": caption("a caption".encode("utf-16"), "caption_not_utf8"),
    "a byte-order mark": caption(b"\xef\xbb\xbfa caption", ("a caption",)),
    "Windows line ends": caption(b"a\r\ncaption\r\n", ("a caption",)),
    "thousands of words": caption(LONG, (LONG,)),
    "2 MB": caption("x" * (2 * MB), "caption_too_long"),
    "a caption without an image": Case({"a.txt": "missing_file"}, {"a.txt": "a caption"}),
    # --- caption tables
    "half a surrogate pair": table("captions.json", r'{"a.png": "half \ud83d"}', {"a.png": "caption_not_utf8"}),
    "a number for a caption": table("captions.json", '{"a.png": 7}', {"a.png": "bad_caption"}),
    "a list with a number": table("captions.json", '{"a.png": ["x", 7]}', {"a.png": "bad_caption"}),
    "null for a caption": table("captions.json", '{"a.png": null}', {"a.png": "no_caption"}),
    "an empty list of captions": table("captions.json", '{"a.png": []}', {"a.png": "no_caption"}),
    "2 MB in a table": table("captions.json", json.dumps({"a.png": "x" * (2 * MB)}), {"a.png": "caption_too_long"}),
    "a table that names what is not there": table(
        "captions.json", '{"a.png": "a caption", "b.png": "b"}', {"a.png": Used(), "b.png": "missing_file"}
    ),
    "a damaged captions.json": broken_table("captions.json", '{"a.png": "a caption", '),
    "nothing but brackets": broken_table("metadata.json", NESTED),
    "a table of UTF-16": broken_table("metadata.json", GOOD_ROW.encode("utf-16")),
    "a CSV without its columns": broken_table("metadata.csv", "width,height\n1,2\n"),
    "a CSV without the configured column": broken_table("metadata.csv", "file,text\na.png,x\n", caption_column="alt"),
    "a CSV row of latin-1": table("metadata.csv", b"file,text\na.png,caf\xe9\n", {"a.png": "caption_not_utf8"}),
    "a row that names no file": table(
        "metadata.jsonl", ROWS_WITHOUT_FILE, {"metadata.jsonl:byte 0": "broken_row", "a.png": Used()}
    ),
    "a row that is not JSON": table(
        "metadata.jsonl", "{broken\n" + GOOD_ROW, {"metadata.jsonl:byte 0": "broken_row", "a.png": Used()}
    ),
    "a text where a number is needed": table(
        "metadata.csv", "file,text,score\na.png,x,high\n", {"a.png": "bad_column"}, where="score > 5"
    ),
    # --- tars
    "a tar cut short": Case({"x.tar/0.png": Used(), "x.tar/1": "missing_file", "x.tar": "broken_tar"}, then=cut_tar),
    "a tar with a damaged header": Case(
        {"x.tar/0.png": Used(), "x.tar/1.png": Used(), "x.tar": "broken_tar"}, then=garbled_tar
    ),
    "a tar that is none": Case({"x.tar": "broken_tar"}, {"x.tar": PAGE}),
    "an empty tar": Case({"x.tar": "broken_tar"}, {"x.tar": b""}),
    "a compressed tar": Case({"x.tar.gz": "unsupported_format"}, {"x.tar.gz": b"\x1f\x8b"}),
    "a member of 2^62 bytes": Case(HUGE_MEMBER, then=declaring(1 << 62)),
    "a member of 2^70 bytes": Case(HUGE_MEMBER, then=declaring(1 << 70)),
    "a member of 2^62 bytes without a limit": Case(
        {**HUGE_MEMBER, "x.tar/b.png": "truncated"}, {}, {"max_image_mb": 1e30}, declaring(1 << 62)
    ),
    "a long name of 2^62 bytes": Case(HUGE_HEADER, then=declaring(1 << 62, tarfile.GNUTYPE_LONGNAME)),
    "a PAX header of 2^62 bytes": Case(HUGE_HEADER, then=declaring(1 << 62, tarfile.XHDTYPE)),
    "a member twice": in_tar("a.png", [Used(), "duplicate_key"], A, A_TEXT, A, ("a.txt", b"again")),
    "a member without a caption": in_tar("a.png", "no_caption", A),
    "a member without an image": in_tar("a", "missing_file", A_TEXT),
    "a member whose image is broken": in_tar("a.png", "truncated", ("a.png", save(noise(), "PNG")[:-3000]), A_TEXT),
    "a member with a caption of latin-1": in_tar("a.png", "caption_not_utf8", ("./a.png", png()), ("./a.txt", b"\xe9")),
    "a dotted name of a member": in_tar("dir/dotted", "missing_file", ("dir/dotted.x.png", png()), (".hidden", b"")),
    "a member whose JSON is broken": in_tar("a.png", "bad_caption", A, ("a.json", b"{")),
    # --- Parquet
    "Parquet without images": Case({"x.parquet": "no_image_column"}, then=parquet({"url": ["u"], "text": ["t"]})),
    "Parquet without captions": Case({"x.parquet": "no_caption_column"}, then=parquet({"image": [png()], "n": [1]})),
    "Parquet without its footer": Case({"x.parquet": "broken_parquet"}, then=cut_parquet),
    "Parquet with a hole": Case({f"x.parquet/{n:09d}": "unreadable" for n in range(3)}, then=hollow_parquet),
    "Parquet that is none": Case({"x.parquet": "broken_parquet"}, {"x.parquet": PAGE}),
    "a null for an image": in_parquet([Used(), "empty_file"], {"image": [png(), None], "text": ["a caption", "b"]}),
    "a null for a caption": in_parquet(["no_caption"], {"image": [png()], "text": pa.array([None], pa.string())}),
    "a list of captions": in_parquet([Used(captions=("one", "two"))], {"image": [png()], "text": [["one", "two"]]}),
    "a cell above a configured limit": in_parquet(
        [Used(), "file_too_large", Used()],
        {"image": [png(), save(noise(), "PNG"), png()], "text": ["a caption"] * 3},
        max_image_mb=0.002,
    ),
    "a struct whose bytes are a list": Case(
        {"x.parquet": "no_image_column"}, then=parquet({"image": [{"bytes": [1, 2]}], "text": ["a caption"]})
    ),
    # --- folders
    "a link to a folder above": Case({"sub/up": "folder_loop"}, then=loop),
    # --- masks
    "a black mask": masked(save(Image.new("L", (64, 64)), "PNG"), "empty_mask"),
    "a mask that is white outside the crop only": masked(
        edge_mask(), "empty_mask", save(Image.new("RGB", (640, 64)), "PNG")
    ),
    "a mask of another size": masked(save(halves("L", 255, 0, size=(20, 10)), "PNG"), Used(RED, BLUE, mask=(255, 0))),
    "a transparent mask": masked(
        save(halves("RGBA", (*WHITE, 255), (*WHITE, 0), size=(64, 64)), "PNG"), Used(RED, BLUE, mask=(255, 0))
    ),
    "a broken mask": masked(PAGE.encode(), "not_an_image"),
    "an empty mask file": masked(b"", "empty_file"),
}


def outcome(record: Record, here: DirectoryConfig) -> Used:
    """Process a record like the cache stage; raises Reject."""
    data = record.image.read()
    size = probe(data)
    if reason := misfit(*size, here):
        raise Reject(reason)
    ((_, _, how),) = fits(*size, here)
    weights = None if record.mask is None else fit_mask(decode_mask(record.mask.read()), how)
    pixels = fit(decode(data), how).astype(int)
    assert pixels.shape == (64, 64, 3)
    mask = None if weights is None else (int(weights[0, 0]), int(weights[0, -1]))
    return Used(pixels[8, 1], pixels[8, -2], record.captions, mask)


def outcomes(here: DirectoryConfig) -> dict[str, list[str | Used]]:
    """Return the outcomes of all inputs of a directory."""
    ends: dict[str, list[str | Used]] = {}
    for item in scan(here, 0):
        try:
            if isinstance(item, Rejected):
                raise Reject(item.reason, item.detail)
            end: str | Used = outcome(item, here)
        except Reject as reject:
            end = reject.reason
        ends.setdefault(item.key.split("/", 1)[1], []).append(end)
    return ends


@pytest.mark.parametrize("kind", CASES)
def test_every_kind_of_input_has_the_expected_outcome(tmp_path: Path, kind: str) -> None:
    case = CASES[kind]
    if case.then is closed and os.geteuid() == 0:
        pytest.skip("nothing is closed to root")
    root = write_files(tmp_path / "set", case.files)
    root.mkdir(exist_ok=True)
    case.then(root)
    keys = {key: root / value if key in ("mask_path", "rejected") else value for key, value in case.keys.items()}
    ends = outcomes(directory(root, **keys))
    named = {name.encode("utf-8", "backslashreplace").decode(): end for name, end in case.outcome.items()}
    expected = {name: end if isinstance(end, list) else [end] for name, end in named.items()}
    assert sorted(ends) == sorted(expected)
    for name, wanted in expected.items():
        for end, expected in zip(ends[name], wanted, strict=True):
            check(end, expected)


def check(end: str | Used, expected: str | Used) -> None:
    if isinstance(expected, str):
        assert end in expected.split("|")
        assert set(expected.split("|")) <= set(REASONS)
        return
    assert isinstance(end, Used)
    assert end.captions == expected.captions
    assert end.mask == expected.mask
    for pixel, colour in ((end.left, expected.left), (end.right, expected.right)):
        assert colour is None or abs(pixel - np.array(colour)).max() <= 6


def test_every_reason_is_covered() -> None:
    ends = [end for case in CASES.values() for end in case.outcome.values()]
    single = [outcome for end in ends for outcome in (end if isinstance(end, list) else [end])]
    covered = {reason for end in single if isinstance(end, str) for reason in end.split("|")}
    # these three need a running cache stage
    of_videos = {"not_a_video", "broken_video", "no_video_stream", "too_short"}  # test_video.py
    of_others = of_videos | {"no_reference"}  # tests/unit/families/test_references.py
    assert set(REASONS) - covered - of_others <= {"decoder_crashed", "changed_meanwhile", "shard_failed"}
