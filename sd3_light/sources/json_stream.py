"""Read a JSON document member by member, so that memory is bounded by the largest member.

Why not ijson (3.6): an integer of 5,000 digits crashes it, 100 KB of "[" exhaust the memory, unpaired surrogates
silently become "?", and the NaN that Python's `json` writes is an error.
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

MAX_MEMBER = 1 << 24
"""Largest number of characters of one key or value."""

_CHUNK = 1 << 16
_DECODER = json.JSONDecoder()


def members(file: TextIO) -> Iterator[tuple[str | None, Any]]:
    """Yield (key, value) per member of an object or (None, value) per item of a list. Raises ValueError, maybe late."""
    text = _Window(file)
    is_object = text.take("{[", "neither an object nor a list") == "{"
    closing = "}" if is_object else "]"
    delimiter = text.take(closing) if text.peek() == closing else ","
    while delimiter == ",":
        key = None
        if is_object:
            if text.peek() != '"':
                raise text.error("expected a key in double quotes")
            key = text.take_value()
            text.take(":")
        yield key, text.take_value()
        delimiter = text.take("," + closing)
    if text.peek():
        raise text.error("text after the end of the document")


class _Window:
    """The part of the document that is in memory, and the position of the parser in it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._passed = 0  # characters before the window

    def peek(self) -> str:
        """Return the next character after white space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._extend():
                return ""

    def take(self, characters: str, message: str = "") -> str:
        """Consume and return the next character, which must be one of ``characters``."""
        character = self.peek()
        if not character or character not in characters:
            raise self.error(message or f"expected {' or '.join(map(repr, characters))}")
        self._at += 1
        return character

    def take_value(self) -> Any:
        """Consume and return one whole value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # either the text is wrong or the window ends too early
                if not self._extend():
                    raise self.error(error.msg) from error
                continue
            except ValueError as error:  # an integer of thousands of digits
                raise self.error(str(error)) from error
            # a number at the window's end may continue behind it, even if the window cuts "1.5e+7" after "." or "e+"
            if end + 2 < len(self._text) or not self._extend():
                self._at = end
                return value

    def error(self, message: str) -> ValueError:
        """Return an error that names the position."""
        return ValueError(f"{message}, at character {self._passed + self._at}")

    def _extend(self) -> bool:
        """Drop the consumed text and read more; False at the end of the file, or if one member is too large."""
        pending = len(self._text) - self._at
        if pending > MAX_MEMBER:
            return False
        # doubling keeps the number of attempts at a long member small
        chunk = self._file.read(max(_CHUNK, pending))
        if chunk:
            self._passed += self._at
            self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)
