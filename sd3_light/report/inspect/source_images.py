"""Source images for the page: finding and opening them."""

from collections.abc import Mapping

from PIL import Image, ImageFile

from sd3_light.sources.locations import location_from_text
from sd3_light.sources.preprocess import Reject, decode
from sd3_light.sources.records import Location

THUMBNAIL_SIDE = 160


def image_location(places: Mapping[str, str], directory: str, text: str) -> Location:
    """Return where the bytes of an image are; raise Reject where the cache does not record it."""
    root = places.get(f"directory:{directory}")
    if not text or root is None:
        raise Reject("missing_file", "the cache does not record where it is")
    try:
        location = location_from_text(text, root)
    except ValueError as error:
        raise Reject("missing_file", str(error)) from error
    assert location is not None, "only an empty text has no location"
    return location


def open_truncated(data: bytes) -> Image.Image:
    """Return an image whose end may be missing; raise Reject where nothing can be shown."""
    # Pillow's setting is global to the process, and the cache relies on its default: change it for one image only
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        return decode(data)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
