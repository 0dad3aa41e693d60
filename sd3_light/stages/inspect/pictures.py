"""Pictures for the page: where they came from, opened as far as they can be."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from sd3_light.data.preprocess import Pixels, Reject, decode
from sd3_light.data.sources import Location, location_from_text

THUMBNAIL_SIDE = 160

_TINT = np.array([214, 40, 130], dtype=np.float32)


def tinted(pixels: Pixels, mask: Pixels) -> Image.Image:
    """The picture with a tint over what a mask (of latent size, 255 teaches) keeps from teaching."""
    height, width, _ = pixels.shape
    large = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST), dtype=np.float32)
    off = (1 - large / 255)[:, :, None] * 0.7
    return Image.fromarray((pixels * (1 - off) + _TINT * off).round().astype(np.uint8))


def location(places: Mapping[str, str], directory: str, text: str) -> Location:
    """Where a picture's bytes are; raises Reject where the cache does not tell."""
    root = places.get(f"directory:{directory}")
    if not text or root is None:
        raise Reject("missing_file", "the cache does not say where it is")
    try:
        found = location_from_text(text, Path(root))
    except ValueError as fault:
        raise Reject("missing_file", str(fault)) from fault
    assert found is not None, "only an empty text is no location"
    return found


def open_partly(data: bytes) -> Image.Image:
    """A picture whose end may be missing; raises Reject when nothing can be shown."""
    with _cut_files_allowed():
        return decode(data)


@contextmanager
def _cut_files_allowed() -> Iterator[None]:
    """Pillow keeps this wish for the whole process: it must hold for one picture only, as the cache trusts in it."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
