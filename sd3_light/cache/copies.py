"""Copy values from the shards of the old manifest; a shard is hashed before the first value is read."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch import Tensor

from sd3_light.cache.reuse import Place, ShardCopies
from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.core.columns import MASK, TEACHER
from sd3_light.data.manifest import SHARDS, ShardEntry, damaged_mark
from sd3_light.data.reader import ShardReader
from sd3_light.data.store.disk_cache import DiskCache, private_temp_folder
from sd3_light.data.store.remote import download
from sd3_light.data.verify import is_intact
from sd3_light.runlog import info
from sd3_light.urls import RemoteForbidden, RemoteUnreachable

_MAX_OPEN = 32
_OPEN_TRIES = 8
_Key = TypeVar("_Key")


class _Damaged(Exception):
    """A shard cannot be copied from."""


class OldShards:
    """The shards of a cache as files to copy from. Those of a URL are fetched to a folder of ``limit_bytes``.

    ``folder`` is that folder, None: one in the temp folder. One thread opens shards; any thread may read them.
    """

    def __init__(self, location: CacheLocation, folder: Path | None, limit_bytes: int) -> None:
        self._location = location
        self._folder = folder
        self._limit = limit_bytes
        self._open: dict[str, ShardReader] = {}
        self._damaged: set[str] = set()

    def reader(self, entry: ShardEntry) -> ShardReader | None:
        """Return an open shard; None, with a warning, if it is missing or its bytes are not those of its entry."""
        if entry.file in self._damaged:
            return None
        reader = self._open.pop(entry.file, None)
        if reader is None:
            try:
                reader = self._verified(entry)
            except _Damaged:
                self._damaged.add(entry.file)
                info(f"warning: the old shard {entry.file} is missing or damaged; its samples are encoded again")
                return None
        self._open[entry.file] = reader
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]  # the least recently used; shards that copy from it keep it open
        return reader

    def _verified(self, entry: ShardEntry) -> ShardReader:
        for _ in range(_OPEN_TRIES):
            path = self._local(entry) if isinstance(self._location, Path) else self._fetched(entry)
            try:
                return ShardReader(path, entry)
            except FileNotFoundError:  # evicted by another process before it was opened
                continue
            except UserError as error:
                raise _Damaged from error
        raise _Damaged

    def _local(self, entry: ShardEntry) -> Path:
        assert isinstance(self._location, Path)
        path = self._location / SHARDS / entry.file
        if not is_intact(path, entry):
            with suppress(OSError):  # if it is a shard of the new cache too, the next build encodes it again
                if path.is_file():
                    damaged_mark(path).touch()
            raise _Damaged
        return path

    def _fetched(self, entry: ShardEntry) -> Path:
        folder = self._folder or private_temp_folder(str(self._location))
        disk = DiskCache(folder, max(self._limit, entry.bytes))
        return disk.path(entry.sha256, entry.bytes, partial(self._download, entry))

    def _download(self, entry: ShardEntry, file: BinaryIO) -> None:
        try:
            download(f"{self._location}/{SHARDS}/{entry.file}", entry, file)
        except (RemoteUnreachable, RemoteForbidden):
            raise
        except UserError as error:  # missing, or other bytes
            raise _Damaged from error


class Copies:
    """What a shard copies, from open shards: for each entry the places by sample, and those of captions by text.

    ``encoded_columns`` are those of captions that are not copied; ``beside`` are the images of their samples that they
    are encoded with. Values of shards that are damaged, or have other columns than the manifest says, are left out:
    they are encoded.
    """

    def __init__(self, copies: ShardCopies | None = None, old: OldShards | None = None) -> None:
        copies = copies or ShardCopies()
        assert old is not None or not copies.shards
        self._readers = [None if old is None else old.reader(entry) for entry in copies.shards]
        for number, reader in enumerate(self._readers):
            if reader is not None and not _agrees(reader, copies.columns.fingerprints):
                self._readers[number] = None
        self.entries = {entry: self._of_intact(places) for entry, places in copies.entries.items()}
        self.captions = self._of_intact(copies.captions)
        self.encoded_columns = copies.columns.encoded
        self.beside = copies.columns.beside

    def _of_intact(self, places: Mapping[_Key, Place]) -> dict[_Key, Place]:
        return {key: place for key, place in places.items() if self._readers[place[0]] is not None}

    def of_sample(self, number: int) -> tuple[str, ...]:
        """Return the entries of a sample that are copied."""
        return tuple(entry for entry, places in self.entries.items() if number in places)

    def read(self, name: str, place: Place) -> Tensor:
        """Return the value of a column at a place."""
        return self._reader(place).value(name, place[1])

    def vae_dtypes(self) -> set[str]:
        """Return the precisions in which the copied images were encoded."""
        images = (places for entry, places in self.entries.items() if entry not in (MASK, TEACHER))
        return {self._reader(place).vae_dtype for places in images for place in places.values()}

    def _reader(self, place: Place) -> ShardReader:
        reader = self._readers[place[0]]
        assert reader is not None
        return reader


def _agrees(reader: ShardReader, fingerprints: Mapping[str, str]) -> bool:
    """Return whether the columns of a shard have these fingerprints; masks may be absent."""
    return all(reader.fingerprints.get(name, expected) == expected for name, expected in fingerprints.items())
