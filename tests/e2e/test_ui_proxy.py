"""`sd3-light ui` behind the TLS proxy of docs/reference/ui.md: the token, and the checks of Host and Origin."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.ui_server import served
from tests.unit.ui.conftest import write_run
from tests.waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "ui.md"
NAME = "gpu.example.org"
TOKEN = "a-long-secret"


def documented_proxy() -> str:
    """Return nginx's `server` block in the documentation."""
    (block,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a TLS proxy with the documented settings, before a server of a run."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("needs nginx and openssl on the PATH")
    folder = tmp_path_factory.mktemp("proxy")
    write_run(folder / "runs" / "first", steps=1)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={NAME}", "-days", "1"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(folder / "runs", token=TOKEN) as address:
        block = documented_proxy().replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
        block = block.replace("127.0.0.1:7860", urlsplit(address).netloc)
        block = re.sub(
            r"/etc/\S+(fullchain|privkey)\.pem", lambda m: str(certificate if m[1] == "fullchain" else key), block
        )
        temporary = " ".join(
            f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = folder / "nginx.conf"
        config.write_text(f"pid {folder}/pid;\nevents {{}}\nhttp {{ access_log off; {temporary}\n{block}\n}}\n")
        command = ["nginx", "-e", folder / "error.log", "-c", config, "-g", "daemon off; master_process off;"]
        process = subprocess.Popen(command)
        try:
            wait_until(lambda: process.poll() is not None or _listens(port))
            assert process.poll() is None, (folder / "error.log").read_text()
            yield port
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Send a request as a browser that has opened https://NAME."""
    connection = HTTPSConnection("127.0.0.1", port, context=ssl._create_unverified_context())
    connection.request(method, path, b"" if method == "POST" else None, {"Host": NAME, **headers})
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, {name.lower(): value for name, value in reply.getheaders()}, body


def test_the_documented_proxy_serves_who_knows_the_token(proxy: int) -> None:
    assert ask(proxy, "GET", "/")[0] == 401
    status, headers, _ = ask(proxy, "GET", f"/queue?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/queue"), "on the proxy's own address"
    cookie = headers["set-cookie"]
    assert "secure" in cookie.lower()
    cookie = cookie.partition(";")[0]
    assert ask(proxy, "GET", "/", cookie=cookie)[0] == 200
    own, foreign = f"https://{NAME}", "https://evil.example"
    status, _, text = ask(proxy, "POST", "/queue/none/stop", cookie=cookie, origin=own)
    assert (status, "no run none in the queue" in text) == (400, True), "the proxy keeps Host, which Origin must match"
    assert ask(proxy, "POST", "/queue/none/stop", cookie=cookie, origin=foreign)[0] == 403
    assert ask(proxy, "POST", "/queue/none/stop", origin=own)[0] == 401
