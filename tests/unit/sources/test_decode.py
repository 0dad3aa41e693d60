"""Probing and decoding images agree, and a change in between is noticed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd3_light.data.cache_plan import sample_fingerprint
from sd3_light.sources import decode as module
from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.decode import DecodeTask, Probe, SampleLocation, content_digest, decode_images, probe_images
from sd3_light.sources.preprocess import decode, decode_mask, fit, fit_mask
from sd3_light.sources.records import FileBytes
from tests.unit.sources.inputs import exif, halves, noise, palette, save

BUCKET = Bucket(48, 64)


def write_sample(folder: Path, image: bytes, mask: bytes | None = None) -> SampleLocation:
    (folder / "image").write_bytes(image)
    if mask is not None:
        (folder / "mask").write_bytes(mask)
    return SampleLocation(FileBytes(str(folder / "image")), None if mask is None else FileBytes(str(folder / "mask")))


def probe_one(location: SampleLocation) -> Probe:
    (probe,) = probe_images([location])
    return probe


def decoded(location: SampleLocation, bucket: Bucket = BUCKET) -> module.Decoded:
    (result,) = decode_images([DecodeTask(location, probe_one(location), bucket)])
    return result


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (save(noise(size=(64, 48)), "PNG"), (64, 48)),
        (save(noise(size=(64, 48)), "JPEG", exif=exif(6)), (48, 64)),
        (save(noise("L", (20, 200)), "PNG"), (20, 200)),
        (palette(0), (32, 16)),
    ],
    ids=["plain", "rotated", "grey", "palette"],
)
def test_probing_and_decoding_agree_with_preprocess(tmp_path: Path, image: bytes, size: tuple[int, int]) -> None:
    location = write_sample(tmp_path, image)
    probe = probe_one(location)
    assert (probe.width, probe.height, probe.reason) == (*size, "")
    assert (probe.digest, probe.mask_digest) == (content_digest(image), "")
    result = decoded(location)
    assert result.pixels is not None
    assert result.pixels.shape == (64, 48, 3)
    assert np.array_equal(result.pixels, fit(decode(image), resize_for(*size, BUCKET)))
    assert (result.mask, result.reason, result.detail) == (None, "", "")


def test_the_images_of_a_pair_are_fitted_each_by_its_own_size(tmp_path: Path) -> None:
    better, worse = save(noise(size=(64, 48)), "PNG"), save(halves(size=(20, 90)), "PNG")
    location = replace(write_sample(tmp_path, better), rejected=FileBytes(str(tmp_path / "worse")))
    (tmp_path / "worse").write_bytes(worse)
    probe = probe_one(location)
    assert (probe.digest, probe.rejected_digest) == (content_digest(better), content_digest(worse))
    result = decoded(location)
    assert result.worse is not None
    assert np.array_equal(result.worse, fit(decode(worse), resize_for(20, 90, BUCKET)))
    (tmp_path / "worse").write_bytes(b"no image")
    assert decoded(location).reason == "not_an_image"
    (tmp_path / "worse").unlink()
    assert probe_one(location).reason == "unreadable"


def test_results_of_a_batch_are_in_order_including_rejects(tmp_path: Path) -> None:
    locations = []
    for number, data in enumerate([save(noise(), "PNG"), b"", save(halves(), "PNG"), b"no image"]):
        (tmp_path / str(number)).mkdir()
        locations.append(write_sample(tmp_path / str(number), data))
    locations.append(SampleLocation(FileBytes(str(tmp_path / "nowhere")), None))
    probes = probe_images(locations)
    assert [probe.reason for probe in probes] == ["", "empty_file", "", "not_an_image", "unreadable"]
    assert "nowhere" in probes[4].detail
    each = zip(locations, probes, strict=True)
    tasks = [DecodeTask(location, probe, BUCKET) for location, probe in each if not probe.reason]
    assert [result.pixels is not None for result in decode_images(tasks)] == [True, True]


@pytest.mark.parametrize("which", ["image", "mask"])
def test_a_file_that_changed_since_the_probe_is_rejected(tmp_path: Path, which: str) -> None:
    location = write_sample(tmp_path, save(noise(), "PNG"), save(halves("L", 255, 0), "PNG"))
    task = DecodeTask(location, probe_one(location), BUCKET)
    (tmp_path / which).write_bytes(save(halves("L", 9, 8), "PNG"))
    (result,) = decode_images([task])
    assert (result.pixels, result.mask, result.reason) == (None, None, "changed_meanwhile")


def test_a_file_deleted_since_the_probe_is_unreadable(tmp_path: Path) -> None:
    location = write_sample(tmp_path, save(noise(), "PNG"))
    task = DecodeTask(location, probe_one(location), BUCKET)
    (tmp_path / "image").unlink()
    assert decode_images([task])[0].reason == "unreadable"


def test_a_mask_has_latent_size_and_the_crop_of_its_image_which_it_does_not_need(tmp_path: Path) -> None:
    """Only the mask is read for an image that is copied."""
    image, mask = save(noise(size=(64, 48)), "PNG"), save(halves("L", 255, 0, (128, 96)), "PNG")
    location = write_sample(tmp_path, image, mask)
    result = decoded(location)
    assert result.mask is not None
    assert result.mask.shape == (8, 6)
    assert np.array_equal(result.mask, fit_mask(decode_mask(mask), resize_for(64, 48, BUCKET)))
    assert (result.mask[:, :3] == 255).all()
    assert (result.mask[:, 4:] == 0).all()
    whole, probe = result, probe_one(location)
    (tmp_path / "image").unlink()
    (result,) = decode_images([DecodeTask(location, probe, BUCKET, copied=("image",))])
    assert (result.pixels, result.reason) == (None, "")
    assert np.array_equal(result.mask, whole.mask)
    (tmp_path / "mask").write_bytes(save(halves("L", 0, 255, (128, 96)), "PNG"))
    (result,) = decode_images([DecodeTask(location, probe, BUCKET, copied=("image",))])
    assert result.reason == "changed_meanwhile"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [(b"", "empty_file"), (b"no image", "not_an_image"), (save(Image.new("L", (64, 48), 0), "PNG"), "empty_mask")],
)
def test_an_unusable_mask_rejects_its_sample(tmp_path: Path, mask: bytes, reason: str) -> None:
    location = write_sample(tmp_path, save(noise(), "PNG"), mask)
    assert probe_one(location).reason == "", "the probe reads only the image header"
    result = decoded(location)
    assert (result.pixels, result.mask, result.reason) == (None, None, reason)


def test_digests_differ_for_every_mask_and_for_no_mask() -> None:
    """An empty mask rejects a sample, which must not stay rejected when the empty file is removed."""
    pairs = [(b"ab", None), (b"ab", b""), (b"ab", b"c"), (b"a", b"bc"), (b"abc", None), (b"abmask", None), (b"", b"")]
    digests = [(content_digest(image), "" if mask is None else content_digest(mask)) for image, mask in pairs]
    rows = [InputRow("key", digest=image, mask_digest=mask) for image, mask in digests]
    assert len({sample_fingerprint(row, ()) for row in rows}) == len(pairs)


def test_workers_do_not_import_torch() -> None:
    code = "import sys, sd3_light.sources.decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
