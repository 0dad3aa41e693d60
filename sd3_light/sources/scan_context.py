"""The context of a scan, shared by all kinds of sources: keys, subsampling, captions, masks and rejected images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import DataLocation, is_url
from sd3_light.randomness import sample_id
from sd3_light.sources.access import folder_entries, version_of
from sd3_light.sources.captions import Columns, is_utf8, prepare_captions
from sd3_light.sources.exclusions import Exclusions
from sd3_light.sources.listing import (
    IMAGES,
    IMAGES_AND_VIDEOS,
    FolderNames,
    Media,
    is_image_name,
    listed_version,
    mask_paths,
)
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes, Location, Record, Rejected, ScanItem
from sd3_light.sources.selection import Selection


class ScanContext:
    """One directory of the dataset during a scan. Names are relative to its root, with forward slashes."""

    def __init__(
        self,
        directory: DirectoryConfig,
        index: int,
        media: Media = IMAGES,
        on_unmatched: Callable[[], None] = lambda: None,
        exclusions: Exclusions = Exclusions(),  # noqa: B008 (immutable)
    ) -> None:
        self.media = media
        self.selection = Selection(directory.where) if directory.where.strip() else None
        self._on_unmatched = on_unmatched
        self._exclusions = exclusions
        self.columns = Columns(directory.image_column, directory.caption_columns, media.columns)
        self.excluded = mask_paths(directory)
        self.max_image_bytes = 1e6 * directory.max_image_mb
        self._directory = directory
        # the index comes last: whatever characters a name has, different pairs have different prefixes
        self._prefix = f"{directory.name}#{index}"
        self._masks = _Companions(directory.mask_path, _default_mask(directory.default_mask_file))
        self._rejected = _Companions(directory.rejected)
        self._references = [_Companions(folder) for folder in directory.references]
        self._limit = round(directory.subsample_ratio * 2**63)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def sample(
        self,
        name: str,
        image: Location,
        raw_captions: Callable[[], Sequence[str]],
        mask_name: str | None = None,
        raw_columns: Callable[[], Mapping[str, Any]] = dict,
    ) -> Iterator[ScanItem]:
        """Yield the record of an image, or its reject; nothing if subsampling, ``where`` or ``exclude`` leaves it out.

        Captions and columns are fetched only if needed. ``mask_name``, without its suffix, is looked up in
        ``mask_path``, ``rejected`` and ``references``.
        """
        key = self._key(name)
        if self._exclusions.leaves_out(_printable(key)):
            return
        if not is_utf8(key):
            yield Rejected(_printable(key), "name_not_utf8", image=image)
        elif self._is_chosen(key):
            try:
                values = self.selection.checked(raw_columns()) if self.selection else {}
                if self.selection and not self.selection.matches_columns(values):
                    self._on_unmatched()
                    return
                captions = prepare_captions(raw_captions(), self._directory)
                if self.selection and not self.selection.matches_caption(values, self._caption_length(captions)):
                    self._on_unmatched()
                    return
                mask = self._masks.find(mask_name or name)
                rejected = self._rejected.find(mask_name or name)
                if rejected is None and self._directory.rejected is not None:
                    raise Reject("no_rejected", f"{self._directory.rejected}")
                references = self._find_references(mask_name or name)
                self._require_size(None if self._is_read_in_pieces(image) else image, mask, rejected, *references)
                kept = self.selection.kept(values) if self.selection else ""
                yield Record(key, captions, image, mask, kept, rejected, references)
            except Reject as reject:
                yield Rejected(key, reject.reason, _printable(reject.detail), image)

    def _find_references(self, name: str) -> tuple[Location, ...]:
        references = tuple(companions.find(name) for companions in self._references)
        for folder, reference in zip(self._directory.references, references, strict=True):
            if reference is None:
                raise Reject("no_reference", f"{folder}")
        return tuple(filter(None, references))

    def _caption_length(self, captions: Sequence[str]) -> int:
        """Return the number of characters of the longest caption, without the prefix."""
        return max(map(len, captions)) - len(self._directory.caption_prefix)

    def _is_read_in_pieces(self, location: Location) -> bool:
        """Return whether no process holds all bytes of the file: a video on disk, and those of tasks."""
        if self.media is not IMAGES_AND_VIDEOS:
            return self.media is not IMAGES
        return isinstance(location, FileBytes) and not (is_image_name(location.path) or is_url(location.path))

    def _require_size(self, *locations: Location | None) -> None:
        for location in filter(None, locations):
            if (size := location.num_bytes()) > self.max_image_bytes:
                limit = self._directory.max_image_mb
                raise Reject("file_too_large", f"{location.path!r}: {size / 1e6:,.1f} MB, max_image_mb = {limit:g}")

    def reject(self, name: str, reason: str, detail: str = "", image: Location | None = None) -> Iterator[Rejected]:
        """Yield the reject of ``name``, unless subsampling or ``exclude`` leaves it out."""
        key = _printable(self._key(name))
        if self._is_chosen(key) and not self._exclusions.leaves_out(key):
            yield Rejected(key, reason, _printable(detail), image)

    def reject_container(self, name: str, reason: str, detail: str = "") -> Rejected:
        """Return the reject of a container (folder, table, tar); never left out, as it affects many samples."""
        return Rejected(_printable(self._key(name)), reason, _printable(detail))

    def _is_chosen(self, key: str) -> bool:
        return sample_id(key) < self._limit


class _Companions:
    """Finds masks or rejected images: ``root/NAME.*`` for an image NAME, else the default, else None."""

    def __init__(self, root: DataLocation | None, default: FileBytes | None = None) -> None:
        self._root = root
        self._default = default
        self._folder: str | None = None
        self._names = FolderNames({})

    def find(self, name: str) -> Location | None:
        if self._root is None:
            return self._default
        image = PurePosixPath(name)
        parent = str(image.parent)
        folder = str(self._root) if parent == "." else f"{self._root}/{parent}"
        # images come folder by folder, so only one listing is kept
        if folder != self._folder:
            self._list(folder)
        file = next(filter(is_image_name, self._names.with_stem(image.stem)), None)
        return FileBytes(f"{folder}/{file}", self._names.note(file)) if file else self._default

    def _list(self, folder: str) -> None:
        self._folder = None
        try:
            with folder_entries(folder) as entries:
                self._names = FolderNames({entry.name: listed_version(entry) for entry in entries})
        except (FileNotFoundError, NotADirectoryError):
            self._names = FolderNames({})
        except OSError as error:
            # the file may exist, so the image must not be used without it
            raise Reject("unreadable", str(error)) from error
        self._folder = folder


def _default_mask(mask: DataLocation | None) -> FileBytes | None:
    # the version of one at a URL is asked for once, not for every sample
    return None if mask is None else FileBytes(str(mask), version_of(mask) if isinstance(mask, str) else "")


def _printable(text: str) -> str:
    """Return the text with escapes for everything that is not UTF-8 (names from a disk or a tar)."""
    return text.encode("utf-8", "backslashreplace").decode()
