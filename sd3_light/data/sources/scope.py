"""What all forms of source share: keys, the choice of a subsample, captions made ready, and masks."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from sd3_light.config import DirectoryConfig
from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import is_utf8, prepare
from sd3_light.data.sources.records import FileBytes, Found, Location, Record, Rejected
from sd3_light.randomness import sample_id

# fmt: off
IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pnm",
))
# fmt: on
"""Names that are taken for pictures; what they hold is decided by their bytes."""


class Scope:
    """One directory of the data set during a scan. Names are relative to its root, with forward slashes."""

    def __init__(self, directory: DirectoryConfig, index: int) -> None:
        self.directory = directory
        # the index comes last: whatever characters a name holds, two different pairs never meet in one prefix
        self._prefix = f"{directory.path.name}#{index}"
        self._masks = _Masks(directory)
        self._limit = round(directory.subsample_ratio * 2**63)

    def key(self, name: str) -> str:
        """The source key of what is called ``name``."""
        return f"{self._prefix}/{name}"

    def found(
        self, name: str, image: Location, raw_captions: Callable[[], Sequence[str]], mask_name: str | None = None
    ) -> Iterator[Found]:
        """The record of a picture, or why it is none; nothing at all when the subsample leaves it out.

        Captions are fetched only for what is wanted. ``mask_name`` is looked up in ``mask_path`` without its suffix.
        """
        key = self.key(name)
        if not is_utf8(key):
            yield Rejected(_printable(key), "name_not_utf8")
        elif self._is_chosen(key):
            try:
                captions = prepare(raw_captions(), self.directory)
                yield Record(key, captions, image, self._masks.find(mask_name or name))
            except Reject as reject:
                yield Rejected(key, reject.reason, reject.detail)

    def rejected(self, name: str, reason: str, detail: str = "") -> Iterator[Rejected]:
        """The reject of what is called ``name``, unless the subsample leaves it out."""
        key = _printable(self.key(name))
        if self._is_chosen(key):
            yield self.broken(name, reason, detail)

    def broken(self, name: str, reason: str, detail: str = "") -> Rejected:
        """The reject of a container (a folder, table, tar): never left out, as many samples hang on it."""
        return Rejected(_printable(self.key(name)), reason, detail)

    def _is_chosen(self, key: str) -> bool:
        return sample_id(key) < self._limit


class _Masks:
    """Finds masks: ``mask_path/NAME.*`` for a picture NAME, else the default mask, else none."""

    def __init__(self, directory: DirectoryConfig) -> None:
        self._root = directory.mask_path
        self._default = FileBytes(str(directory.default_mask_file)) if directory.default_mask_file else None
        self._folder: str | None = None
        self._by_stem: dict[str, str] = {}

    def find(self, name: str) -> Location | None:
        if self._root is None:
            return self._default
        where = PurePosixPath(name)
        folder = os.path.join(self._root, where.parent)
        # pictures come folder by folder: the listing of one folder at a time is all that is held
        if folder != self._folder:
            self._folder, self._by_stem = folder, _masks_in(folder)
        file = self._by_stem.get(where.stem)
        return FileBytes(os.path.join(folder, file)) if file else self._default


def _masks_in(folder: str) -> dict[str, str]:
    try:
        names = sorted(os.listdir(folder), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as fault:
        # a mask that may be there must not be taken for none
        raise Reject("unreadable", str(fault)) from fault
    splits = ((os.path.splitext(name), name) for name in names)
    return {stem: name for (stem, suffix), name in splits if suffix.lower() in IMAGE_SUFFIXES}


def _printable(key: str) -> str:
    return key.encode("utf-8", "backslashreplace").decode()
