"""Captions: read as UTF-8, tidied, prefixed; and the shuffled variants that are cached of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.data.preprocess import Reject
from sd3_light.randomness import sample_id, stream

TEXT_NAMES = ("text", "caption", "captions", "prompt", "description", "caption_text", "txt")
"""Column names of a caption, in order of precedence, compared in lower case."""

MAX_CAPTION_BYTES = 1 << 20


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


def named(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of ``names`` that the row has; None where it has none of them."""
    lowered = {str(key).lower(): value for key, value in row.items()}
    return next((lowered[name] for name in names if lowered.get(name) is not None), None)


def texts(value: Any) -> tuple[str, ...]:
    """The captions in a value that a table or a file gave: a text, or a list of texts. Raises Reject."""
    if value is None or value == []:
        raise Reject("no_caption", "no value")
    entries = value if isinstance(value, list | tuple) else (value,)
    for entry in entries:
        if not isinstance(entry, str):
            raise Reject("bad_caption", f"{entry!r:.80}")
        # half a surrogate pair, from a JSON escape or from bytes that are not UTF-8, cannot be tokenised
        if not is_utf8(entry):
            raise Reject("caption_not_utf8", f"{entry!a:.80}")
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
