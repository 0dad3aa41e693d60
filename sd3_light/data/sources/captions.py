"""Captions: read as UTF-8, tidied, prefixed; and the shuffled variants that are cached of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.data.preprocess import Reject
from sd3_light.randomness import sample_id, stream

TEXT_NAMES = ("text", "caption", "captions", "prompt", "description", "caption_text", "txt")
"""Column names of a caption, in order of precedence, compared in lower case."""

MAX_CAPTION_BYTES = 1 << 20
"""A caption may be thousands of words long (encoders cut it); what is longer than this is no caption."""


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def decode_text(data: bytes) -> str:
    """The text of a caption file. Raises Reject when it is not UTF-8 or far too long."""
    if len(data) > MAX_CAPTION_BYTES:
        raise Reject("caption_too_long", f"{len(data)} bytes or more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise Reject("caption_not_utf8", str(fault)) from fault


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a table hold the picture (or its file) and the captions; "" is found by its usual names."""

    image: str = ""
    caption: str = ""

    def image_names(self, usual: Sequence[str]) -> Sequence[str]:
        """The names to look for a picture by."""
        return (self.image,) if self.image else usual

    def caption_names(self) -> Sequence[str]:
        """The names to look for captions by."""
        return (self.caption,) if self.caption else TEXT_NAMES


def named(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of ``names`` that the row has, in any case of letters; None where it has none of them."""
    lowered = {str(key).lower(): value for key, value in row.items()}
    for name in names:
        value = row.get(name)
        if value is None:
            value = lowered.get(name.lower())
        if value is not None:
            return value
    return None


def texts(value: Any, column: str = "") -> tuple[str, ...]:
    """The captions in a value that a table or a file gave: a text, or a list of texts. Raises Reject.

    ``column`` is the configured one, if the value was looked up by it.
    """
    if value is None or value == []:
        raise Reject("no_caption", f"no value in {column!r} (caption_column)" if column else "no value")
    entries = value if isinstance(value, list | tuple) else (value,)
    for entry in entries:
        if not isinstance(entry, str):
            raise Reject("bad_caption", f"{entry!r:.80}")
        # half a surrogate pair, from a JSON escape or from bytes that are not UTF-8, cannot be tokenised
        if not is_utf8(entry):
            raise Reject("caption_not_utf8", f"{entry!a:.80}")
        # a character is at least one byte and at most four
        if 4 * len(entry) > MAX_CAPTION_BYTES and len(entry.encode()) > MAX_CAPTION_BYTES:
            raise Reject("caption_too_long", f"{len(entry)} characters")
    return tuple(entries)


def prepare(raw: Sequence[str], directory: DirectoryConfig) -> tuple[str, ...]:
    """Captions tidied and prefixed. Raises Reject when they are all empty and such samples are unwanted."""
    tidied = tuple(_tidy(text, directory) for text in raw)
    if directory.skip_empty_caption:
        tidied = tuple(filter(None, tidied))
        if not tidied:
            raise Reject("empty_caption")
    return tuple(directory.caption_prefix + text for text in tidied)


def caption_variants(captions: Sequence[str], seed: int, key: str, directory: DirectoryConfig) -> tuple[str, ...]:
    """The captions to encode for the sample ``key``: as they are, or ``cache_shuffle_num`` shuffles of each one's tags.

    ``shuffle_tags`` alone means one shuffle. The prefix stays in front. Every caption gives the same number, even if
    some come out equal, so that a uniform choice among the variants stays a uniform choice among the captions.
    """
    count = _num_shuffles(directory)
    delimiter, prefix = directory.cache_shuffle_delimiter, directory.caption_prefix
    tags = [caption.removeprefix(prefix).split(delimiter) for caption in captions]
    if count == 0 or all(len(parts) == 1 for parts in tags):
        return tuple(captions)
    draws = stream(seed, "tags", epoch=0, repeat=0, sample_id=sample_id(key))
    variants = []
    for parts in tags:
        for _ in range(count):
            order = draws.permutation(len(parts))
            variants.append(prefix + delimiter.join(parts[i] for i in order))
    return tuple(variants)


def _num_shuffles(directory: DirectoryConfig) -> int:
    return max(directory.cache_shuffle_num, int(directory.shuffle_tags))


def _tidy(text: str, directory: DirectoryConfig) -> str:
    text = text.removeprefix("\ufeff")
    if _num_shuffles(directory) == 0:
        return " ".join(text.split())
    # part by part, so that a delimiter which is itself whitespace (one tag a line) survives
    delimiter = directory.cache_shuffle_delimiter
    parts = (" ".join(part.split()) for part in text.split(delimiter))
    return delimiter.join(filter(None, parts))
