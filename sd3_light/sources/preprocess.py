"""Decode images to the pixels that the VAE sees, and masks to one weight per latent pixel.

Every input becomes an upright 8-bit sRGB image over white, or a `Reject` with a reason. Nothing in a file is executed:
formats whose readers call other programs are not opened.
"""

import io
import math
import struct
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, UnidentifiedImageError

from sd3_light.core.columns import MASK_FACTOR
from sd3_light.sources.buckets import Resize, Size

PREPROCESS_VERSION = 1
"""Part of a cache's fingerprint: increase it whenever the same bytes would give different pixels."""

MAX_PIXELS = 178_000_000
"""Larger images are rejected before they are decoded (just below the limit of Pillow itself)."""

THUMBNAIL_SIDE = 16
"""Width and height of the thumbnails that similar images are found by."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""Supported formats, as Pillow names them. EPS is excluded: reading it would run Ghostscript."""

REASONS = {
    # images, videos and masks
    "empty_file": "the file is empty",
    "not_an_image": "the bytes are not of a supported image format",
    "truncated": "the file is truncated",
    "broken_image": "the header is that of an image, but the rest cannot be decoded",
    "too_large": f"more than {MAX_PIXELS // 1_000_000} megapixels",
    "file_too_large": "the file, tar member or Parquet cell is larger than max_image_mb",
    "unsupported_mode": "the pixel format has no direct conversion to RGB (floats, 32-bit integers, LAB)",
    "decoder_crashed": "the decoder process crashed on this file",
    "not_a_video": "the bytes are not of a supported video format",
    "broken_video": "the file is a video, but it cannot be decoded",
    "no_video_stream": "the file has no video stream, such as one with sound only",
    "too_short": "the video has fewer frames than requested at the requested rate",
    "too_small": "a side is shorter than min_side",
    "crop_too_large": "more than max_crop of the image would be cropped off at every resolution",
    "would_be_enlarged": "no_upscale is on and the image is smaller than its bucket at every resolution",
    "empty_mask": "the mask is zero everywhere inside the crop, so the sample has no effect on training",
    "no_rejected": "the folder `rejected` has no image of this name",
    "no_reference": "a folder of `references` has no image of this name",
    # files
    "unreadable": "the file or folder could not be read",
    "changed_meanwhile": "the file changed while it was being cached; the next run uses the new version",
    "shard_failed": "its shard could not be built on the Ray cluster in several tries; the next run tries again",
    "unsupported_format": "the image or archive format is not supported",
    "name_not_utf8": "the file's name is not UTF-8",
    "missing_file": "captions refer to it, but it does not exist",
    "duplicate_key": "an earlier sample has the same name",
    "folder_loop": "a link points to a parent folder",
    # captions
    "no_caption": "the image has no caption",
    "empty_caption": "the caption is empty and skip_empty_caption is on",
    "bad_caption": "the caption is not a text or a list of texts",
    "caption_not_utf8": "the caption is not UTF-8",
    "caption_too_long": "the caption file is too large to be a caption",
    "bad_column": "a column that `where` uses cannot be read, or is not of the type that it needs",
    # containers
    "broken_table": "captions.json or the metadata table cannot be parsed",
    "broken_row": "a row of a metadata table cannot be parsed or has no file name",
    "broken_tar": "the tar is damaged; samples before the damage are used",
    "broken_parquet": "the file is damaged or is not a Parquet file",
    "no_image_column": "the Parquet file has no column of image bytes",
    "no_caption_column": "the Parquet file has no text column",
}
"""Reason codes and their meaning. Codes are stable: reports and user scripts depend on them."""

TRANSIENT = ("unreadable", "changed_meanwhile", "shard_failed")
"""Reasons that can pass without a change of the file."""

# Exceptions that Pillow's readers raise on damaged input, found in their source and by corrupting files of every
# format. Only calls into Pillow are guarded by this list.
BROKEN = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, LookupError, TypeError, struct.error, zlib.error)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_PLAIN = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_PROFILE_MODES = {"RGB": ("RGB", "L"), "GRAY": ("L",), "CMYK": ("CMYK",)}
_DRAFT = (8 * THUMBNAIL_SIDE,) * 2  # a JPEG is decoded at the smallest scale above it, for its thumbnail
_FLOAT32_SIDE = 1 << 16
_REACH = 3  # pixels on either side that the widest kernel (Lanczos) uses at scale 1

Pixels = NDArray[np.uint8]


class Reject(Exception):
    """An input cannot be used. ``reason`` is a code of `REASONS`, ``detail`` describes this input."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def probe(data: bytes) -> Size:
    """Return width and height of the decoded image from its header. Raises Reject as `decode` does for headers."""
    image = _open(data)
    width, height = image.size
    return (height, width) if _orientation(image, data) in (5, 6, 7, 8) else (width, height)


def decode(data: bytes, draft: Size | None = None) -> Image.Image:
    """Decode the first frame to upright 8-bit sRGB over white; broken EXIF and profiles are ignored. Raises Reject.

    A JPEG is decoded faster, at a fraction of its size that is at least ``draft``, if that is given.
    """
    image = _load_upright(data, draft)
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    colours = _to_srgb(image)
    if alpha is not None:
        white = Image.new("RGB", colours.size, "white")
        white.paste(colours, mask=alpha)
        colours = white
    colours.info = {}
    return colours


def make_thumbnail(image: bytes, mask: bytes | None) -> bytes:
    """Return the colours of an image at `THUMBNAIL_SIDE`, with its mask as a fourth channel. Raises Reject."""
    # bilinear: a box of whole pixels would depend on the size of the image
    size = (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
    kernel = Image.Resampling.BILINEAR
    pixels = np.asarray(decode(image, _DRAFT).resize(size, kernel))
    if mask is not None:
        pixels = np.dstack([pixels, np.asarray(decode_mask(mask).resize(size, kernel))])
    return pixels.tobytes()


def fit(image: Image.Image, resize: Resize) -> Pixels:
    """Resize and crop a decoded image as planned, antialiased, to an array height x width x 3."""
    assert image.mode == "RGB", image.mode
    assert image.size == resize.source, (image.size, resize.source)
    # resizing only the crop gives the same image without holding the rest in memory
    return np.array(_resample(image, resize, resize.size, Image.Resampling.LANCZOS), dtype=np.uint8)


def decode_mask(data: bytes) -> Image.Image:
    """Decode a mask to 8-bit grey: white is trained on, black and transparent areas are not. Raises Reject."""
    image = _load_upright(data)
    if not image.has_transparency_data:
        return image.convert("L")
    colours = image.convert("RGBA")
    black = Image.new("RGB", image.size, "black")
    black.paste(colours.convert("RGB"), mask=colours.getchannel("A"))
    return black.convert("L")


def fit_mask(mask: Image.Image, resize: Resize, factor: int = MASK_FACTOR) -> Pixels:
    """Resize a mask to the latent resolution of an image (``factor`` times smaller) by area averaging, 0 to 255.

    A mask whose size differs from its image is stretched, so one default mask works for all shapes. Raises Reject if it
    is black inside the crop.
    """
    assert mask.mode == "L", mask.mode
    width, height = resize.size
    assert width % factor == height % factor == 0, (resize.size, factor)
    latent_size = width // factor, height // factor
    weights: Pixels = np.array(_resample(mask, resize, latent_size, Image.Resampling.BOX), dtype=np.uint8)
    if not weights.any():
        raise Reject("empty_mask", "all black inside the crop")
    return weights


def _resample(image: Image.Image, resize: Resize, size: Size, kernel: Image.Resampling) -> Image.Image:
    """Resize the part of ``image`` (the image or its mask) inside the crop to ``size``."""
    x = image.width / resize.resized[0]
    y = image.height / resize.resized[1]
    left, top, right, bottom = resize.crop
    box = left * x, top * y, min(right * x, image.width), min(bottom * y, image.height)
    if max(image.size) > _FLOAT32_SIDE:
        # Pillow stores the box in float32, too coarse far from the origin: crop first to move the origin
        reach = math.ceil(_REACH * max(x, y, 1)) + 1
        origin = max(0, math.floor(box[0]) - reach), max(0, math.floor(box[1]) - reach)
        end = min(image.width, math.ceil(box[2]) + reach), min(image.height, math.ceil(box[3]) + reach)
        image = image.crop((*origin, *end))
        box = box[0] - origin[0], box[1] - origin[1], box[2] - origin[0], box[3] - origin[1]
    return image.resize(size, kernel, box=box)


def _open(data: bytes, load: bool = False, draft: Size | None = None) -> Image.Image:
    """Open an image and with ``load`` decode its first frame, a JPEG no smaller than ``draft``. Raises Reject."""
    if not data:
        raise Reject("empty_file")
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
        if image.width * image.height > MAX_PIXELS:
            raise Reject("too_large", f"{image.width}x{image.height}")
        if draft:
            image.draft(None, draft)
        if load:
            image.load()
    except UnidentifiedImageError:
        raise Reject("not_an_image", f"starts with {data[:12]!r}") from None
    except _BOMB as error:
        raise Reject("too_large", str(error)) from error
    except BROKEN as error:
        reason = "truncated" if "truncated" in str(error).lower() else "broken_image"
        raise Reject(reason, f"{type(error).__name__}: {error}") from error
    return image


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Return the `FORMATS` that this Pillow supports; it would fail on every file if given an unknown one."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _load_upright(data: bytes, draft: Size | None = None) -> Image.Image:
    """Load the first frame with its orientation applied, in a mode that can be converted."""
    image = _open(data, load=True, draft=draft)
    orientation = _orientation(image, data)
    return _eight_bit(image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image)


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation that is left to apply, 1 if there is none or it is broken."""
    if image.format == "TIFF":  # Pillow applies it
        return 1
    # Pillow decodes a whole PNG to find EXIF data behind the pixels; searching for the chunk's name is faster
    if image.format == "PNG" and b"eXIf" not in data and b"Raw profile type" not in data:
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except BROKEN:
        return 1
    # many programs write 0 for "unknown"
    return orientation if orientation in range(1, 9) else 1


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode in _PLAIN:
        return image
    if image.mode not in _GREY_16:
        raise Reject("unsupported_mode", image.mode)
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise Reject("unsupported_mode", f"{image.mode} with values {values.min()} to {values.max()}")
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    grey.info = {key: image.info[key] for key in ("icc_profile",) if key in image.info}
    return grey


def _to_srgb(image: Image.Image) -> Image.Image:
    """Convert the colours without transparency to sRGB, with the embedded profile if it can be used."""
    profile = image.info.get("icc_profile")
    plain = _opaque(image)
    if not profile:
        return plain.convert("RGB")
    try:
        modes, transform = _transform(profile)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return plain.convert("RGB")
    if plain.mode not in modes:
        return plain.convert("RGB")
    converted = ImageCms.applyTransform(plain.convert(modes[0]), transform)
    assert converted is not None, "a transform that is not in place returns an image"
    return converted


def _opaque(image: Image.Image) -> Image.Image:
    """Convert to mode L, RGB or CMYK without transparency: original colours, not mixed with a background."""
    if image.mode in ("RGB", "L", "CMYK"):
        return image
    if image.mode in ("1", "LA"):
        return image.convert("L")
    # via RGBA, which preserves the values of a palette's transparent colours
    return image.convert("RGBA").convert("RGB") if image.has_transparency_data else image.convert("RGB")


@lru_cache(maxsize=16)  # most images share a few profiles
def _transform(profile: bytes) -> tuple[tuple[str, ...], ImageCms.ImageCmsTransform]:
    """Return the modes that a profile applies to, and its transform from the first of them to sRGB."""
    source = ImageCms.getOpenProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space.strip()
    if space not in _PROFILE_MODES:
        raise ValueError(f"a profile of {space}")
    modes = _PROFILE_MODES[space]
    srgb = ImageCms.createProfile("sRGB")
    intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
    flags = ImageCms.Flags.BLACKPOINTCOMPENSATION
    return modes, ImageCms.buildTransform(source, srgb, modes[0], "RGB", intent, flags)
