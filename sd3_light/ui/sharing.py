"""Uploads of exports to the Hugging Face hub: planned and shown first, then made as shown, in threads of the server.

The token is that of the server's user (`hf auth login`, or HF_TOKEN); no page asks for one or shows one.
"""

import itertools
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config.faults import UserError
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.served_files import ServedFiles

if TYPE_CHECKING:
    from sd3_light.export.hub import Upload

_MOST_SHARES = 50
PLANNING = "planning"
PLANNED = "planned"
UPLOADING = "uploading"
UPLOADED = "uploaded"
FAILED = "failed"


@dataclass(eq=False)
class Share:
    """An upload; a thread sets what it has done, others read it. ``address`` is that of the repository."""

    id: int
    source: Path
    repo: str
    licence: str = ""
    public: bool = False
    state: str = PLANNING
    plan: "Upload | None" = None
    error: str = ""
    address: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether a thread works on it."""
        return self.state in (PLANNING, UPLOADING)


@dataclass
class Sharing:
    """The exports of the runs below the served folders, and their uploads. Several threads may use it.

    ``prepare`` imports the libraries.
    """

    folders: Folders
    prepare: Callable[[], object]
    _shares: dict[int, Share] = field(default_factory=dict)
    _ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def exports(self, run: Path | None = None) -> dict[str, tuple[str, Path]]:
        """Return label and folder of every export by id, or only of those of a run; those behind links are left out."""
        files = ServedFiles(self.folders.roots)
        named = {}
        for folder in self.folders.runs().values() if run is None else [run]:
            for export in sorted((folder / "exports").glob("step-*"), reverse=True):
                try:
                    files.require(export)
                except UserError:
                    continue
                named[folder_id(export)] = (f"{folder.name}/{export.name}", export)
        return named

    def share(self, number: int) -> Share:
        """Return an upload. Raises UserError for an unknown number."""
        share = self._shares.get(number)
        if share is None:
            raise UserError(f"there is no upload {number}; plan it again")
        return share

    def submit(self, form: Mapping[str, str]) -> Share:
        """Begin to plan an upload of these form values. Raises UserError for values that are not valid."""
        source = self.exports().get(form.get("export", ""))
        if source is None:
            raise UserError("there is no such export; choose one of the list")
        repo, licence = (form.get(name, "").strip() for name in ("repo", "licence"))
        if not repo:
            raise UserError("the repository is missing; write USER/NAME")
        with self._lock:
            if sum(share.is_busy for share in self._shares.values()) >= _MOST_SHARES:
                raise UserError(f"{_MOST_SHARES} uploads are in progress; try again when one of them is done")
            share = Share(next(self._ids), source[1], repo, licence, "public" in form)
            self._shares[share.id] = share
            for old in [number for number, each in self._shares.items() if not each.is_busy][:-_MOST_SHARES]:
                del self._shares[old]
        self._begin(share, _plan)
        return share

    def upload(self, number: int) -> Share:
        """Begin to upload what a plan shows. Raises UserError unless it is planned and not begun."""
        share = self.share(number)
        with self._lock:
            if share.state != PLANNED:
                raise UserError(f"the upload is {share.state}; plan it again to upload it again")
            share.state = UPLOADING
        self._begin(share, _upload)
        return share

    def _begin(self, share: Share, work: Callable[[Share], None]) -> None:
        def run() -> None:
            try:
                ServedFiles(self.folders.roots).require(share.source)
                self.prepare()
                work(share)
            except UserError as error:
                share.error = str(error)
            except Exception as error:  # a thread's top level: without it the page would wait for ever
                traceback.print_exc()
                share.error = f"{type(error).__name__}; this is a bug in sd3-light, see the server's terminal"
            if share.error:
                share.state = FAILED

        threading.Thread(target=run, name="share", daemon=True).start()


def _plan(share: Share) -> None:
    from sd3_light.export.hub import Target, prepare_upload

    share.plan = prepare_upload(share.source, Target(share.repo, share.licence, share.public))
    share.state = PLANNED


def _upload(share: Share) -> None:
    from sd3_light.export.hub import check_push, push

    assert share.plan is not None
    check_push(share.plan.target)
    share.address = push(share.plan)
    share.state = UPLOADED
