"""The folder that a cache is built in: the cache itself, or for a cache at a URL a local mirror of it.

The mirror has the layout of the cache. Small files are copies. Shards and their Arrow files are hollow: sparse files of
the right size, so that everything that lists and compares files works on both. The store alone is the truth: the mirror
is compared with its listing when a build starts, and every file is uploaded when it is written, a shard last of its
files and the manifest last of all. So a build can be killed at any time and continues on any machine.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import DUPLICATES_FILE, MANIFEST, REJECTS_FILE, SHARDS, ShardEntry, is_table, read_entry
from sd3_light.data.store.remote import verify_remote
from sd3_light.data.verify import is_intact
from sd3_light.inputs import INDEX_BYTES, open_regular, read_json_file, read_limited, regular_handle
from sd3_light.remote_file import RemoteEntry, list_remote, read_remote, remote_entry
from sd3_light.urls import RemoteConflict, RemoteForbidden, RemoteUnreachable, with_retries

_Result = TypeVar("_Result")

SHARD_SUFFIXES = (".rejects.jsonl", ".none", ".arrow", ".json", ".safetensors")
"""Files of a shard in the order of their upload: a shard never exists without the others."""
_REJECTED_SUFFIXES = (".rejects.jsonl", ".none")
_CATALOGUE = ("catalogue/parts", "catalogue")  # a listing never exists without its parts
_PROMPTS = "prompts"
_LISTS = (REJECTS_FILE, DUPLICATES_FILE)
_FOLDERS = (SHARDS, _PROMPTS, *_CATALOGUE)
_RECORD = "store.json"
_LOCK = "store.lock"
_MARK = ".damaged"
_DOWNLOADS = 256  # files per request to the library, which reads them concurrently


@dataclass(frozen=True)
class StoredFiles:
    """What a store has of one shard, by name: the record, the bytes of small files, the sizes of the others."""

    record: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


class BuildFolder:
    """A local cache folder: nothing has to be fetched or uploaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location: CacheLocation = folder

    def push_shard(self, file: str) -> None:
        """Upload what was written for a shard."""

    def stored_files(self, file: str) -> StoredFiles:
        """Return what the store has of a shard, for the mirror of another process."""
        return StoredFiles()

    def adopt_shard(self, file: str, files: StoredFiles) -> None:
        """Update the mirror with a shard that another process has pushed."""

    def push_catalogue(self) -> None:
        """Upload what changed in the catalogue."""

    def publish(self) -> None:
        """Upload the prompts, the rejects, the duplicates and the manifest, in this order."""

    def fetch_tables(self, files: Iterable[str]) -> None:
        """Make the Arrow files of shards readable."""

    def delete(self, paths: Sequence[Path]) -> None:
        """Delete files of the cache."""
        for path in paths:
            path.unlink(missing_ok=True)

    def is_intact(self, entry: ShardEntry) -> bool:
        """Return whether a shard has the size and hash of its entry."""
        return is_intact(self.folder / SHARDS / entry.file, entry)


class RemoteBuildFolder(BuildFolder):
    """The local mirror of a cache at a URL. One process uses it at a time. ``shard``: it mirrors one shard only."""

    def __init__(self, url: str, folder: Path, shard: StoredFiles | None = None) -> None:
        super().__init__(folder)
        self.url = self.location = url
        # name -> (version in the store, digest of the local copy; "" if it is hollow)
        self._record: dict[str, tuple[str, str]] = dict(shard.record if shard else _read_record(folder / _RECORD))
        if shard is None:
            self._pull()
        else:
            (folder / SHARDS).mkdir(parents=True, exist_ok=True)

    # --- from the store -----------------------------------------------------------------------

    def _pull(self) -> None:
        """Make the mirror equal to the store; only what changed is read."""
        listed = dict(self._listed())
        for name in self._local_names() - listed.keys():
            (self.folder / name).unlink()
        self._record = {name: known for name, known in self._record.items() if name in listed}
        changed = []
        for name, entry in listed.items():
            path = self.folder / name
            is_known = self._record.get(name, ("", ""))[0] == entry.version and path.is_file()
            if _is_hollow(name):
                if not is_known or path.stat().st_size != entry.size:
                    _make_hollow(path, entry.size)
                    self._record[name] = entry.version, ""
            elif not is_known:
                changed.append(name)
        self._download(changed, {name: listed[name].version for name in changed})
        self._save_record()

    def _listed(self) -> Iterator[tuple[str, RemoteEntry]]:
        for entry in _list(self.url):
            if _is_top_file(entry.name):
                yield entry.name, entry
        for folder in _FOLDERS:
            for entry in _list(f"{self.url}/{folder}"):
                if not entry.is_folder:
                    yield f"{folder}/{entry.name}", entry

    def _local_names(self) -> set[str]:
        """Return the names of files that the store should have; marks of damage and temporary files are local."""
        names = {file.name for file in os.scandir(self.folder) if _is_top_file(file.name)}
        for folder in _FOLDERS:
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
            names |= {f"{folder}/{file.name}" for file in os.scandir(self.folder / folder) if file.is_file()}
        return {name for name in names if not name.endswith(_MARK) and not os.path.basename(name).startswith(".")}

    def _download(self, names: Sequence[str], versions: Mapping[str, str]) -> None:
        """Download files, many at a time."""

        def read(files: Any, path: str, some: Sequence[str]) -> dict[str, bytes]:
            contents: dict[str, bytes] = files.cat([f"{path}/{name}" for name in some])
            return {key.removeprefix(f"{path}/"): data for key, data in contents.items()}

        for first in range(0, len(names), _DOWNLOADS):
            some = names[first : first + _DOWNLOADS]
            for name, data in with_retries(self.url, partial(read, some=some)).items():
                (self.folder / name).write_bytes(data)
                self._record[name] = versions[name], _digest(self.folder / name)

    def fetch_tables(self, files: Iterable[str]) -> None:
        """Download the Arrow files of shards where the mirror has hollow ones."""
        names = [f"{SHARDS}/{Path(file).with_suffix('.arrow')}" for file in files]
        hollow = [name for name in names if name in self._record and not self._record[name][1]]
        self._download(hollow, {name: self._record[name][0] for name in hollow})

    def is_intact(self, entry: ShardEntry) -> bool:
        """Read a shard from the store and compare its size and hash."""
        self.fetch_tables([entry.file])
        try:
            verify_remote(f"{self.url}/{SHARDS}/{entry.file}", entry, self.folder)
        except (RemoteUnreachable, RemoteForbidden):
            raise
        except UserError:  # missing, or other bytes
            return False
        return True

    # --- to the store -------------------------------------------------------------------------

    def push_shard(self, file: str) -> None:
        """Upload the files of a shard and verify the shard; then the mirror has hollow ones."""
        stem = file.removesuffix(".safetensors")
        entry = read_entry(self.folder / SHARDS, file)
        if (shard := f"{SHARDS}/{file}") in self._record:  # else a killed run leaves it with the hash of another
            self._delete([shard])
        for name in _shard_names(file):
            path = self.folder / name
            if entry is None and not name.endswith(_REJECTED_SUFFIXES):  # left from the time when it had samples
                path.unlink(missing_ok=True)
            if path.is_file():
                self._upload(name)
            elif name in self._record:
                self._delete([name])
        if entry is None:
            return
        try:
            verify_remote(f"{self.url}/{SHARDS}/{file}", entry, self.folder)
        except UserError:
            with suppress(UserError):
                self._delete([f"{SHARDS}/{file}"])  # the next run encodes it again
            raise
        for name in (f"{SHARDS}/{file}", f"{SHARDS}/{stem}.arrow"):
            _make_hollow(self.folder / name, (self.folder / name).stat().st_size)
            self._record[name] = self._record[name][0], ""

    def stored_files(self, file: str) -> StoredFiles:
        """Return the record and the files of a shard that the mirror has."""
        names = _shard_names(file)
        record = {name: self._record[name] for name in names if name in self._record}
        paths = {name: self.folder / name for name in record if (self.folder / name).is_file()}
        small = {name: read_limited(path) for name, path in paths.items() if not _is_hollow(name)}
        return StoredFiles(
            record, small, {name: path.stat().st_size for name, path in paths.items() if _is_hollow(name)}
        )

    def adopt_shard(self, file: str, files: StoredFiles) -> None:
        """Make the mirror's files of a shard equal to those that another process has pushed."""
        for name in _shard_names(file):
            self._record.pop(name, None)
            (self.folder / name).unlink(missing_ok=True)
        for name, data in files.small.items():
            (self.folder / name).write_bytes(data)
        for name, size in files.sizes.items():
            _make_hollow(self.folder / name, size)
        self._record.update(files.record)

    def push_catalogue(self) -> None:
        """Upload new files of the catalogue; delete those that the mirror no longer has."""
        local = self._local_names()
        for folder in _CATALOGUE:
            for name in sorted(name for name in local if os.path.dirname(name) == folder):
                self._upload(name)
        self._delete([name for name in self._record if name.startswith(_CATALOGUE[1]) and name not in local])
        self._save_record()

    def publish(self) -> None:
        """Upload prompts, lists and a table of shards, and the manifest last: only if no other run has replaced it."""
        local = self._local_names()
        for name in sorted(name for name in local if name.startswith(f"{_PROMPTS}/") or "/" not in name):
            if name != MANIFEST:
                self._upload(name)
        if MANIFEST in local and self._record.get(MANIFEST, ("", ""))[1] != _digest(self.folder / MANIFEST):
            self._replace_manifest()
        self._delete([name for name in self._record if is_table(name) and name not in local])
        self._save_record()

    def _replace_manifest(self) -> None:
        data = read_limited(self.folder / MANIFEST, INDEX_BYTES)
        url = f"{self.url}/{MANIFEST}"
        previous = self._record.get(MANIFEST, ("", ""))[0].partition("-")[2]
        try:
            with_retries(url, lambda files, path: _put_if_same(files, path, data, previous), "write")
        except RemoteConflict as error:
            if _request(read_remote, url) != data:  # else an answer was lost, and this run has written it
                raise UserError(
                    f"{url} was replaced by another run meanwhile; run the command again: finished shards are kept"
                ) from error
        self._record[MANIFEST] = _request(remote_entry, url).version, _digest(self.folder / MANIFEST)

    def delete(self, paths: Sequence[Path]) -> None:
        """Delete files from the store, then from the mirror."""
        self._delete([name for path in paths if (name := str(path.relative_to(self.folder))) in self._record])
        super().delete(paths)
        self._save_record()

    def _upload(self, name: str) -> None:
        path = self.folder / name
        url = f"{self.url}/{name}"
        digest = _digest(path)
        if self._record.get(name, ("", ""))[1] == digest:
            return
        with_retries(url, lambda files, target: files.put_file(str(path), target), "write")
        entry = _request(remote_entry, url)
        if entry.size != path.stat().st_size:
            raise UserError(f"{url} has {entry.size} bytes after an upload of {path.stat().st_size}; run again")
        self._record[name] = entry.version, digest

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            with_retries(f"{self.url}/{name}", _remove, "delete")
            del self._record[name]

    def _save_record(self) -> None:
        # losing it costs requests only
        (self.folder / _RECORD).write_text(json.dumps(self._record), encoding="utf-8")


@contextmanager
def open_build_folder(location: CacheLocation, work: Path) -> Iterator[BuildFolder]:
    """Yield the folder to build a cache in: a local cache itself, or for a URL the folder ``work``, locked."""
    if isinstance(location, Path):
        yield BuildFolder(location)
        return
    if location.startswith(("file://", "local://", "http://", "https://")):
        raise UserError(
            f"cache_dir: a cache cannot be built at {location}; give a path, or a store such as s3://bucket"
        )
    work.mkdir(parents=True, exist_ok=True)
    with open(work / _LOCK, "ab", opener=regular_handle) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process of this machine builds {location} in {work}; wait for it, or divide the work "
                "(--part I/N)"
            ) from error
        yield RemoteBuildFolder(location, work)


@contextmanager
def open_shard_folder(location: CacheLocation, shard: StoredFiles, scratch: Path) -> Iterator[BuildFolder]:
    """Yield the folder to build one shard in: a local cache itself, or for a URL a new folder in ``scratch``."""
    if isinstance(location, Path):
        yield BuildFolder(location)
        return
    with TemporaryDirectory(dir=scratch) as folder:
        yield RemoteBuildFolder(location, Path(folder), shard)


def work_name(url: str, part: tuple[int, int] | None = None) -> str:
    """Return the name of the folder in which a cache at a URL, or a part of it, is built."""
    digest = blake2b(url.encode(), digest_size=8).hexdigest()
    return f"build-{digest}" if part is None else f"build-{digest}-{part[0]}-of-{part[1]}"


def _list(url: str) -> list[RemoteEntry]:
    try:
        return _request(lambda folder: list(list_remote(folder)), url)
    except FileNotFoundError:
        return []


def _request(read: Callable[[str], _Result], url: str) -> _Result:
    """Return ``read(url)``. A URL that this user may not read is a UserError."""
    try:
        return read(url)
    except PermissionError as error:
        raise RemoteForbidden(str(error.strerror)) from error


def _put_if_same(files: Any, path: str, data: bytes, etag: str) -> None:
    """Write an object if its ETag is still ``etag`` ("": if there is none), where the store supports that."""
    if "s3" not in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol):
        files.pipe_file(path, data)
        return
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        files.pipe_file(path, data, chunksize=5 << 30, **condition)  # in one request: parts have no condition
    except OSError as error:
        if isinstance(error, FileExistsError) or "pre-condition" in str(error).lower():
            raise RemoteConflict(str(error)) from error
        if "not implemented" not in str(error).lower():
            raise
        files.pipe_file(path, data)


def _remove(files: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        files.rm_file(path)


def _shard_names(file: str) -> list[str]:
    return [f"{SHARDS}/{file.removesuffix('.safetensors')}{suffix}" for suffix in SHARD_SUFFIXES]


def _is_top_file(name: str) -> bool:
    return name in (MANIFEST, *_LISTS) or is_table(name)


def _is_hollow(name: str) -> bool:
    return name.startswith(f"{SHARDS}/") and name.endswith((".safetensors", ".arrow"))


def _make_hollow(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def _read_record(path: Path) -> dict[str, tuple[str, str]]:
    try:
        return {name: (version, digest) for name, (version, digest) in read_json_file(path, INDEX_BYTES).items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}
