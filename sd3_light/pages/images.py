"""Images embedded in a page."""

import base64
import io

from PIL import Image

LARGEST_SIDE = 512
"""Default limit in pixels; larger images are scaled down to it."""

_QUALITY = 88
_LOSSLESS_AREA = 96 * 96  # pixels: up to here a PNG is hardly larger than a WebP


def data_uri(image: Image.Image, side: int = LARGEST_SIDE) -> str:
    """Return the image as a data URI, no side longer than ``side`` pixels."""
    if max(image.size) > side:
        image = image.copy()
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if image.width * image.height <= _LOSSLESS_AREA:
        kind = "png"
        image.save(buffer, "PNG", optimize=True)
    else:
        kind = "webp"
        image.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
