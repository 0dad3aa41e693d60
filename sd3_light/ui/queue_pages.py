"""The page of the queue: what trains, what waits, and what has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from sd3_light.config.faults import UserError
from sd3_light.pages import render_template
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.job import WAITING, Job
from sd3_light.ui.run_pages import RunRow, row_of
from sd3_light.ui.run_queue import CPU, RunQueue, can_resume


@dataclass(frozen=True)
class JobRow:
    """A run of the queue on its page."""

    job: Job
    row: RunRow
    can_resume: bool
    place: int = 0
    is_served: bool = True

    @property
    def status(self) -> str:
        """What it does, in a few words."""
        job = self.job
        if job.state == WAITING:
            where = "" if self.is_served else "; it starts as soon as a server of its folder runs"
            return f"waiting, number {self.place}{where}"
        if not job.is_active:
            return job.state
        where = "" if job.slot in ("", CPU) else f" on GPU {job.slot}"
        if job.is_stopping:
            return f"stopping{where}"
        return f"{self.row.status if self.row.report.is_running else 'starting'}{where}"


def queue_page(folders: Folders, queue: RunQueue) -> str:
    """Return the page of the queue."""
    jobs: list[Job] = []
    problem = queue.problem
    try:
        jobs = queue.jobs()
    except UserError as error:
        problem = str(error)
    ended = sorted((job for job in jobs if job.is_over), key=lambda job: -job.ended)
    return render_template(
        "queue.html",
        active=_rows(folders, queue, [job for job in jobs if job.is_active]),
        waiting=_rows(folders, queue, [job for job in jobs if job.state == WAITING]),
        ended=_rows(folders, queue, ended),
        notes=[problem] if problem else [],
        served="/queue",
        live=True,
    )


def _rows(folders: Folders, queue: RunQueue, jobs: Sequence[Job]) -> list[JobRow]:
    rows = []
    for place, job in enumerate(jobs, start=1):
        folders.add_run(job.folder)  # its page may be opened before it has a log
        row = row_of(folders, folder_id(job.folder), job.folder)
        can_continue = job.is_over and can_resume(job.folder)
        rows.append(JobRow(job, row, can_continue, place, queue.serves(job.folder)))
    return rows
