"""The frame of a page: its head, its sections, and the place it is written to."""

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.runlog.page.html import Html, join, tag

# a browser that obeys it loads nothing and runs nothing of what a text from outside may hold
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def document(title: str, style: str, body: Iterable[str], script: str = "") -> Html:
    """The whole page; ``script`` is the only one that it will run."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"sd3-light {__version__}"),
        tag("title", title),
        tag("style", Html(style)),
    )
    scripts = [tag("script", Html(script))] if script else []
    return join((Html("<!doctype html>\n"), tag("html", head, tag("body", *body, *scripts), lang="en"), Html("\n")))


def section(name: str, title: str, *children: str) -> Html:
    """A part of a page that links (``#name``) lead to."""
    return tag("section", tag("h2", title), *children, id=name)


def links(places: Iterable[tuple[str, str]]) -> Html:
    """Where the sections (name, title) are."""
    return tag("nav", *(tag("a", title, href=f"#{name}") for name, title in places))


def notes(texts: Iterable[str]) -> list[Html]:
    """What a reader has to know first; nothing where there is nothing."""
    told = [tag("p", text) for text in texts]
    return [tag("div", *told, class_="notes", role="note")] if told else []


def tile(number: str, name: str, remark: str) -> Html:
    """A number to be seen at a glance."""
    return tag("div", tag("b", number), tag("span", name if not remark else f"{name}: {remark}"), class_="tile")


def size_text(number: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"


def make_room(out: Path) -> None:
    """Fail before the work, not after it: there is a folder for the page, and the page is no folder."""
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; name the file of the page, such as {out / 'page.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"--out: cannot make the folder {out.parent}: {fault.strerror}; name another place") from fault


def _policy(script: str) -> str:
    if not script:
        return _POLICY
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{_POLICY}; script-src 'sha256-{digest}'"
