"""The routes, and the server itself."""

import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from sd3_light.config.faults import UserError
from sd3_light.pages import READ_ONLY, render_template
from sd3_light.runlog import set_main_process
from sd3_light.system import state_folder

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sd3_light.ui import connections
    from sd3_light.ui.curve_routes import curve_routes
    from sd3_light.ui.dataset_routes import dataset_routes
    from sd3_light.ui.guard import LOCAL_HOSTS, Guard
    from sd3_light.ui.playground_routes import playground_routes
    from sd3_light.ui.project_routes import project_routes
    from sd3_light.ui.queue_routes import queue_routes
    from sd3_light.ui.replies import integer, json_reply, page_reply
    from sd3_light.ui.sample_routes import sample_routes
    from sd3_light.ui.share_routes import share_routes
except ImportError as error:
    package = (error.name or "starlette").partition(".")[0]
    raise UserError(f"sd3-light ui needs the package {package}: pip install 'sd3-light[ui]'") from error

from sd3_light.ui.data_pages import cache_page, caches_page, inspect_page, original_image
from sd3_light.ui.datasets import Datasets
from sd3_light.ui.folders import Folders
from sd3_light.ui.playground import Playground
from sd3_light.ui.run_pages import compare_page, run_page, runs_page
from sd3_light.ui.run_queue import RunQueue

if TYPE_CHECKING:
    from sd3_light.engines import Launch

_WORKING = ("/datasets", "/playground", "/projects", "/share")  # pages for work alone
_END_SECONDS = 5.0  # after Ctrl-C; more than requests are given to finish


@dataclass
class Site:
    """The folders, models and processes that the pages show and change."""

    folders: Folders
    playground: Playground
    queue: RunQueue
    datasets: Datasets
    is_read_only: bool = False

    @staticmethod
    def of_folders(roots: Sequence[Path], models: Sequence[Path], out: Path, prepare: Callable[[], "Launch"]) -> "Site":
        """Return the site of the runs and caches below ``roots``; see `Playground` for the other arguments."""
        folders = Folders(roots)
        playground = Playground(folders, out, models, prepare)
        queue = RunQueue(state_folder(), folders.roots)
        return Site(folders, playground, queue, Datasets(folders, playground.prepare))


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
    """Return the application, whose queue starts runs while it is served. A read-only site has only pages that change
    nothing."""
    routes = _Routes(site)
    table = [
        Route("/", routes.runs),
        Route("/compare", routes.compare),
        Route("/runs/{run}", routes.run),
        Route("/data", routes.caches),
        Route("/data/{cache}", routes.cache),
        Route("/data/{cache}/image", routes.original),
        Route("/data/{cache}/inspect", routes.inspect),
        *sample_routes(site.folders),
        *playground_routes(site.playground),
        *curve_routes(site.folders),
        *queue_routes(site.folders, site.queue),
        *project_routes(site.folders, site.queue, site.playground),
        *dataset_routes(site.datasets),
        *share_routes(site.folders, site.playground),
    ]
    if site.is_read_only:
        table = [route for route in table if _only_reads(route)]

    @contextlib.asynccontextmanager
    async def working(app: Starlette) -> AsyncIterator[None]:
        if not site.is_read_only:
            site.queue.work()
        yield
        await run_in_threadpool(site.queue.end)

    return Starlette(
        routes=table,
        middleware=[Middleware(Guard, token=token), Middleware(_Marked, is_read_only=site.is_read_only)],
        exception_handlers={UserError: _show_error, ClientDisconnect: _ignore},
        lifespan=working,
    )


def _only_reads(route: Route) -> bool:
    """Return whether a route changes nothing, and does not lead to one that does."""
    return route.methods == {"GET", "HEAD"} and not route.path.startswith(_WORKING)


@dataclass
class _Marked:
    """Tells the templates whether their page can change something."""

    app: ASGIApp
    is_read_only: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set it for the request, and the threads that answer it."""
        READ_ONLY.set(self.is_read_only)
        await self.app(scope, receive, send)


@dataclass
class _Routes:
    """One method per route. Starlette calls those that are not async in threads."""

    site: Site

    def runs(self, request: Request) -> Response:
        query = request.query_params
        page = runs_page(self.site.folders, query.get("text", ""), query.get("sort", "newest"))
        return page_reply(request, page)

    def run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        queue = self.site.queue
        folder = self.site.folders.run(run_id)
        console = queue.console(folder)
        page = run_page(self.site.folders, run_id, console, queue.notes(folder), queue.is_pending(folder))
        return page_reply(request, page)

    def compare(self, request: Request) -> Response:
        return page_reply(request, compare_page(self.site.folders, request.query_params.getlist("run")))

    def caches(self, request: Request) -> Response:
        datasets = {} if self.site.is_read_only else self.site.datasets.listed.get()
        return page_reply(request, caches_page(self.site.folders, datasets))

    def cache(self, request: Request) -> Response:
        query = request.query_params
        number = integer(query.get("page", "")) or 1
        cache_id = request.path_params["cache"]
        return page_reply(request, cache_page(self.site.folders, cache_id, number, query.get("text", "")))

    def original(self, request: Request) -> Response:
        query = request.query_params
        cache_id = request.path_params["cache"]
        row = integer(query.get("row", ""))
        image = original_image(self.site.folders, cache_id, query.get("shard", ""), row)
        return Response(image, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})

    def inspect(self, request: Request) -> Response:
        cache_id = request.path_params["cache"]
        self.site.folders.cache(cache_id)  # an unknown one needs no libraries
        self.site.playground.prepare()
        return page_reply(request, inspect_page(self.site.folders, cache_id))


def _ignore(request: Request, error: Exception) -> Response:
    """Return an answer for a client that has closed its connection, which is not an error of the server."""
    return Response(status_code=400)


def _show_error(request: Request, error: Exception) -> Response:
    """Show a UserError: as JSON to scripts, as a page to readers."""
    code = 404 if request.method == "GET" else 400
    types = (request.headers.get("content-type", ""), request.headers.get("accept", ""))
    if "application/json" in types or request.url.path.startswith("/playground/"):
        return json_reply({"error": str(error)}, code)
    text = render_template("error.html", notes=[str(error)], served=request.url.path)
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), code)
