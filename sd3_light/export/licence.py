"""The licence of an export: that of the model that training started from, or what the user states; never a guess."""

import re
from pathlib import Path

from sd3_light.inputs import read_limited

NO_LICENCE = {"license": "other", "license_name": "not-stated", "license_link": "LICENSE"}
"""The fields of a card without a licence; they name the file `NO_LICENCE_FILE`."""
NO_LICENCE_FILE = """The licence of this model is not stated. Before you publish it, replace this text with the licence
and fill in `license`, `license_name` and `license_link` at the top of README.md. Parts of other models keep theirs.
"""
INHERITED = "`license: {0}`, copied from the model that training started from; change it if that is wrong."
_STATED = "`license: {0}`."
_MAX_LICENCE_BYTES = 1 << 20
_FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_SECTION = re.compile(r"^## Licence\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"license(_name|_link)?:")


def licence_of(base: Path) -> dict[str, str]:
    """Return the licence fields in the card of the base folder; empty if it has none."""
    if not _is_file_of(base, "README.md"):
        return {}
    licence = stated_licence(read_limited(base / "README.md", _MAX_LICENCE_BYTES).decode(errors="replace"))
    link = licence.get("license_link", "")
    is_linked = not licence or "://" in link or _is_file_of(base, link)
    return licence if is_linked else {**licence, "license_link": ""}


def stated_licence(card: str) -> dict[str, str]:
    """Return the licence fields at the top of a card; empty if they state none."""
    front = _FRONT.match(card)
    lines = (line.partition(":") for line in (front[1].splitlines() if front else ()))
    licence = {key: value.strip().strip("'\"") for key, _, value in lines if key in NO_LICENCE}
    is_stated = licence.get("license") and licence.get("license_name") != NO_LICENCE["license_name"]
    return licence if is_stated else {}


def with_licence(card: str, licence: str) -> str:
    """Return a card with this licence at its top and in its section."""
    front = _FRONT.match(card)
    lines = [line for line in (front[1].splitlines() if front else ()) if not _FIELD.match(line)]
    top = "\n".join(["---", *lines, f"license: {licence}", "---", ""])
    rest = card[front.end() :] if front else card
    return top + _SECTION.sub(lambda _: f"## Licence\n\n{_STATED.format(licence)}\n", rest)


def licence_file(base: Path | None) -> dict[str, str]:
    """Return the file that a card's `license_link` names, as name -> text; none if it is an address.

    ``base`` is the folder whose licence the card has; None for a card without a stated licence.
    """
    licence = licence_of(base) if base else {}
    if base is None or not licence:
        return {NO_LICENCE["license_link"]: NO_LICENCE_FILE}
    link = licence.get("license_link", "")
    if not link or "://" in link:
        return {}
    return {link: read_limited(base / link, _MAX_LICENCE_BYTES).decode(errors="replace")}


def _is_file_of(base: Path, name: str) -> bool:
    """Return whether ``name`` is a file directly in ``base``, of a licence's size."""
    path = base / name
    return path.name == name and path.is_file() and path.stat().st_size <= _MAX_LICENCE_BYTES
