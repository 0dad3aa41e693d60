"""From the bytes of a picture to the pixels that the VAE sees; from the bytes of a mask to one weight a latent pixel.

Whatever a camera, an editor or the web may have written ends as upright 8-bit sRGB over white, or as a `Reject` that
says why not. Nothing that a file contains is executed: formats whose readers call other programs are not opened.
"""

import io
import math
import struct
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, UnidentifiedImageError

from sd3_light.data.buckets import ResizePlan, Size

PREPROCESS_VERSION = 1
"""Goes into a cache's fingerprint: raise it whenever the same bytes would give other pixels."""

MAX_PIXELS = 178_000_000
"""Larger pictures are refused before they are decoded (just below the limit at which Pillow itself refuses)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""What is opened, as Pillow names it. EPS is not among them: reading it would run Ghostscript."""

REASONS = {
    # pictures and masks
    "empty_file": "the file has no bytes",
    "not_an_image": "the bytes are of no picture format that is read here",
    "truncated": "the file ends before its content does",
    "broken_image": "the header is of a picture, the rest cannot be decoded",
    "too_large": f"more than {MAX_PIXELS // 1_000_000} megapixels",
    "unsupported_mode": "a pixel format without a plain meaning as colours (floats, 32-bit integers, LAB)",
    "decoder_crashed": "the decoder's process died of this file",
    "empty_mask": "the mask is zero everywhere inside the crop, so the sample would teach nothing",
    # files
    "unreadable": "the file or folder could not be read",
    "changed_meanwhile": "the file changed while it was being cached; the next run takes it as it is then",
    "unsupported_format": "a picture or archive format that is not read here",
    "name_not_utf8": "the file's name is not UTF-8",
    "missing_file": "captions name it, but it is not there",
    "duplicate_key": "another sample of the same name came before",
    "folder_loop": "a link leads back to a folder above it",
    # captions
    "no_caption": "there is no caption for the picture",
    "empty_caption": "the caption is empty and skip_empty_caption is on",
    "bad_caption": "the caption is neither a text nor a list of texts",
    "caption_not_utf8": "the caption is not UTF-8",
    "caption_too_long": "the caption file is too large to be a caption",
    # containers
    "broken_table": "captions.json or the metadata table cannot be read as one",
    "broken_row": "a row of a metadata table cannot be read or names no file",
    "broken_tar": "the tar is damaged; samples before the damage are used",
    "broken_parquet": "the Parquet file is damaged or is none",
    "no_image_column": "the Parquet file has no column of picture bytes",
    "no_caption_column": "the Parquet file has no text column",
}
"""Every reason code and what it means. Codes are stable: reports and people's scripts count by them."""

# What Pillow's readers raise on damaged input: seen by cutting and scrambling files of every format, or told of by
# their code. Only calls into Pillow stand under it.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)
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
_SIDEWAYS = (5, 6, 7, 8)
_GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_PLAIN = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_PROFILE_TAKES = {"RGB": ("RGB", "L"), "GRAY": ("L",), "CMYK": ("CMYK",)}
_NOTES = "sd3_light_notes"
_FLOAT32_SIDE = 1 << 16
_REACH = 3  # pixels either side that the widest kernel (Lanczos) looks at, at scale 1

Pixels = NDArray[np.uint8]


class Reject(Exception):
    """This input cannot be used. ``reason`` is a code of `REASONS`, ``detail`` says what was seen."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def probe(data: bytes) -> Size:
    """Width and height that `decode` will give, from the header alone. Raises Reject as `decode` does for headers."""
    image = _open(data)
    width, height = image.size
    # Pillow already counts a TIFF's orientation in
    sideways = image.format != "TIFF" and _orientation(image, data)[0] in _SIDEWAYS
    return (height, width) if sideways else (width, height)


def decode(data: bytes) -> Image.Image:
    """The picture in upright 8-bit sRGB: first frame, profile applied, transparency over white. Raises Reject.

    What had to be ignored on the way (a broken profile, say) is told by `notes`.
    """
    image, remarks = _load_upright(data)
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    picture, remark = _to_srgb(image)
    if alpha is not None:
        white = Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=alpha)
        picture = white
    picture.info = {_NOTES: tuple(filter(None, (*remarks, remark)))}
    return picture


def notes(image: Image.Image) -> tuple[str, ...]:
    """What `decode` ignored in this picture: ``broken_exif``, ``broken_icc_profile``, ``icc_profile_mismatch``."""
    return tuple(image.info.get(_NOTES, ()))


def fit(image: Image.Image, plan: ResizePlan) -> Pixels:
    """The planned resize and crop of a decoded picture, antialiased, as height x width x 3."""
    assert image.mode == "RGB", image.mode
    assert image.size == plan.source, (image.size, plan.source)
    # resizing only what the crop keeps is the same picture without the cut-off part ever being held in memory
    return np.array(_resample(image, plan, plan.size, Image.Resampling.LANCZOS), dtype=np.uint8)


def decode_mask(data: bytes) -> Image.Image:
    """A mask as 8-bit grey: white teaches, black does not, and what is transparent does not. Raises Reject."""
    image, _ = _load_upright(data)
    if not image.has_transparency_data:
        return image.convert("L")
    colours = image.convert("RGBA")
    black = Image.new("RGB", image.size, "black")
    black.paste(colours.convert("RGB"), mask=colours.getchannel("A"))
    return black.convert("L")


def fit_mask(mask: Image.Image, plan: ResizePlan, factor: int = 8) -> Pixels:
    """The mask of a planned picture at latent resolution (``factor`` times smaller), 0 to 255, by area averaging.

    A mask of another size than its picture is stretched over it, so one default mask serves pictures of all shapes.
    Raises Reject when nothing of it is left inside the crop.
    """
    assert mask.mode == "L", mask.mode
    width, height = plan.size
    assert width % factor == 0, (width, factor)
    assert height % factor == 0, (height, factor)
    small = _resample(mask, plan, (width // factor, height // factor), Image.Resampling.BOX)
    weights: Pixels = np.array(small, dtype=np.uint8)
    if not weights.any():
        raise Reject("empty_mask", "all black inside the crop")
    return weights


def _resample(image: Image.Image, plan: ResizePlan, size: Size, kernel: Image.Resampling) -> Image.Image:
    """What the plan's crop keeps of ``image`` (the planned picture, or a mask stretched over it), at ``size``."""
    x, y = image.width / plan.resized[0], image.height / plan.resized[1]
    left, top, right, bottom = plan.crop
    box = left * x, top * y, min(right * x, image.width), min(bottom * y, image.height)
    if max(image.size) > _FLOAT32_SIDE:
        # Pillow holds the box in float32, too coarse far from the origin: bring the origin near first
        reach = math.ceil(_REACH * max(x, y, 1)) + 1
        origin = max(0, math.floor(box[0]) - reach), max(0, math.floor(box[1]) - reach)
        far = min(image.width, math.ceil(box[2]) + reach), min(image.height, math.ceil(box[3]) + reach)
        image = image.crop((*origin, *far))
        box = box[0] - origin[0], box[1] - origin[1], box[2] - origin[0], box[3] - origin[1]
    return image.resize(size, kernel, box=box)


def _open(data: bytes) -> Image.Image:
    if not data:
        raise Reject("empty_file")
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        raise Reject("not_an_image", f"it starts with {data[:12]!r}") from None
    except _BOMB as fault:
        raise Reject("too_large", str(fault)) from fault
    except _BROKEN as fault:
        raise _broken(fault) from fault
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Reject("too_large", f"{width}x{height}")
    return image


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow knows: asking it for another would fail on every file."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _load_upright(data: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    """The first frame with its orientation applied, in one of the modes that we know how to convert."""
    image = _open(data)
    try:
        image.load()
    except _BOMB as fault:
        raise Reject("too_large", str(fault)) from fault
    except _BROKEN as fault:
        raise _broken(fault) from fault
    orientation, remark = _orientation(image, data)
    # a TIFF comes upright out of Pillow
    turned = orientation in _UPRIGHT and image.format != "TIFF"
    upright = image.transpose(_UPRIGHT[orientation]) if turned else image
    return _eight_bit(upright), (remark,) if remark else ()


def _orientation(image: Image.Image, data: bytes) -> tuple[int, str]:
    """The EXIF orientation (1 when there is none) and a note."""
    # Pillow decodes a whole PNG to look for EXIF behind the pixels; looking for the chunk's name is quicker
    if image.format == "PNG" and b"eXIf" not in data and b"Raw profile type" not in data:
        return 1, ""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _BROKEN:
        return 1, "broken_exif"
    # 0 is what many programs write for "unknown"
    return (value or 1, "") if value in range(9) else (1, "broken_exif")


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


def _to_srgb(image: Image.Image) -> tuple[Image.Image, str]:
    """The colours (transparency left aside) as sRGB, by the embedded profile where it can be used, and a note."""
    profile = image.info.get("icc_profile")
    plain = _opaque(image)
    if not profile:
        return plain.convert("RGB"), ""
    try:
        space, transform = _transform(profile)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return plain.convert("RGB"), "broken_icc_profile"
    if plain.mode not in _PROFILE_TAKES[space]:
        return plain.convert("RGB"), "icc_profile_mismatch"
    converted = ImageCms.applyTransform(plain.convert("L" if space == "GRAY" else space), transform)
    assert converted is not None, "a transform that is not in place returns its picture"
    return converted, ""


def _opaque(image: Image.Image) -> Image.Image:
    """The colours in mode L, RGB or CMYK, without transparency: true colours, not mixed with any background."""
    if image.mode in ("RGB", "L", "CMYK"):
        return image
    if image.mode in ("1", "LA"):
        return image.convert("L")
    # by way of RGBA, where a palette's transparent colours keep their values
    return image.convert("RGBA").convert("RGB") if image.has_transparency_data else image.convert("RGB")


@lru_cache(maxsize=16)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform]:
    """A profile's colour space and its transform to sRGB; kept, as most pictures of a set share a few profiles."""
    source = ImageCms.getOpenProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space.strip()
    if space not in _PROFILE_TAKES:
        raise ValueError(f"a profile of {space}")
    transform = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        "L" if space == "GRAY" else space,
        "RGB",
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    return space, transform


def _broken(fault: Exception) -> Reject:
    reason = "truncated" if "truncated" in str(fault).lower() else "broken_image"
    return Reject(reason, f"{type(fault).__name__}: {fault}")
