"""Uploads of exports to the Hugging Face hub: prepared, with the name of every file, then made in one commit."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from sd3_light.config.faults import UserError
from sd3_light.export.file_card import adapter_file_card
from sd3_light.export.licence import NO_LICENCE, NO_LICENCE_FILE, stated_licence, with_licence
from sd3_light.files import file_sha256
from sd3_light.formats import byte_size
from sd3_light.inputs import read_limited

# a failed connection raises the HTTP library's error, the base class of the hub's errors
_FAILURES: tuple[type[Exception], ...] = (ValueError, OSError, *HfHubHTTPError.__bases__)
_PRIVATE = ("config.toml",)
"""Not published: it contains paths of the training machine."""
_REPLACED = ("*.safetensors", "*.json", "*.py", *_PRIVATE)
"""Files of an earlier export in the repository; those that this one lacks are deleted."""
_CARD = "README.md"
_PROOF = "proof.json"
_MOST_FILES = 2000
_CARD_BYTES = 1 << 20
_TOKEN = re.compile(r"hf_\w+|(?<=Bearer )[^\s']+")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
NEW = "new"
CHANGED = "changed"
SAME = "unchanged"


@dataclass(frozen=True)
class Target:
    """Where an upload goes, and how. ``licence`` is an id such as `mit`, "" for what the card states."""

    repo: str
    licence: str = ""
    public: bool = False


@dataclass(frozen=True)
class UploadFile:
    """A file of an upload, below the export's folder, or made for it. ``change`` is "" if the hub was not asked."""

    name: str
    size: int
    version: tuple[int, ...] = ()
    content: bytes | None = None
    change: str = ""


@dataclass(frozen=True)
class Upload:
    """What an upload does: its files, those that it leaves out or deletes, and the card that people will read.

    ``commit`` is what the repository contains now, "" if it does not exist yet; ``problem`` says why the hub was not
    asked.
    """

    source: Path
    target: Target
    files: tuple[UploadFile, ...]
    left_out: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    commit: str = ""
    is_private: bool = True
    problem: str = ""

    @property
    def card(self) -> str:
        """The text of the card."""
        return next(file.content or b"" for file in self.files if file.name == _CARD).decode(errors="replace")

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def licence(self) -> str:
        """The licence that the card states; "" for none."""
        return stated_licence(self.card).get("license", "")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the upload does, without its files, as names and texts."""
        visible = "private" if self.is_private else "public"
        if self.problem:
            state = f"not compared with the hub: {self.problem}"
        else:
            state = f"exists, {visible}" if self.commit else f"does not exist, or is hidden from you; {visible} if new"
        return [
            ("from", str(self.source)),
            ("repository", f"{self.target.repo}: {state}"),
            ("licence", self.licence or "not stated; give one with --license, such as mit or apache-2.0"),
            ("size", f"{byte_size(self.size)} in {len(self.files)} files"),
        ]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Every file with its size and what becomes of it on the hub."""
        uploaded = [(file.name, byte_size(file.size), file.change or "upload") for file in self.files]
        return [*uploaded, *((name, "", "deleted") for name in self.deleted)]


def check_push(target: Target, api: HfApi | None = None) -> None:
    """Raise a UserError if the repository or licence has no valid name or the user is not logged in."""
    check_names(target)
    with _hub_errors(target.repo):
        (api or HfApi()).whoami()


def check_names(target: Target) -> None:
    """Raise a UserError if the repository or the licence has no valid name."""
    with _hub_errors(target.repo):
        validate_repo_id(target.repo)
    if target.licence and not _LICENCE.fullmatch(target.licence):
        raise UserError(f"--license {target.licence!r:.80}: not an id of the hub, such as mit, apache-2.0, cc-by-4.0")


# --- before the upload ----------------------------------------------------------------------------


def prepare_upload(source: Path, target: Target, api: HfApi | None = None) -> Upload:
    """Return what an upload of an export's folder or an adapter's file does; nothing is uploaded.

    Raises UserError for something that is not an export, and for links in it. A hub that cannot be reached is the
    upload's ``problem``.
    """
    check_names(target)
    files, left_out = _files_of(source) if source.is_dir() else (_files_of_adapter(source), [])
    files = _licensed(source, files, target.licence) if target.licence else files
    upload = Upload(source, target, tuple(files), tuple(left_out), is_private=not target.public)
    try:
        with _hub_errors(target.repo):
            return _compared(upload, api or HfApi())
    except UserError as error:
        return replace(upload, problem=str(error))


def _files_of(folder: Path) -> tuple[list[UploadFile], list[str]]:
    """Return the files below an export's folder, and the names of those that are not uploaded."""
    if not (folder / _PROOF).is_file() or not (folder / _CARD).is_file():
        raise UserError(f"{folder} is not an export: it has no {_PROOF} or {_CARD}; export the run first")
    files: list[UploadFile] = []
    left_out: list[str] = []
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if not name.isprintable():
            raise UserError(f"{folder}: {name!r} is not a name for the hub; rename the file")
        if name in _PRIVATE or any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out.append(name)
            continue
        file = _file(path, name)
        files.append(replace(file, content=_content(path)) if name == _CARD else file)
    return sorted(files, key=lambda file: file.name), sorted(left_out)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder. Raises UserError for links, which may lead to private files, and too many."""
    folders = [folder]
    count = 0
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                if count > _MOST_FILES:
                    raise UserError(f"{folder} has more than {_MOST_FILES:,} files; choose the folder of an export")
                if entry.is_symlink():
                    raise UserError(f"{entry.path} is a link, which may lead elsewhere; replace it by its file")
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    yield Path(entry.path)


def _files_of_adapter(file: Path) -> list[UploadFile]:
    """Return an adapter's file and a card that is made from its metadata."""
    if file.suffix != ".safetensors" or not file.is_file():
        raise UserError(f"{file} is neither the folder of an export nor the .safetensors file of an adapter")
    card = adapter_file_card(file).encode()
    return [UploadFile(_CARD, len(card), content=card), _file(file, file.name)]


def _file(path: Path, name: str) -> UploadFile:
    status = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file; an export has no others")
    return UploadFile(name, status.st_size, (status.st_size, status.st_mtime_ns, status.st_ino))


def _content(path: Path) -> bytes:
    try:
        return read_limited(path, _CARD_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; export the model again") from error


def _licensed(source: Path, files: list[UploadFile], licence: str) -> list[UploadFile]:
    """Return the files with this licence in the card, and without the file that says that there is none."""
    changed = []
    for file in files:
        if file.name == _CARD:
            card = with_licence((file.content or b"").decode(errors="replace"), licence).encode()
            changed.append(replace(file, content=card, size=len(card)))
        elif file.name != NO_LICENCE["license_link"] or _content(source / file.name) != NO_LICENCE_FILE.encode():
            changed.append(file)
    return changed


def _compared(upload: Upload, api: HfApi) -> Upload:
    """Return the upload with what the repository contains now."""
    try:
        info = api.repo_info(upload.target.repo)
        commit = str(info.sha)
        tree = api.list_repo_tree(upload.target.repo, recursive=True, revision=commit)
        known = {each.path: each for each in tree if isinstance(each, RepoFile)}
    except RepositoryNotFoundError:
        return replace(upload, files=tuple(replace(file, change=NEW) for file in upload.files))
    files = tuple(replace(file, change=_change(upload.source, file, known.get(file.name))) for file in upload.files)
    names = {file.name for file in files}
    stale = [name for name in known if name not in names and any(fnmatch(name, each) for each in _REPLACED)]
    deleted = tuple(sorted(stale)) if upload.source.is_dir() else ()  # a file replaces no others
    return replace(upload, files=files, deleted=deleted, commit=commit, is_private=bool(info.private))


def _change(source: Path, file: UploadFile, known: RepoFile | None) -> str:
    if known is None:
        return NEW
    if known.size != file.size:
        return CHANGED
    path = source / file.name if source.is_dir() else source
    if known.lfs is not None and file.content is None:
        return SAME if known.lfs.sha256 == file_sha256(path) else CHANGED
    content = read_limited(path, file.size) if file.content is None else file.content
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return SAME if known.blob_id == blob.hexdigest() else CHANGED


# --- the upload ----------------------------------------------------------------------------------


def push(upload: Upload, api: HfApi | None = None) -> str:
    """Do what an upload says in one commit, in a repository that is created if needed; return its address.

    Raises UserError if a file, or the repository, is not what the upload has seen, and if a public one has no licence.
    """
    api = api or HfApi()
    target = upload.target
    if upload.target.public and not upload.licence:
        raise UserError(
            f"{upload.source}: its card states no licence; give one with --license before you make it public"
        )
    operations = _operations(upload)
    again = f"sd3-light export {upload.source} --push-to-hub {target.repo}"
    note = f"the export is complete: {upload.source}; retry with `{again}`"
    with _hub_errors(target.repo, note):
        address = api.create_repo(target.repo, private=not target.public, exist_ok=True)
        if operations:
            api.create_commit(
                target.repo,
                operations,
                commit_message="Upload an export of sd3-light",
                parent_commit=upload.commit or None,
            )
    return str(address)


def _operations(upload: Upload) -> list[CommitOperationAdd | CommitOperationDelete]:
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for file in upload.files:
        path = upload.source / file.name if upload.source.is_dir() else upload.source
        if file.version and _file(path, file.name).version != file.version:
            raise UserError(f"{path} has changed since the upload was planned; plan it again")
        if file.change != SAME:
            operations.append(CommitOperationAdd(file.name, str(path) if file.content is None else file.content))
    return [*operations, *(CommitOperationDelete(name) for name in upload.deleted)]


@contextmanager
def _hub_errors(repo: str, note: str = "") -> Iterator[None]:
    """Convert the hub's errors to a UserError of one line, without a token."""
    try:
        yield
    except _FAILURES as error:
        end = f" ({note})" if note else ""
        raise UserError(f"--push-to-hub {repo}: {_reason(error)}{end}") from error


def _reason(error: Exception) -> str:
    match error:
        case HFValidationError():
            return "not a valid repository name; pass USER/NAME"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set; unset it to upload"
        case LocalTokenNotFoundError():
            return "not logged in; run `hf auth login`, or set HF_TOKEN"
        case HfHubHTTPError():
            return f"the hub refused: {_line(error.server_message or error)}"
        case ValueError():  # of a card, before anything is sent
            return f"the hub refuses the card: {_line(error)}"
    return f"cannot reach the hub: {_line(error) or type(error).__name__}"


def _line(message: object) -> str:
    """Return an error in one line, without a token."""
    return _TOKEN.sub("***", " ".join(str(message).split()))
