"""The list of samples that `exclude` names: one key per line, as lists of rejects and pages of caches show them.

Lines that start with ``#`` are comments. A key that would not survive as a plain line, such as one with a line break,
is written as a JSON string.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.inputs import parse_json, read_limited

_LARGEST = 1 << 28  # bytes of a list
_MOST_LISTS = 16  # in memory


@dataclass(frozen=True)
class Exclusions:
    """The keys that a scan leaves out; ``on_excluded`` is called for each that it meets."""

    keys: frozenset[str] = frozenset()
    on_excluded: Callable[[], None] = lambda: None

    @staticmethod
    def of(path: Path | None, on_excluded: Callable[[], None]) -> "Exclusions":
        """Read the list at ``path``, if there is one. Raises UserError."""
        return Exclusions(frozenset() if path is None else read_exclusions(path), on_excluded)

    def leaves_out(self, key: str) -> bool:
        """Return whether a key is listed, and count it."""
        is_listed = key in self.keys
        if is_listed:
            self.on_excluded()
        return is_listed


def read_exclusions(path: Path) -> frozenset[str]:
    """Return the keys of a list. Raises UserError if it cannot be read."""
    try:
        status = path.stat()
        return _read(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    except FileNotFoundError as error:
        raise UserError(
            f"exclude: {path} does not exist; create it, or remove the key from the dataset TOML"
        ) from error
    except OSError as error:
        raise UserError(f"exclude: {path} cannot be read: {error.strerror}; fix the file") from error


@lru_cache(_MOST_LISTS)
def _read(path: Path, _version: tuple[int, int, int]) -> frozenset[str]:
    try:
        return frozenset(filter(None, map(_key, read_limited(path, _LARGEST).decode("utf-8-sig").splitlines())))
    except UnicodeDecodeError as error:
        raise UserError(f"exclude: {path} is not UTF-8 text: byte {error.start}; save it as UTF-8") from error


def with_exclusions(text: str, added: Collection[str], removed: Collection[str]) -> str:
    """Return the text of a list with keys added at its end and others removed; all other lines stay as they are."""
    lines = text.splitlines(keepends=True)
    present = {_key(line) for line in lines}
    kept = [line for line in lines if not _key(line) or _key(line) not in removed]
    ending = "\r\n" if text.count("\r\n") > text.count("\n") / 2 else "\n"
    if kept and not kept[-1].endswith(("\n", "\r")):
        kept[-1] += ending
    return "".join(kept + [_line(key) + ending for key in added if key not in present])


def _key(line: str) -> str:
    """Return the key of a line, "" for a comment, a blank line and broken JSON."""
    line = line.strip().removeprefix("\ufeff")
    if line.startswith("#"):
        return ""
    if not line.startswith('"'):
        return line
    try:
        value = parse_json(line)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _line(key: str) -> str:
    is_plain = key.isprintable() and key == key.strip() and key[:1] not in ("#", '"')
    return key if is_plain else json.dumps(key)
