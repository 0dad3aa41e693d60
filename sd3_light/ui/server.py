"""The routes, and the server itself."""

import contextlib
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from sd3_light.config.faults import UserError
from sd3_light.pages import render_template
from sd3_light.runlog import set_main_process

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
    from starlette.routing import Route

    from sd3_light.ui import connections
    from sd3_light.ui.dataset_routes import dataset_routes
    from sd3_light.ui.guard import LOCAL_HOSTS, Guard
    from sd3_light.ui.replies import body_of, integer, json_reply, object_of, page_reply
except ImportError as error:
    package = (error.name or "starlette").partition(".")[0]
    raise UserError(f"sd3-light ui needs the package {package}: pip install 'sd3-light[ui]'") from error

from sd3_light.ui.data_pages import cache_page, caches_page, inspect_page, original_image
from sd3_light.ui.datasets import Datasets
from sd3_light.ui.folders import Folders
from sd3_light.ui.playground import Playground
from sd3_light.ui.processes import RunProcesses
from sd3_light.ui.run_pages import compare_page, run_page, runs_page
from sd3_light.ui.sample_pages import sample_image, samples_page

if TYPE_CHECKING:
    from sd3_light.engines import Launch

_END_SECONDS = 5.0  # after Ctrl-C; more than requests are given to finish


@dataclass
class Site:
    """The folders, models and processes that the pages show and change."""

    folders: Folders
    playground: Playground
    processes: RunProcesses
    datasets: Datasets

    @staticmethod
    def of_folders(roots: Sequence[Path], models: Sequence[Path], out: Path, prepare: Callable[[], "Launch"]) -> "Site":
        """Return the site of the runs and caches below ``roots``; see `Playground` for the other arguments."""
        folders = Folders(roots)
        playground = Playground(folders, out, models, prepare)
        return Site(folders, playground, RunProcesses(), Datasets(folders, playground.prepare))


def serve(site: Site, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve the site until Ctrl-C; ``announce`` is called with its address. Other hosts than this one need a token."""
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UserError("--token: use printable ASCII characters; cookies cannot hold others")
    if host not in LOCAL_HOSTS:
        token = token or secrets.token_urlsafe(24)
    set_main_process(False)  # hides the stages' progress bars on this terminal
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    query = f"/?{urlencode({'token': token})}" if token else "/"
    announce(f"http://{shown}:{listening.getsockname()[1]}{query}")
    server = make_server(make_app(site, token))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        server.deadline.cancel()


class Server(uvicorn.Server):
    """A server that ends soon after Ctrl-C, even if a page is still being made: its thread cannot be interrupted."""

    deadline = threading.Timer(0, lambda: None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; called in the place of the signal's own handler."""
        super().handle_exit(sig, frame)
        self.deadline.cancel()
        self.deadline = threading.Timer(_END_SECONDS, os._exit, [0 if sig == signal.SIGINT else 128 + sig])
        self.deadline.daemon = True
        self.deadline.start()


def make_server(app: Starlette) -> Server:
    """Return the server of an application."""
    config = uvicorn.Config(app, http=connections.TimedProtocol, log_level="warning", timeout_graceful_shutdown=2)
    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host") from error


def make_app(site: Site, token: str | None = None) -> Starlette:
    """Return the application."""
    routes = _Routes(site)
    return Starlette(
        routes=[
            Route("/", routes.runs),
            Route("/start", routes.start, methods=["POST"]),
            Route("/compare", routes.compare),
            Route("/samples", routes.samples),
            Route("/runs/{run}", routes.run),
            Route("/runs/{run}/sample", routes.sample),
            Route("/runs/{run}/stop", routes.stop, methods=["POST"]),
            Route("/runs/{run}/resume", routes.resume, methods=["POST"]),
            Route("/playground", routes.playground),
            Route("/playground/drawings", routes.draw, methods=["POST"]),
            Route("/playground/drawings/{number}", routes.drawing),
            Route("/playground/drawings/{number}/cancel", routes.cancel, methods=["POST"]),
            Route("/playground/images/{name}", routes.image),
            Route("/data", routes.caches),
            Route("/data/{cache}", routes.cache),
            Route("/data/{cache}/image", routes.original),
            Route("/data/{cache}/inspect", routes.inspect),
            *dataset_routes(site.datasets),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={UserError: _show_error, ClientDisconnect: _ignore},
    )


class _Routes:
    """One method per route. Starlette calls those that are not async in threads."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def runs(self, request: Request) -> Response:
        return page_reply(request, runs_page(self.site.folders))

    def run(self, request: Request) -> Response:
        run_id, processes = request.path_params["run"], self.site.processes
        folder = self.site.folders.run(run_id)
        console, notes, is_starting = processes.console(folder), processes.notes(folder), processes.is_starting(folder)
        return page_reply(request, run_page(self.site.folders, run_id, console, notes, is_starting))

    def compare(self, request: Request) -> Response:
        query = request.query_params
        return page_reply(request, compare_page(self.site.folders, query.getlist("run"), query.get("x", "step")))

    def samples(self, request: Request) -> Response:
        query = request.query_params
        return page_reply(request, samples_page(self.site.folders, query.getlist("run"), query.get("text", "")))

    def sample(self, request: Request) -> Response:
        folder, query = self.site.folders.run(request.path_params["run"]), request.query_params
        image = sample_image(folder, query.get("file", ""), integer(query.get("cell", "")))
        # an address with the version of its file never changes its content
        age = "max-age=31536000, immutable" if "version" in query else "no-cache"
        return Response(image, media_type="image/png", headers={"Cache-Control": f"private, {age}"})

    async def start(self, request: Request) -> Response:
        form = parse_qs((await body_of(request)).decode(errors="replace"))
        config = Path(os.path.expanduser(form.get("config", [""])[0].strip()))  # keeps the ~ of an unknown user
        return await run_in_threadpool(self._start, config, "resume" in form)

    def resume(self, request: Request) -> Response:
        folder = self.site.folders.run(request.path_params["run"])
        return self._start(folder / "config.toml", True, folder)

    def _start(self, config: Path, resume: bool, run: Path | None = None) -> Response:
        folder = self.site.processes.start(config, resume, run)
        return RedirectResponse(f"/runs/{self.site.folders.add_run(folder)}", 303)

    def stop(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        self.site.processes.stop(self.site.folders.run(run_id))
        return RedirectResponse(f"/runs/{run_id}", 303)

    def playground(self, request: Request) -> Response:
        return page_reply(request, self.site.playground.page(request.query_params.get("run", "")))

    async def draw(self, request: Request) -> Response:
        values = await object_of(request)
        drawing = await run_in_threadpool(self.site.playground.submit, values)  # it may search the disk
        return json_reply(drawing.as_json())

    def drawing(self, request: Request) -> Response:
        return json_reply(self.site.playground.drawing(_number(request)).as_json())

    def cancel(self, request: Request) -> Response:
        return json_reply(self.site.playground.cancel(_number(request)).as_json())

    def image(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = self.site.playground.out / name
        if not re.fullmatch(r"\d{5,20}\.png", name) or not path.is_file():
            raise UserError(f"there is no image {name}")
        return FileResponse(path)

    def caches(self, request: Request) -> Response:
        return page_reply(request, caches_page(self.site.folders, self.site.datasets.all()))

    def cache(self, request: Request) -> Response:
        query = request.query_params
        number, cache_id = integer(query.get("page", "")) or 1, request.path_params["cache"]
        return page_reply(request, cache_page(self.site.folders, cache_id, number, query.get("text", "")))

    def original(self, request: Request) -> Response:
        query = request.query_params
        row = integer(query.get("row", ""))
        cache_id, shard = request.path_params["cache"], query.get("shard", "")
        image = original_image(self.site.folders, cache_id, shard, -1 if row is None else row)
        return Response(image, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})

    def inspect(self, request: Request) -> Response:
        cache_id = request.path_params["cache"]
        self.site.folders.cache(cache_id)  # an unknown one needs no libraries
        self.site.playground.prepare()
        return page_reply(request, inspect_page(self.site.folders, cache_id))


def _number(request: Request) -> int:
    """Return the number of the drawing in the address; 0, which none has, for other texts."""
    return integer(request.path_params["number"]) or 0


def _ignore(request: Request, error: Exception) -> Response:
    """Return an answer for a client that has closed its connection, which is not an error of the server."""
    return Response(status_code=400)


def _show_error(request: Request, error: Exception) -> Response:
    """Show a UserError: as JSON to scripts, as a page to readers."""
    code = 404 if request.method == "GET" else 400
    if request.url.path.startswith("/playground/") or request.headers.get("accept") == "application/json":
        return json_reply({"error": str(error)}, code)
    text = render_template("error.html", notes=[str(error)], served=request.url.path, live=False)
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), code)
