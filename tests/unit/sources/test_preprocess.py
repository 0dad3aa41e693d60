import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.preprocess import Reject, decode, decode_mask, fit, fit_mask, probe
from tests.unit.sources.inputs import (
    BLACK,
    BLUE,
    ORIENTATION,
    RED,
    WHITE,
    animated,
    as_srgb,
    exif,
    halves,
    late_exif_png,
    linear_grey,
    noise,
    palette,
    save,
    wide_gamut,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")

GREY_16 = Image.fromarray(np.array([[0, 257 * 100] * 8, [257 * 200, 65535] * 8], dtype=np.uint16))
SRGB = {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}

# kind -> (bytes, size, pixel at the left, pixel at the right)
GOOD: dict[str, tuple[Callable[[], bytes], tuple[int, int], Any, Any]] = {
    "jpeg": (lambda: save(halves(), "JPEG", quality=95), (32, 16), RED, BLUE),
    "jpeg progressive": (lambda: save(halves(), "JPEG", quality=95, progressive=True), (32, 16), RED, BLUE),
    "png": (lambda: save(halves(), "PNG"), (32, 16), RED, BLUE),
    "webp": (lambda: save(halves(), "WEBP", lossless=True), (32, 16), RED, BLUE),
    "avif": (lambda: save(halves(), "AVIF", quality=100), (32, 16), RED, BLUE),
    "bmp": (lambda: save(halves(), "BMP"), (32, 16), RED, BLUE),
    "tiff": (lambda: save(halves(), "TIFF"), (32, 16), RED, BLUE),
    "tiff deflate": (lambda: save(halves(), "TIFF", compression="tiff_deflate"), (32, 16), RED, BLUE),
    "ppm": (lambda: save(halves(), "PPM"), (32, 16), RED, BLUE),
    "jpeg 2000": (lambda: save(halves(), "JPEG2000"), (32, 16), RED, BLUE),
    "grey L": (lambda: save(halves("L", 0, 255), "PNG"), (32, 16), BLACK, WHITE),
    "grey JPEG": (lambda: save(halves("L", 0, 255), "JPEG"), (32, 16), BLACK, WHITE),
    "one bit": (lambda: save(halves("1", 0, 1), "PNG"), (32, 16), BLACK, WHITE),
    "grey 16 bit PNG": (lambda: save(GREY_16, "PNG"), (16, 2), (0, 0, 0), (100, 100, 100)),
    "grey 16 bit TIFF": (lambda: save(GREY_16, "TIFF"), (16, 2), (0, 0, 0), (100, 100, 100)),
    "grey 16 bit PGM": (lambda: save(GREY_16.convert("I"), "PPM"), (16, 2), (0, 0, 0), (100, 100, 100)),
    "CMYK JPEG": (lambda: save(halves("CMYK", (0, 255, 255, 0), (255, 255, 0, 0)), "JPEG"), (32, 16), RED, BLUE),
    "CMYK TIFF": (lambda: save(halves("CMYK", (0, 255, 255, 0), (255, 255, 0, 0)), "TIFF"), (32, 16), RED, BLUE),
    "palette": (palette, (32, 16), RED, BLUE),
    "palette, transparent": (lambda: palette(1), (32, 16), RED, WHITE),
    "PA": (lambda: save(halves("RGBA", (*RED, 255), (*BLUE, 0)).convert("PA"), "TIFF"), (32, 16), RED, WHITE),
    "RGBA": (lambda: save(halves("RGBA", (*RED, 255), (*BLACK, 0)), "PNG"), (32, 16), RED, WHITE),
    "RGBA half": (lambda: save(halves("RGBA", (*RED, 255), (*BLACK, 128)), "PNG"), (32, 16), RED, (127,) * 3),
    "RGBA WebP": (lambda: save(halves("RGBA", (*RED, 255), (*BLUE, 0)), "WEBP", lossless=True), (32, 16), RED, WHITE),
    "LA": (lambda: save(halves("LA", (0, 255), (0, 0)), "PNG"), (32, 16), BLACK, WHITE),
    "L, one grey transparent": (lambda: save(halves("L", 0, 7), "PNG", transparency=7), (32, 16), BLACK, WHITE),
    "RGB, one colour transparent": (lambda: save(halves(), "PNG", transparency=BLUE), (32, 16), RED, WHITE),
    "animated GIF": (lambda: animated("GIF"), (32, 16), RED, BLUE),
    "animated WebP": (lambda: animated("WEBP", lossless=True), (32, 16), RED, BLUE),
    "APNG": (lambda: animated("PNG"), (32, 16), RED, BLUE),
    "TIFF of pages": (lambda: animated("TIFF"), (32, 16), RED, BLUE),
    "MPO": (lambda: animated("MPO", quality=95), (32, 16), RED, BLUE),
    "EXIF 3": (lambda: save(halves(), "JPEG", quality=95, exif=exif(3)), (32, 16), BLUE, RED),
    "EXIF 6": (lambda: save(halves(), "JPEG", quality=95, exif=exif(6)), (16, 32), RED, RED),
    "EXIF 8": (lambda: save(halves(), "JPEG", quality=95, exif=exif(8)), (16, 32), BLUE, BLUE),
    "EXIF 0": (lambda: save(halves(), "JPEG", quality=95, exif=exif(0)), (32, 16), RED, BLUE),
    "EXIF in PNG": (lambda: save(halves(), "PNG", exif=exif(6)), (16, 32), RED, RED),
    "EXIF behind the pixels": (late_exif_png, (16, 32), RED, RED),
    "EXIF in WebP": (lambda: save(halves(), "WEBP", lossless=True, exif=exif(6)), (16, 32), RED, RED),
    "EXIF in TIFF": (lambda: save(halves(), "TIFF", tiffinfo={ORIENTATION: 6}), (16, 32), RED, RED),
    "EXIF in AVIF": (lambda: save(halves(), "AVIF", quality=100, exif=exif(6)), (16, 32), RED, RED),
    "sRGB profile": (lambda: save(halves(), "PNG", **SRGB), (32, 16), RED, BLUE),
    "profile and alpha": (lambda: save(halves("RGBA", (*RED, 255), (*BLUE, 0)), "PNG", **SRGB), (32, 16), RED, WHITE),
    "sRGB profile on grey": (lambda: save(halves("L", 9, 99), "PNG", **SRGB), (32, 16), (9,) * 3, (99,) * 3),
    "1x1": (lambda: save(Image.new("RGB", (1, 1), RED), "PNG"), (1, 1), RED, RED),
    "very wide": (lambda: save(halves(size=(9000, 2)), "PNG"), (9000, 2), RED, BLUE),
}


def test_16_bit_grey_is_rounded() -> None:
    values = np.array([[257 * 100 + 128, 257 * 100 + 129, 257 * 100 - 128, 257 * 100 - 129]], dtype=np.uint16)
    assert np.asarray(decode(save(Image.fromarray(values), "PNG")))[0, :, 0].tolist() == [100, 101, 100, 99]


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_of_image_becomes_upright_srgb(kind: str) -> None:
    make, size, left, right = GOOD[kind]
    data = make()
    image = decode(data)
    assert image.mode == "RGB"
    assert image.size == size
    assert probe(data) == size
    pixels = np.asarray(image).astype(int)
    assert abs(pixels[0, 0] - left).max() <= 6
    assert abs(pixels[0, -1] - right).max() <= 6


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_any_damage_gives_an_image_or_a_reject(kind: str) -> None:
    whole = save(noise(size=(24, 16)), kind, **({"exif": exif(6)} if kind in ("JPEG", "PNG", "WEBP", "AVIF") else {}))
    rng = random.Random(kind)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(min(len(data), rng.choice((40, 400, 10**6))))] = rng.randrange(256)
        cut = bytes(data[: rng.randint(len(data) // 2, len(data))])
        for use in (decode, decode_mask, probe):
            with contextlib.suppress(Reject):
                use(cut)


def test_profiles_are_converted() -> None:
    colour = (100, 180, 90)
    image = decode(save(Image.new("RGB", (4, 4), colour), "PNG", icc_profile=wide_gamut()))
    assert abs(np.array(image.getpixel((0, 0))) - as_srgb(colour)).max() <= 2
    assert abs(np.array(colour) - as_srgb(colour)).max() > 10
    for mode, value in (("L", 55), ("LA", (55, 255))):
        image = decode(save(Image.new(mode, (4, 4), value), "PNG", icc_profile=linear_grey()))
        assert abs(np.array(image.getpixel((0, 0))) - 128).max() <= 3


@pytest.mark.parametrize(
    "data",
    [
        lambda: save(halves(), "PNG", icc_profile=b"no profile at all"),
        lambda: save(halves(), "PNG", icc_profile=wide_gamut()[:150]),
        lambda: save(halves(), "PNG", icc_profile=linear_grey()),
        lambda: save(halves(), "JPEG", quality=95, exif=exif(77)),
    ],
)
def test_unusable_profiles_and_exif_are_ignored(data: Callable[[], bytes]) -> None:
    image = decode(data())
    assert image.size == halves().size
    assert abs(np.array(image.getpixel((0, 0))) - RED).max() <= 6


def test_a_profile_for_another_colour_space_is_ignored() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    image = decode(save(cmyk, "JPEG", icc_profile=wide_gamut()))
    assert image.getpixel((0, 0)) == decode(save(cmyk, "JPEG")).getpixel((0, 0))


def test_fit_is_resize_then_crop() -> None:
    for size, bucket in (((200, 120), Bucket(64, 64)), ((33, 90), Bucket(64, 48)), ((64, 48), Bucket(64, 48))):
        image = decode(save(noise(size=size).resize((20, 12)).resize(size), "PNG"))
        how = resize_for(*size, bucket)
        pixels = fit(image, how)
        assert pixels.shape == (bucket.height, bucket.width, 3)
        assert pixels.dtype == np.uint8
        expected = np.asarray(image.resize(how.resized, Image.Resampling.LANCZOS).crop(how.crop))
        assert abs(pixels.astype(int) - expected).max() <= 1


def test_fit_of_extreme_shapes_takes_the_middle() -> None:
    for size in ((1, 1), (1, 70_001), (200_001, 1), (3_000_001, 3)):
        image = Image.new("RGB", size, RED)
        middle = size[0] // 2, size[1] // 2
        image.paste(BLUE, (middle[0], middle[1], middle[0] + 1, middle[1] + 1))
        pixels = fit(image, resize_for(*size, Bucket(32, 32)))
        assert abs(pixels[16, 16].astype(int) - BLUE).max() <= 2


@pytest.mark.parametrize(
    "mask",
    [
        halves("L", 255, 0),
        halves("RGB", WHITE, BLACK),
        halves("1", 1, 0),
        halves("RGBA", (*WHITE, 255), (*WHITE, 0)),
        halves("LA", (255, 255), (255, 0)),
        halves("L", 255, 0, size=(320, 160)),
        Image.fromarray(np.repeat([[65535, 0]], 16, axis=1).repeat(16, axis=0).astype(np.uint16)),
    ],
)
def test_masks_of_all_kinds_and_sizes(mask: Image.Image) -> None:
    weights = fit_mask(decode_mask(save(mask, "PNG")), resize_for(128, 64, Bucket(64, 32)))
    assert weights.shape == (4, 8)
    assert weights.dtype == np.uint8
    assert (weights[:, :4] == 255).all()
    assert (weights[:, 4:] == 0).all()


def test_masks_are_averaged_by_area_and_cropped_like_the_image() -> None:
    mask = np.zeros((64, 128), dtype=np.uint8)
    mask[:, :36] = 255  # 32 columns are cropped away; half of the first latent column is left
    weights = fit_mask(decode_mask(save(Image.fromarray(mask), "PNG")), resize_for(128, 64, Bucket(64, 64)))
    assert weights[:, 0].tolist() == [128] * 8
    assert not weights[:, 1:].any()
