"""Render templates into self-contained pages: styles, scripts and images are inlined, values are escaped."""

import base64
import hashlib
import io
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from sd3_light import __version__, formats
from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically

_ROOT = Path(__file__).parent

LARGEST_SIDE = 512
"""Default limit in pixels; larger images are scaled down to it."""

READ_ONLY = ContextVar("READ_ONLY", default=False)
"""Whether the pages of `sd3-light ui` leave out what changes something."""

_TINT = np.array([214, 40, 130], dtype=np.float32)
_QUALITY = 88
_LOSSLESS_AREA = 96 * 96  # pixels: up to here a PNG is hardly larger than a WebP

# the browser blocks every request and every script that the page does not name by its hash
_POLICY = "default-src 'none'; img-src {images}; style-src 'unsafe-inline'"
_SERVED = "; connect-src 'self'; form-action 'self'; base-uri 'none'"


def render_template(template: str, **values: Any) -> str:
    """Return the page of a template in `templates/`."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> Environment:
    """Return the template environment: autoescape is on, and a missing value is an error."""
    env = Environment(
        loader=FileSystemLoader(_ROOT / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals |= {
        "styles_of": partial(_inline, "styles"),
        "scripts_of": partial(_inline, "scripts"),
        "policy_of": _policy,
        "version": __version__,
        "is_read_only": READ_ONLY.get,
    }
    filters = ("byte_size", "duration", "language", "number", "percent", "plural", "shorten", "thousands", "utc_time")
    env.filters |= {name: getattr(formats, name) for name in filters}
    return env


def check_output_path(out: Path) -> None:
    """Create the folder of a page before the work starts; raise UserError where the page cannot be written."""
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; name the file of the page, such as {out / 'page.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create the folder {out.parent}: {error.strerror}; use another path") from error


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


def tint_masked(pixels: NDArray[np.uint8], mask: NDArray[np.uint8]) -> Image.Image:
    """Return an image [height, width, 3] with a tint over what a mask of any size excludes: 255 is trained on."""
    height, width, _ = pixels.shape
    large = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST), dtype=np.float32)
    opacity = (1 - large / 255)[:, :, None] * 0.7
    return Image.fromarray((pixels * (1 - opacity) + _TINT * opacity).round().astype(np.uint8))


def save_page(out: Path, page: str) -> None:
    """Write a page atomically. Text that is not valid UTF-8 (half a surrogate pair) is written as an escape."""
    write_atomically(out, page.encode("utf-8", "backslashreplace"))


def _inline(folder: str, names: Iterable[str]) -> Markup:
    text = "".join((_ROOT / folder / name).read_text(encoding="utf-8") for name in names)
    assert "</" not in text, "it would close the element around it"
    return Markup(text)


def _policy(script: str, served: bool = False) -> str:
    """Return the content security policy of a page with this script; a served page may also request its own host."""
    policy = _POLICY.format(images="'self' data:") + _SERVED if served else _POLICY.format(images="data:")
    if not script:
        return policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{policy}; script-src 'sha256-{digest}'"
