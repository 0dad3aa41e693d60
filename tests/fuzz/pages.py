"""The pages of `sd3-light ui` on hostile folders: every route is asked, and nothing may change below the folder."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote, urlencode

from PIL import Image

from tests.fuzz.mutation import mutate_bytes, mutate_json, odd
from tests.fuzz.world import World
from tests.waiting import HANG_SECONDS

_HERE = "http://127.0.0.1:7860"
_NAMES = ("a", "<b>x", "a b", "%2e%2e", "x'y\"", "\u202e\U0001f600", "-o", "a\nb", "$(touch x)", "n" * 200, "{{7*7}}")
_TEXTS = ("a photo", "", "<script>alert(1)</script>", "{{ 7*7 }}", "\u202e", "a\0b", "x" * 20_000, "\ufeff")
_TEXTS += ("'\"", "\r\n")
_EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "start", "step": 0, "total": 9, "world": 1, "device": "CPU", "engine": "torch", "time": 1.8e9},
    {"event": "step", "step": 1, "samples": 4, "loss": 0.5, "lr": 1e-4, "grad_norm": 0.5, "time": 1.8e9},
    {"event": "eval", "step": 1, "weights": "ema", "set": "held", "flow": 0.4, "time": 1.8e9},
    {"event": "metrics", "step": 1, "weights": "ema", "kid": {"value": 0.1, "low": 0, "high": 1}, "time": 1.8e9},
    {"event": "sample", "step": 1, "weights": "ema", "file": "samples/step-00000001.png", "time": 1.8e9},
)


def write_pages(world: World, folder: Path, rng: random.Random) -> list[object]:
    """Write a served folder with odd names and contents; return the function that asks its pages, and its arguments."""
    served = folder / "served"
    served.mkdir()
    (folder / "private").write_text("PRIVATE")
    _run(served / _name(rng), world, rng)
    _dataset(served, world, rng)
    for _ in range(rng.choice((0, 1, 2))):
        target = rng.choice([*served.rglob("*")])
        if not target.is_dir():
            target.unlink()
            target.symlink_to(rng.choice((folder / "private", Path("/dev/zero"), target)))
    (folder / "out").mkdir()
    return [ask_pages, served, folder / "out", random.Random(rng.random())]


def _name(rng: random.Random) -> str:
    return rng.choice(_NAMES)


def _maybe(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng) if rng.random() < 0.3 else data


def _run(run: Path, world: World, rng: random.Random) -> None:
    events = [mutate_json(event, rng) if rng.random() < 0.2 else event for event in _EVENTS]
    export = run / "exports" / "step-00000001"
    (run / "samples").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    export.mkdir(parents=True)
    files = {
        "log.jsonl": "".join(json.dumps(event) + "\n" for event in events).encode(),
        "config.toml": world.project.train_toml.read_bytes(),
        "console.txt": rng.choice(_TEXTS).encode(),
        "exports/step-00000001/README.md": b"---\nlicense: mit\n---\n# A model\n" + rng.choice(_TEXTS).encode(),
        "exports/step-00000001/proof.json": b"{}",
        f"exports/step-00000001/{_name(rng)}".replace("\n", ""): b"x",
        "queue.json": b'{"format": 1, "jobs": []}',
    }
    for name, data in files.items():
        (run / name).write_bytes(_maybe(data, rng))
    Image.new("RGB", (8, 8)).save(run / "samples" / "step-00000001.png")
    (run / "samples" / "step-00000001.png").write_bytes(_maybe((run / "samples/step-00000001.png").read_bytes(), rng))


def _dataset(served: Path, world: World, rng: random.Random) -> None:
    (served / "images").mkdir()
    for number, (_, data) in enumerate(world.images[:3]):
        stem = f"{number}{_name(rng)}"
        (served / "images" / f"{stem}.png").write_bytes(_maybe(data, rng))
        (served / "images" / f"{stem}.txt").write_bytes(_maybe(rng.choice(_TEXTS).encode(), rng))
    (served / "data.toml").write_bytes(_maybe(world.project.data_toml.read_bytes(), rng))
    (served / f"{_name(rng)}.toml").write_bytes(_maybe(world.project.train_toml.read_bytes(), rng))


def ask_pages(served: Path, out: Path, rng: random.Random) -> None:
    """Ask every route for everything in a served folder. Raises AssertionError for a failure, or for a private file."""
    from starlette.testclient import TestClient

    from sd3_light.ui.server import Site, make_app

    state = {"XDG_STATE_HOME": str(out / "state"), "XDG_CACHE_HOME": str(out / "cache")}
    # images are read in this process: a new one would import what this one has
    with patch.dict(os.environ, state), patch("sd3_light.ui.dataset_jobs._WORKERS", 0):
        site = Site.of_folders([served], [], out / "playground", lambda: None)  # type: ignore[arg-type, return-value]
        site.queue.slots = list  # nothing starts
        client = TestClient(make_app(site), base_url=_HERE, follow_redirects=False)
        for method, path, values in _requests(served, rng):
            reply = client.request(method, path, **values)
            assert reply.status_code < 500, (method, path, reply.status_code)
            assert "PRIVATE" not in reply.text, (method, path)
            is_page = reply.headers.get("content-type", "").startswith("text/html")
            assert not is_page or "<script>alert" not in reply.text, (method, path)
        _wait()


def _requests(served: Path, rng: random.Random) -> Iterator[tuple[str, str, dict[str, Any]]]:
    from sd3_light.ui.folders import folder_id

    for path in ("/", "/queue", "/projects", "/playground", "/evaluations", "/data", "/share"):
        yield "GET", path, {}
    for run in {path.parent for path in served.rglob("log.jsonl")}:
        run_id = folder_id(run)
        file = quote(rng.choice(("samples/step-00000001.png", "../private", "config.toml", _name(rng))))
        for path in (
            f"/runs/{run_id}",
            f"/runs/{run_id}/sample?file={file}&cell={quote(str(odd(rng))[:20])}",
            f"/share?run={run_id}",
            f"/runs/{run_id}/curves?{urlencode({'from': str(odd(rng))[:20], 'to': '2', 'name': _name(rng)})}",
        ):
            yield "GET", path, {}
        for path in (f"/compare?run={run_id}", f"/samples?run={run_id}&text={quote(_name(rng))}"):
            yield "GET", path, {}
        export = {"export": folder_id(run / "exports" / "step-00000001"), "repo": "me/model"}
        yield "POST", "/share/plans", {"data": export}
        yield "GET", "/share/plans/1", {}
    for config in served.rglob("*.toml"):
        config_id, text = folder_id(config), rng.choice(_TEXTS)
        yield "GET", f"/projects/{config_id}", {}
        yield "POST", f"/projects/{config_id}/review", {"json": {"text": text}}
        change = {"text": config.read_text(errors="replace") if config.is_file() else "", "key": _name(rng)}
        yield "POST", f"/projects/{config_id}/value", {"json": {**change, "value": text}}
        yield "POST", f"/projects/{config_id}/save", {"json": {"text": text, "version": "0" * 64}}
        yield "POST", "/start", {"data": {"config": str(config), "mode": rng.choice(("start", "resume", "x"))}}
        yield from _dataset_requests(config_id, served, rng)


def _dataset_requests(dataset_id: str, served: Path, rng: random.Random) -> Iterator[tuple[str, str, dict[str, Any]]]:
    page = f"/datasets/{dataset_id}"
    yield "GET", page, {}
    yield "POST", f"{page}/list", {"data": {"compare": "1"} if rng.random() < 0.3 else {}}
    query = {"text": _name(rng), "where": rng.choice(_TEXTS)[:200], "sort": _name(rng)[:9], "page": str(odd(rng))[:9]}
    yield "GET", f"{page}?{urlencode(query)}", {}
    key = f"images#0/{rng.choice(sorted(path.name for path in (served / 'images').iterdir()))}"
    for part in ("image", "caption"):
        yield "GET", f"{page}/{part}?key={quote(key)}", {}
    yield "POST", f"{page}/caption", {"json": {"key": key, "number": 0, "old": "not this", "new": rng.choice(_TEXTS)}}
    change = {"scope": "all", "action": "preview", "mode": rng.choice(("text", "tag", "x"))}
    change["find"] = rng.choice(_TEXTS)[:99]
    yield "POST", f"{page}/change", {"data": change}
    yield "POST", f"{page}/apply", {"data": {"preview": _name(rng)}}


def _wait() -> None:
    """Wait until the threads that the requests have started are done."""
    deadline = time.monotonic() + HANG_SECONDS
    while any(each.name in ("share", "dataset") for each in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread of the pages does not end"
        time.sleep(0.05)
