"""A Hugging Face hub on this machine: repositories are folders, served with the parts of its API that downloads and
uploads use.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """``repos`` maps `models/OWNER/NAME` or `datasets/OWNER/NAME` to a folder; ``refusals`` to (status, error code)."""

    address: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    root: Path | None = None
    """The folder of repositories that clients create; None: they cannot."""
    private: dict[str, bool] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        self.requests.append(path)
        if path == "/api/whoami-v2":
            return 200, {}, json.dumps({"name": "me"}).encode()
        parts = unquote(path).strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts if parts[0] == "datasets" else ["models", *parts]
        repo, inner = "/".join(parts[:3]), "/".join(parts[5:])
        action, revision = parts[3:5] or ("revision", "main")
        if repo in self.refusals:
            status, code = self.refusals[repo]
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b""
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if action == "revision":
            if revision not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            facts = {"id": repo.partition("/")[2], "sha": COMMIT, "private": self.private.get(repo, False)}
            return 200, {}, json.dumps({**facts, "siblings": []}).encode()
        if action == "tree":
            return 200, {}, json.dumps(list(self._tree(self.repos[repo]))).encode()
        data = (self.repos[repo] / inner).read_bytes()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data

    def answer_post(self, path: str, body: bytes, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request that writes."""
        self.requests.append(path)
        self.tokens.add(token)
        parts = unquote(path).strip("/").split("/")
        if path == "/api/validate-yaml":
            return 200, {}, b'{"errors": [], "warnings": []}'
        if path == "/api/repos/create":
            assert self.root is not None
            asked = json.loads(body)
            repo = f"models/{asked['organization']}/{asked['name']}"
            status = 409 if repo in self.repos else 200
            if status == 200:
                self.repos[repo] = self.root / repo
                self.repos[repo].mkdir(parents=True)
                self.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
            address = f"{self.address}/{repo.partition('/')[2]}"
            return status, {}, json.dumps({"url": address, "name": asked["name"], "id": repo}).encode()
        folder = self.repos["/".join(parts[1:4])]
        if parts[4] == "preupload":
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            return 200, {}, json.dumps({"files": [{**each, "shouldIgnore": False} for each in files]}).encode()
        assert parts[4] == "commit"
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                target = folder / entry["value"]["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(base64.b64decode(entry["value"]["content"]))
            elif entry["key"] == "deletedFile":
                (folder / entry["value"]["path"]).unlink()
        url = f"{self.address}/{'/'.join(parts[2:4])}/commit/{COMMIT}"
        return 200, {}, json.dumps({"commitUrl": url, "commitOid": COMMIT, "success": True}).encode()

    @staticmethod
    def _tree(folder: Path) -> Iterator[dict[str, object]]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                yield {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(data), "oid": oid}


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[None]:
    """Answer HTTP requests on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*hub.answer(urlsplit(self.path).path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self._reply(*hub.answer_post(urlsplit(self.path).path, body, token))

        def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def use_hub(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub in this process talk to ``hub`` and keep its files in ``cache``."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    url = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
