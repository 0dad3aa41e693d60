"""A client of the pages, in the process of the tests. Without starlette or uvicorn, its users are skipped."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs starlette and uvicorn, the extra ui")
pytest.importorskip("uvicorn", reason="needs starlette and uvicorn, the extra ui")

from starlette.testclient import TestClient

from sd3_light.ui.server import Site, make_app

HERE = "http://127.0.0.1:7860"


def no_library() -> Any:
    pytest.fail("no library is needed")


def site_of(folder: Path, prepare: Callable[[], Any] = no_library, models: Sequence[Path] = ()) -> Site:
    """Return the site of a folder, whose playground writes into the folder `out` in it."""
    return Site.of_folders([folder], models, folder / "out", prepare)


def client_of(site: Site, token: str | None = None, base_url: str = HERE) -> TestClient:
    """Return a client that follows no redirect."""
    return TestClient(make_app(site, token), base_url=base_url, follow_redirects=False)
