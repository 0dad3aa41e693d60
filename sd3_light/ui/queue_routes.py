"""The routes of the queue, and those that start and stop runs."""

import os
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sd3_light.ui.folders import Folders
from sd3_light.ui.queue_pages import queue_page
from sd3_light.ui.replies import form_of, given, page_reply
from sd3_light.ui.run_queue import RunQueue
from sd3_light.ui.served_files import ServedFiles


def queue_routes(folders: Folders, queue: RunQueue) -> list[Route]:
    """Return the routes."""
    routes = _QueueRoutes(folders, queue)
    return [
        Route("/queue", routes.page),
        Route("/start", routes.start, methods=["POST"]),
        Route("/queue/{job}/stop", routes.stop, methods=["POST"]),
        Route("/queue/{job}/again", routes.again, methods=["POST"]),
        Route("/queue/{job}/remove", routes.remove, methods=["POST"]),
        Route("/runs/{run}/stop", routes.stop_run, methods=["POST"]),
        Route("/runs/{run}/resume", routes.resume_run, methods=["POST"]),
    ]


@dataclass
class _QueueRoutes:
    """One method per route. Starlette calls those that are not async in threads."""

    folders: Folders
    queue: RunQueue

    def page(self, request: Request) -> Response:
        return page_reply(request, queue_page(self.folders, self.queue))

    @given(form_of)
    def start(self, request: Request, form: dict[str, str]) -> Response:
        config = Path(os.path.expanduser(form.get("config", "").strip()))  # keeps the ~ of an unknown user
        return self._start(config, form.get("mode") or "start")

    @given(form_of)
    def again(self, request: Request, form: dict[str, str]) -> Response:
        self.queue.requeue(request.path_params["job"], form.get("mode", "start"))
        return RedirectResponse("/queue", 303)

    def stop(self, request: Request) -> Response:
        self.queue.stop(self.queue.job(request.path_params["job"]).folder)
        return RedirectResponse("/queue", 303)

    def remove(self, request: Request) -> Response:
        self.queue.remove(request.path_params["job"])
        return RedirectResponse("/queue", 303)

    def stop_run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        self.queue.stop(self.folders.run(run_id))
        return RedirectResponse(f"/runs/{run_id}", 303)

    def resume_run(self, request: Request) -> Response:
        folder = self.folders.run(request.path_params["run"])
        ServedFiles(self.queue.roots).require(folder / "config.toml")
        return self._start(folder / "config.toml", "resume", folder)

    def _start(self, config: Path, mode: str, run: Path | None = None) -> Response:
        job = self.queue.add(config, mode, run)
        return RedirectResponse(f"/runs/{self.folders.add_run(job.folder)}", 303)
