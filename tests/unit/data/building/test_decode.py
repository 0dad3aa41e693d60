"""What workers do with pictures: looking and decoding tell the same story, and a change between them is noticed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd3_light.data.buckets import Bucket, plan
from sd3_light.data.building.decode import (
    Decoded,
    DecodeTask,
    Probe,
    SampleLocation,
    content_digest,
    crashed_decode,
    crashed_probe,
    decode_images,
    probe_images,
)
from sd3_light.data.preprocess import REASONS, decode, decode_mask, fit, fit_mask
from sd3_light.data.sources.records import FileBytes
from tests.unit.data.inputs import exif, halves, noise, palette, save

BUCKET = Bucket(48, 64)


def place(folder: Path, image: bytes, mask: bytes | None = None) -> SampleLocation:
    """A picture and its mask on disk."""
    (folder / "image").write_bytes(image)
    if mask is not None:
        (folder / "mask").write_bytes(mask)
    return SampleLocation(FileBytes(str(folder / "image")), None if mask is None else FileBytes(str(folder / "mask")))


def seen(where: SampleLocation) -> Probe:
    (found,) = probe_images([where])
    return found


def decoded(where: SampleLocation, bucket: Bucket = BUCKET) -> Decoded:
    (found,) = decode_images([DecodeTask(where, seen(where), bucket)])
    return found


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (save(noise(size=(64, 48)), "PNG"), (64, 48)),
        (save(noise(size=(64, 48)), "JPEG", exif=exif(6)), (48, 64)),
        (save(noise("L", (20, 200)), "PNG"), (20, 200)),
        (palette(0), (32, 16)),
    ],
    ids=["plain", "turned", "grey", "palette"],
)
def test_the_look_and_the_decoding_agree_with_preprocess(tmp_path: Path, image: bytes, size: tuple[int, int]) -> None:
    where = place(tmp_path, image)
    looked = seen(where)
    assert (looked.width, looked.height, looked.reason) == (*size, "")
    assert looked.digest == content_digest(image, None)
    found = decoded(where)
    assert found.pixels is not None
    assert found.pixels.shape == (64, 48, 3)
    assert np.array_equal(found.pixels, fit(decode(image), plan(*size, BUCKET)))
    assert (found.mask, found.reason, found.detail) == (None, "", "")


def test_many_are_done_at_once_and_bad_ones_stand_in_their_place(tmp_path: Path) -> None:
    places = []
    for number, data in enumerate([save(noise(), "PNG"), b"", save(halves(), "PNG"), b"no picture"]):
        (tmp_path / str(number)).mkdir()
        places.append(place(tmp_path / str(number), data))
    places.append(SampleLocation(FileBytes(str(tmp_path / "nowhere")), None))
    looked = probe_images(places)
    assert [one.reason for one in looked] == ["", "empty_file", "", "not_an_image", "unreadable"]
    assert "nowhere" in looked[4].detail
    tasks = [DecodeTask(where, one, BUCKET) for where, one in zip(places, looked, strict=True) if not one.reason]
    assert [one.pixels is not None for one in decode_images(tasks)] == [True, True]


def test_what_only_decoding_shows_is_a_reject_too(tmp_path: Path) -> None:
    data = save(noise(size=(64, 64)), "PNG")
    found = decoded(place(tmp_path, data[: len(data) // 2]))
    assert found.pixels is None
    assert found.reason in ("truncated", "broken_image")


@pytest.mark.parametrize("which", ["image", "mask"])
def test_a_file_that_changed_since_the_look_is_not_encoded(tmp_path: Path, which: str) -> None:
    where = place(tmp_path, save(noise(), "PNG"), save(halves("L", 255, 0), "PNG"))
    task = DecodeTask(where, seen(where), BUCKET)
    (tmp_path / which).write_bytes(save(halves("L", 9, 8), "PNG"))
    (found,) = decode_images([task])
    assert (found.pixels, found.mask, found.reason) == (None, None, "changed_meanwhile")


def test_a_file_that_went_since_the_look_is_named(tmp_path: Path) -> None:
    where = place(tmp_path, save(noise(), "PNG"))
    task = DecodeTask(where, seen(where), BUCKET)
    (tmp_path / "image").unlink()
    assert decode_images([task])[0].reason == "unreadable"


# --- masks ---------------------------------------------------------------------------------------


def test_a_mask_comes_at_latent_size_with_its_pictures_crop(tmp_path: Path) -> None:
    image, mask = save(noise(size=(64, 48)), "PNG"), save(halves("L", 255, 0, (128, 96)), "PNG")
    found = decoded(place(tmp_path, image, mask))
    assert found.mask is not None
    assert found.mask.shape == (8, 6)
    assert np.array_equal(found.mask, fit_mask(decode_mask(mask), plan(64, 48, BUCKET)))
    assert (found.mask[:, :3] == 255).all()
    assert (found.mask[:, 4:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "reason"),
    [(b"", "empty_file"), (b"no picture", "not_an_image"), (save(Image.new("L", (64, 48), 0), "PNG"), "empty_mask")],
)
def test_a_mask_that_cannot_be_used_rejects_its_sample(tmp_path: Path, mask: bytes, reason: str) -> None:
    where = place(tmp_path, save(noise(), "PNG"), mask)
    assert seen(where).reason == "", "the look opens pictures only"
    found = decoded(where)
    assert (found.pixels, found.mask, found.reason) == (None, None, reason)


def test_the_hash_tells_every_mask_from_every_other_and_from_none() -> None:
    """An empty mask is a reject: a sample must not stay rejected when the empty file is taken away."""
    contents = [
        (b"ab", None),
        (b"ab", b""),
        (b"ab", b"c"),
        (b"a", b"bc"),
        (b"abc", None),
        (b"abmask", None),
        (b"", b""),
    ]
    digests = [content_digest(*content) for content in contents]
    assert len(set(digests)) == len(contents)
    assert digests == [content_digest(*content) for content in contents]


# --- the process ---------------------------------------------------------------------------------


def test_a_crash_has_a_reason_that_people_can_look_up(tmp_path: Path) -> None:
    where = place(tmp_path, b"")
    assert crashed_probe(where).reason in REASONS
    crashed = crashed_decode(DecodeTask(where, Probe(1, 1, ""), BUCKET))
    assert crashed.reason in REASONS
    assert crashed.pixels is None


def test_a_worker_needs_no_torch() -> None:
    code = "import sys, sd3_light.data.building.decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
