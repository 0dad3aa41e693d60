"""The server of `sd3-light ui` in this process, for a real browser."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sd3_light.engines import Launch
from tests.waiting import HANG_SECONDS, wait_until

pytest.importorskip("starlette", reason="needs starlette and uvicorn, the extra ui")
uvicorn = pytest.importorskip("uvicorn", reason="needs starlette and uvicorn, the extra ui")


@contextmanager
def served(
    folder: Path,
    models: Sequence[Path] = (),
    state: Path | None = None,
    token: str | None = None,
    is_read_only: bool = False,
) -> Iterator[str]:
    """Serve a folder, with the queue in a state folder, to those with the token; yields the address."""
    from sd3_light.ui.server import Site, make_app

    site = Site.of_folders([folder], models, folder / "playground", Launch)
    site.is_read_only = is_read_only
    if state is not None:
        site.queue.state = state
    server = uvicorn.Server(
        uvicorn.Config(make_app(site, token), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(HANG_SECONDS)
