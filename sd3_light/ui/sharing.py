"""Uploads of exports to the Hugging Face hub: planned and shown first, then made as shown, in threads of the server.

The token is that of the server's user (`hf auth login`, or HF_TOKEN); no page asks for one or shows one.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config.faults import UserError
from sd3_light.ui.background import Numbered, error_of
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
    def is_done(self) -> bool:
        """Whether no thread works on it."""
        return self.state not in (PLANNING, UPLOADING)


@dataclass
class Sharing:
    """The exports of the runs below the served folders, and their uploads. Several threads may use it.

    ``prepare`` imports the libraries.
    """

    folders: Folders
    prepare: Callable[[], object]
    shares: Numbered[Share] = field(default_factory=lambda: Numbered("upload", _MOST_SHARES))
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

    def submit(self, form: Mapping[str, str]) -> Share:
        """Begin to plan an upload of these form values. Raises UserError for values that are not valid."""
        source = self.exports().get(form.get("export", ""))
        if source is None:
            raise UserError("there is no such export; choose one of the list")
        repo, licence = (form.get(name, "").strip() for name in ("repo", "licence"))
        if not repo:
            raise UserError("the repository is missing; write USER/NAME")
        share = self.shares.add(lambda number: Share(number, source[1], repo, licence, "public" in form))
        self._begin(share, _plan)
        return share

    def upload(self, number: int) -> Share:
        """Begin to upload what a plan shows. Raises UserError unless it is planned and not begun."""
        share = self.shares.get(number)
        with self._lock:
            if share.state != PLANNED:
                raise UserError(f"the upload is {share.state}; plan it again to upload it again")
            share.state = UPLOADING
        self._begin(share, _upload)
        return share

    def _begin(self, share: Share, work: Callable[[Share], None]) -> None:
        def prepared() -> None:
            ServedFiles(self.folders.roots).require(share.source)
            self.prepare()
            work(share)

        def run() -> None:
            share.error = error_of(prepared)
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
