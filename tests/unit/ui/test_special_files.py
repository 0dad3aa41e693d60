"""Special files in run folders from others: every page answers, and the server ends whatever a page does."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.job_process import start_process
from sd3_light.ui.run_queue import RunQueue
from tests.special_files import SPECIAL, replace
from tests.unit.ui.client import client_of, site_of
from tests.unit.ui.conftest import write_run

SAMPLE = "samples/step-00000010.png"
HANGING = """
import sys, time
from collections.abc import Callable
from pathlib import Path
from sd3_light.ui import server

def hang(*_):
    print("hangs", flush=True)
    while True:
        time.sleep(1)

server._END_SECONDS = 1.0
server.runs_page = hang
site = server.Site.of_folders([Path(sys.argv[1])], [], Path(sys.argv[1]) / "playground", lambda: None)
server.serve(site, "127.0.0.1", 0, None, lambda address: print(address, flush=True))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SPECIAL)
def test_every_page_answers_beside_special_files(runs: Path, kind: str) -> None:
    """One run has such a file in the place of each of its files; the other is shown as usual."""
    for name in ("config.toml", "console.txt", ".lock", SAMPLE):
        replace(runs / "first" / name, kind)
    (runs / "logless").mkdir()
    replace(runs / "logless" / "log.jsonl", kind)
    client, run_id, logless = client_of(site_of(runs)), folder_id(runs / "first"), folder_id(runs / "logless")
    for path in ("/", f"/runs/{run_id}", f"/compare?run={run_id}", f"/samples?run={run_id}", "/playground", "/data"):
        reply = client.get(path)
        assert reply.status_code == 200, path
        assert "step" in reply.text or "/playground" in path or "/data" in path
    assert client.get(f"/runs/{run_id}/sample?file={SAMPLE}").status_code == 404
    assert client.get(f"/runs/{logless}").status_code in (200, 404)
    for action in ("stop", "resume"):
        assert client.post(f"/runs/{run_id}/{action}").status_code == 400, action


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "loop", "link"])
def test_the_console_of_a_started_run_replaces_special_files(tmp_path: Path, fake_python: Any, kind: str) -> None:
    """A link to another file is replaced, and that file stays as it is."""
    other, console = tmp_path / "other", tmp_path / "run" / "console.txt"
    other.write_text("not for training\n")
    console.parent.mkdir()
    console.symlink_to(other) if kind == "link" else replace(console, kind)
    fake_python("echo printed")
    start_process(tmp_path / "train.toml", (), console.parent, tmp_path / "exit", dict(os.environ)).wait(60)
    assert RunQueue(tmp_path / "state", [tmp_path]).console(console.parent) == "printed\n"
    assert other.read_text() == "not for training\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_ends_while_a_page_hangs(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        address = server.stdout.readline().strip()
        with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0)) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\n\r\n".encode())
            assert server.stdout.readline() == "hangs\n"
            server.send_signal(number)
            assert server.wait(60) in ((0,) if number == signal.SIGINT else (-number, 128 + number))
    finally:
        server.kill()
        server.wait()


def test_links_lead_to_no_run_cache_or_config(tmp_path: Path) -> None:
    private, served = tmp_path / "private", tmp_path / "served"
    write_run(private / "run", steps=1)
    (private / "cache" / "shards").mkdir(parents=True)
    (private / "cache" / "manifest.json").write_text("{}")
    served.mkdir()
    for name in ("run", "cache"):
        (served / name).symlink_to(private / name)
    (served / "half").mkdir()
    (served / "half" / "log.jsonl").symlink_to(private / "run" / "log.jsonl")
    write_run(served / "own", steps=1)
    folders = Folders([served])
    assert list(folders.runs().values()) == [served / "own"]
    assert folders.caches() == {}
    assert Folders([served / "run"]).runs(), "the user named it"
    below = tmp_path / "below"
    run = write_run(below / "run", steps=1)
    (tmp_path / "private.toml").write_text('password = "secret"\n')
    (run / "config.toml").unlink()
    (run / "config.toml").symlink_to(tmp_path / "private.toml")
    client = client_of(site_of(below))
    page = client.get(f"/runs/{folder_id(run)}").text
    assert "secret" not in page
    assert "config.toml is a link" in page
    reply = client.post(f"/runs/{folder_id(run)}/resume")
    assert reply.status_code == 400
    assert "is a link, or is reached through one" in reply.text
    assert Folders([below]).caches() == {}
