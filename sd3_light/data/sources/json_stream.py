"""A JSON document read member by member, so that a document of any length needs the memory of its largest member."""

import json
from collections.abc import Iterator
from typing import Any, TextIO

MAX_MEMBER = 1 << 24
"""Characters that one key or value may have."""

_CHUNK = 1 << 16
_DECODER = json.JSONDecoder()


def members(file: TextIO) -> Iterator[tuple[str | None, Any]]:
    """The keys and values of an object, or None and the values of a list. Raises ValueError, also at the very end."""
    text = _Window(file)
    opening = text.next_of("{[", "neither an object nor a list")
    closing = "}" if opening == "{" else "]"
    if text.peek() == closing:
        text.next_of(closing)
    else:
        yield _member(text, opening)
        while text.next_of("," + closing) == ",":
            yield _member(text, opening)
    if text.peek():
        raise text.fault("text after the document's end")


def _member(text: "_Window", opening: str) -> tuple[str | None, Any]:
    if opening == "[":
        return None, text.value()
    if text.peek() != '"':
        raise text.fault("no key in double quotes")
    key = text.value()
    text.next_of(":")
    return key, text.value()


class _Window:
    """A stretch of the text, moved along as it is read."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._passed = 0  # characters before the window

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def next_of(self, characters: str, otherwise: str = "") -> str:
        """Take the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            raise self.fault(otherwise or f"{' or '.join(map(repr, characters))} is missing")
        self._at += 1
        return found

    def value(self) -> Any:
        """Take a whole value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as fault:
                # either the text is wrong or the window ends too early
                if not self._more():
                    raise self.fault(fault.msg) from fault
                continue
            # a number at the window's end may go on behind it, also where the window cuts "1.5e+7" after "." or "e+"
            if end + 2 < len(self._text) or not self._more():
                self._at = end
                return value

    def fault(self, what: str) -> ValueError:
        """What is wrong, and where."""
        return ValueError(f"{what}, at character {self._passed + self._at}")

    def _more(self) -> bool:
        """Drop what was taken and widen the window; False at the end, or where one member is too large."""
        pending = len(self._text) - self._at
        if pending > MAX_MEMBER:
            return False
        # twice as wide each time, so that a long member is not tried over and over
        read = self._file.read(max(_CHUNK, pending))
        if read:
            self._passed += self._at
            self._text, self._at = self._text[self._at :] + read, 0
        return bool(read)
