"""Background saves of a run (checkpoints, EMA snapshots, exports) and the reports on how they ended."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sd3_light.checkpoint.background import (
    BackgroundWorker,
    CheckpointFailed,
    CheckpointKeeper,
    CheckpointSaved,
    JobResult,
)
from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import has_checkpoint, incomplete_checkpoints, newest_checkpoint
from sd3_light.config.faults import UserError
from sd3_light.engines.processes import ProcessGroups
from sd3_light.export.export_spec import ExportError
from sd3_light.export.proof import ProofError
from sd3_light.files import disk_remedy
from sd3_light.runlog import info

CHECKPOINT = "checkpoint"
SNAPSHOT = "snapshot"
EXPORT = "export"
FOLDERS = {CHECKPOINT: "checkpoints", SNAPSHOT: "ema", EXPORT: "exports"}


@dataclass(frozen=True)
class SaveFailure:
    """A save that failed: its kind, one line that says what failed, and what to do if the disk is the cause."""

    kind: str
    line: str
    remedy: str

    def advice(self, run: Path, has_checkpoint: bool) -> str:
        """Return the line with what to do at the end of the run."""
        if not has_checkpoint:
            return f"{self.line}; no checkpoint was ever saved: {self.remedy or 'fix the cause'}, then start again"
        if self.kind == EXPORT:
            first = f"{self.remedy}, then " if self.remedy else ""
            return f"{self.line}; the checkpoint is intact: {first}resume, or run `sd3-light export {run} OUT`"
        return f"{self.line}; {self.remedy or 'fix the cause'}, then resume"


class BackgroundSaves:
    """Writes below ``folder`` in one thread per kind of save, while the run trains.

    Failures are reported and training continues: the next save may succeed. ``failures`` holds one per kind whose
    latest save failed, ``first_failure`` that of one that could not be written while there was no checkpoint.
    """

    def __init__(
        self, folder: Path, rank: int, writers: int, groups: ProcessGroups, keep_last: int, log: Callable[..., None]
    ) -> None:
        self.folder = folder
        self.log = log
        self.checkpoints = CheckpointKeeper(folder / FOLDERS[CHECKPOINT], rank, writers, groups.saving, keep_last)
        self.snapshots = CheckpointKeeper(folder / FOLDERS[SNAPSHOT], rank, writers, groups.snapshots)
        self.exports = BackgroundWorker("exports")
        self.failures: dict[str, SaveFailure] = {}
        self.first_failure: SaveFailure | None = None
        self._writers: dict[str, BackgroundWorker] = {CHECKPOINT: self.checkpoints, SNAPSHOT: self.snapshots}
        self._writers[EXPORT] = self.exports
        self._ended: list[tuple[str, CheckpointSaved | CheckpointFailed | JobResult]] = []

    def submit_export(self, progress: Progress, weights: str, write: Callable[[], Path]) -> None:
        """Run ``write`` in the exports' thread."""
        # the job's name is its step: a failure may be reported when the next export is already running
        self.exports.submit(str(progress.step), lambda: (progress, weights, write()))

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a complete checkpoint."""
        return has_checkpoint(self.checkpoints.folder)

    def is_idle(self, seconds: float = 0.0) -> bool:
        """Whether nothing is being written, now or within some seconds."""
        return all(writer.is_idle(seconds) for writer in self._writers.values())

    def pending(self) -> list[str]:
        """Return the kinds of saves that are being written."""
        return [kind for kind, writer in self._writers.items() if not writer.is_idle(0.0)]

    def has_reports(self) -> bool:
        """Whether saves have ended since the last report."""
        for kind, writer in self._writers.items():
            self._ended += [(kind, save) for save in writer.poll()]
        return bool(self._ended)

    def wait(self) -> None:
        """Wait until everything is written, and report it."""
        for kind, writer in self._writers.items():
            self._ended += [(kind, save) for save in writer.wait()]
        self.report()

    def close(self) -> None:
        """Wait until everything is written and end the threads."""
        for writer in self._writers.values():
            writer.close()

    def report(self) -> None:
        """Print and log how the saves ended that `has_reports` or `wait` collected."""
        ended = self._ended
        self._ended = []
        for kind, save in ended:
            if isinstance(save, CheckpointSaved):
                self._report_saved(kind, save)
            elif isinstance(save, CheckpointFailed):
                self._report_failure(kind, save.step, save.reason, save.remedy)
            else:
                self._report_export(save)

    def _report_saved(self, kind: str, saved: CheckpointSaved) -> None:
        if saved.warning:
            info(saved.warning)
        numbers = {"stall_seconds": saved.stall_seconds, "seconds": saved.seconds, "bytes": saved.bytes}
        self._log_success(kind, Progress(**saved.facts["progress"]), saved.path, **numbers)

    def _report_export(self, job: JobResult) -> None:
        if job.error is None:
            progress, weights, path = job.result
            info(f"export at step {progress.step}, verified with stock diffusers: {path}")
            self._log_success(EXPORT, progress, path, weights=weights, seconds=job.seconds)
        elif isinstance(job.error, ExportError | ProofError | UserError | OSError | SafetensorError):
            remedy = disk_remedy(job.error)
            is_written = isinstance(job.error, ExportError | ProofError | UserError) and not remedy
            self._report_failure(EXPORT, int(job.name), f"{job.error}", remedy, is_written)
        else:
            raise job.error

    def _log_success(self, kind: str, progress: Progress, path: Path, **fields: Any) -> None:
        self.log(kind, **progress.counts(), file=path.name, **fields)
        self.failures.pop(kind, None)

    def _report_failure(self, kind: str, step: int, reason: str, remedy: str, is_written: bool = False) -> None:
        failure = SaveFailure(kind, f"the {kind} at step {step} failed: {reason}", remedy)
        info(failure.line)
        self.failures[kind] = failure
        if not is_written and not self.has_checkpoint:
            self.first_failure = failure
        self.log(f"{kind}_failed", step=step, reason=reason)


def newest_usable(run: Path, remedy: str) -> Path | None:
    """Return the newest complete checkpoint of a run folder, None if there are no checkpoints.

    Raises a UserError that ends in ``remedy`` if all are damaged: starting over must be the user's decision.
    """
    folder = run / FOLDERS[CHECKPOINT]
    newest = newest_checkpoint(folder)
    if newest is None and (damaged := incomplete_checkpoints(folder)):
        listed = ", ".join(f"{path.name} ({reason})" for path, reason in damaged.items())
        raise UserError(f"every checkpoint in {folder} is damaged: {listed}; {remedy}. Nothing was changed")
    return newest


def checkpoint_to_resume(run: Path, remedy: str) -> Path | None:
    """Return `newest_usable`; print which checkpoints are damaged, or that there is none yet."""
    folder = run / FOLDERS[CHECKPOINT]
    newest = newest_usable(run, remedy)
    if newest is None:
        info(f"no checkpoint in {folder} yet: starting from the beginning")
    for path, reason in incomplete_checkpoints(folder).items():
        info(f"ignoring {path}: it is damaged ({reason})")
    return newest
