"""Captions: decode, clean up and prefix them, and draw the shuffled variants that are cached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.randomness import sample_id, stream
from sd3_light.sources.preprocess import Reject

TEXT_NAMES = ("text", "caption", "captions", "prompt", "description", "caption_text", "txt")
"""Column names of captions in order of precedence, compared in lower case."""

MAX_CAPTION_BYTES = 1 << 20
"""A caption may have thousands of words (encoders truncate it); a longer text is not a caption."""


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no unpaired surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def decode_text(data: bytes) -> str:
    """Decode a caption file. Raises Reject if it is not UTF-8 or much too long."""
    if len(data) > MAX_CAPTION_BYTES:
        raise Reject("caption_too_long", f"{len(data)} bytes or more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Reject("caption_not_utf8", str(error)) from error


@dataclass(frozen=True, slots=True)
class Columns:
    """The configured columns of the image (or its file name) and of the captions; none means the usual names.

    ``of_media`` are further usual names, which come first.
    """

    image: str = ""
    captions: tuple[str, ...] = ()
    of_media: tuple[str, ...] = ()

    @property
    def caption(self) -> str:
        """The configured columns of captions, for messages."""
        return ", ".join(self.captions)

    def image_names(self, usual: Sequence[str]) -> Sequence[str]:
        """Return the column names of the image."""
        return (self.image,) if self.image else (*self.of_media, *usual)

    def caption_names(self) -> Sequence[str]:
        """Return the column names of captions."""
        return self.captions or TEXT_NAMES

    def caption_value(self, row: Mapping[str, Any]) -> Any:
        """Return the captions of a row: a value, or with several columns a list of theirs, "" where one has none."""
        if len(self.captions) < 2:
            return named(row, self.caption_names())
        values = [named(row, (name,)) for name in self.captions]
        return None if all(value is None for value in values) else ["" if value is None else value for value in values]


def named(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the row's value for the first of ``names`` that it has, ignoring case; None if it has none."""
    lowered = {str(key).lower(): value for key, value in row.items()}
    for name in names:
        value = row.get(name)
        if value is None:
            value = lowered.get(name.lower())
        if value is not None:
            return value
    return None


def texts(value: Any, column: str = "") -> tuple[str, ...]:
    """Return the captions in a value of a file or of the configured ``column``: a text or a list. Raises Reject."""
    if value is None or value == []:
        raise Reject("no_caption", f"no value in {column!r} (caption_column)" if column else "no value")
    entries = value if isinstance(value, list | tuple) else (value,)
    for entry in entries:
        if not isinstance(entry, str):
            raise Reject("bad_caption", f"{entry!r:.80}")
        # unpaired surrogates, from JSON escapes or bytes that are not UTF-8, cannot be tokenized
        if not is_utf8(entry):
            raise Reject("caption_not_utf8", f"{entry!a:.80}")
        # a character is at least one byte and at most four
        if 4 * len(entry) > MAX_CAPTION_BYTES and len(entry.encode()) > MAX_CAPTION_BYTES:
            raise Reject("caption_too_long", f"{len(entry)} characters")
    return tuple(entries)


def prepare_captions(raw: Sequence[str], directory: DirectoryConfig) -> tuple[str, ...]:
    """Clean up and prefix captions. Raises Reject if all are empty and ``skip_empty_caption`` is on."""
    captions = tuple(_clean(text, directory) for text in raw)
    if len(directory.caption_columns) > 1:
        captions = _one_per_column(captions, len(directory.caption_columns))
    if directory.skip_empty_caption:
        captions = tuple(filter(None, captions))
        if not captions:
            raise Reject("empty_caption")
    return tuple(directory.caption_prefix + text for text in captions)


def _one_per_column(captions: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return one caption per column, so that weights of columns apply; a single one, as of a text file, is of all."""
    if len(captions) not in (1, count):
        raise Reject("bad_caption", f"{len(captions)} captions for {count} columns")
    first = next(filter(None, captions), "")
    return tuple(text or first for text in captions) if len(captions) > 1 else (first,) * count


def caption_variants(captions: Sequence[str], seed: int, key: str, directory: DirectoryConfig) -> tuple[str, ...]:
    """Return the captions to encode for the sample ``key``: unchanged, or ``cache_shuffle_num`` shuffles of their tags.

    ``shuffle_tags`` alone means one shuffle. The prefix and ``keep_tokens`` tags stay in front; each of the others is
    left out with the probability ``tag_dropout``. Every caption has the same number of variants, even if some are
    equal, so that a uniform choice of a variant is a uniform choice of a caption.
    """
    count = _num_shuffles(directory)
    delimiter = directory.cache_shuffle_delimiter
    prefix = directory.caption_prefix
    tags = [caption.removeprefix(prefix).split(delimiter) for caption in captions]
    if count == 0 or all(len(parts) == 1 for parts in tags):
        return tuple(captions)
    draws = stream(seed, "tags", epoch=0, repeat=0, sample_id=sample_id(key))
    drops = stream(seed, "tag_dropout", epoch=0, repeat=0, sample_id=sample_id(key))
    variants = []
    for parts in tags:
        kept = parts[: directory.keep_tokens]
        others = parts[directory.keep_tokens :]
        for _ in range(count):
            shuffled = [others[i] for i in draws.permutation(len(others))]
            remaining = [
                tag
                for tag, draw in zip(shuffled, drops.random(len(shuffled)), strict=True)
                if draw >= directory.tag_dropout
            ]
            variants.append(prefix + delimiter.join([*kept, *remaining] or shuffled[:1]))
    return tuple(variants)


def _num_shuffles(directory: DirectoryConfig) -> int:
    return max(directory.cache_shuffle_num, int(directory.shuffle_tags))


def _clean(text: str, directory: DirectoryConfig) -> str:
    text = text.removeprefix("\ufeff")
    if _num_shuffles(directory) == 0:
        return " ".join(text.split())
    # part by part, to preserve a delimiter that is white space (one tag per line)
    delimiter = directory.cache_shuffle_delimiter
    parts = (" ".join(part.split()) for part in text.split(delimiter))
    return delimiter.join(filter(None, parts))
