"""A local S3 server for tests (moto's), with a log of requests and faults on demand."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

_ERROR = "<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>Please try again</Message></Error>"


class ObjectStore:
    """A running server. ``fails`` decides by method and path which requests are answered with 503."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, str]] = []
        self.bytes_sent = 0
        self.fails: Callable[[str, str], bool] = lambda method, path: False

    @property
    def files(self) -> Any:
        """The bucket as fsspec sees it, without cached listings."""
        import fsspec

        files = fsspec.filesystem("s3")
        files.invalidate_cache()
        return files

    @property
    def _objects(self) -> Any:
        """The server's own state, which is read and written 300 times faster than by requests."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def put(self, folder: Path, name: str = "") -> str:
        """Upload a folder; return its URL."""
        url = f"{self.url}/{name or folder.name}"
        bucket, _, root = url.removeprefix("s3://").partition("/")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._objects.put_object(bucket, f"{root}/{path.relative_to(folder)}", path.read_bytes())
        return url

    def get(self, url: str) -> dict[str, bytes]:
        """Return every object below a URL by its relative name."""
        bucket, _, root = f"{url}/".removeprefix("s3://").partition("/")
        keys = [key for key in self._objects.head_bucket(bucket).keys if key.startswith(root)]
        return {key.removeprefix(root): self._objects.get_object(bucket, key).value for key in keys}

    def reset(self) -> None:
        """Forget the requests so far, and all faults."""
        self.requests.clear()
        self.bytes_sent, self.fails = 0, lambda method, path: False

    def objects_read(self) -> list[str]:
        """Return the paths of objects (not listings) that were read, one per request."""
        return [path for method, path in self.requests if method == "GET" and path.count("/") > 1]


class _Recorder:
    """WSGI middleware: logs requests, injects faults and counts bytes."""

    def __init__(self, app: Any, store: ObjectStore) -> None:
        self.app, self.store = app, store

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.store.requests.append((method, path))
        if self.store.fails(method, path):
            start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [_ERROR.encode()]
        return self._counted(self.app(environ, start_response))

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.store.bytes_sent += len(chunk)
            yield chunk


@contextmanager
def object_store(bucket: str) -> Iterator[ObjectStore]:
    """Run a server with an empty bucket, its endpoint and credentials in the environment; skip without the packages."""
    s3fs = pytest.importorskip("s3fs", reason="the S3 tests need s3fs")
    moto = pytest.importorskip("moto.server", reason="the S3 tests need moto[server]")
    from werkzeug.serving import make_server

    store = ObjectStore(f"s3://{bucket}")
    app = _Recorder(moto.DomainDispatcherApplication(moto.create_backend_app), store)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        variables = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "DEFAULT_REGION": "us-east-1"}
        variables |= {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "secret-testing"}
        for name, value in {**variables, "EC2_METADATA_DISABLED": "true", "MAX_ATTEMPTS": "1"}.items():
            patch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        store.files.mkdir(bucket)  # moto has one state per process: each module uses its own bucket
        store.reset()
        yield store
        s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()


@contextmanager
def web_server(handler: Any) -> Iterator[str]:
    """Run a web server; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_address[1]}"
        web.shutdown()
