"""Pictures that lie in the text of a page."""

import base64
import io

from PIL import Image

LARGEST_SIDE = 512
"""Larger pictures are shown at this size, if nothing else is said."""

_QUALITY = 88
_EXACT_AREA = 96 * 96  # up to this many pixels a PNG is hardly larger than a WebP


def data_uri(image: Image.Image, side: int = LARGEST_SIDE) -> str:
    """The picture as an address that holds it whole."""
    shown = image
    if max(image.size) > side:
        shown = image.copy()
        shown.thumbnail((side, side), Image.Resampling.LANCZOS)
    sink = io.BytesIO()
    exact = shown.width * shown.height <= _EXACT_AREA
    if exact:
        shown.save(sink, "PNG", optimize=True)
    else:
        shown.save(sink, "WEBP", quality=_QUALITY)
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(sink.getvalue()).decode()}"
