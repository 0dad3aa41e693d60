"""Uploads from the pages: planned and shown, made after a confirmation, with the token of the server's user only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sd3_light.ui.folders import folder_id
from tests.fake_hub import FakeHub, serve_hub, use_hub
from tests.unit.export.test_hub import CARD, FILES
from tests.unit.ui.client import TestClient, client_of, site_of
from tests.unit.ui.conftest import write_run
from tests.unit.ui.test_server import read_only_client
from tests.waiting import wait_until


@pytest.fixture
def export(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=1)
    folder = tmp_path / "run" / "exports" / "step-00000001"
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture
def client(export: Path) -> TestClient:
    return client_of(site_of(export.parents[2], lambda: None))


def planned(client: TestClient, export: Path, **fields: str) -> str:
    reply = client.post("/share/plans", data={"export": folder_id(export), "repo": "me/model", **fields})
    assert reply.status_code == 303, reply.text
    page = reply.headers["location"]
    wait_until(lambda: "Listing files" not in client.get(page).text)
    return str(page)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub(root=tmp_path / "hub")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_server")
    with serve_hub(hub):
        use_hub(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_a_dry_run_shows_every_file_and_the_upload_does_that(client: TestClient, export: Path, hub: FakeHub) -> None:
    run_page = f"/runs/{folder_id(export.parents[1])}"
    assert "/share?run=" in client.get(run_page).text
    assert folder_id(export) in client.get(f"/share?run={folder_id(export.parents[1])}").text
    page = planned(client, export, token="hf_of_the_page", licence="mit")
    text = client.get(page).text
    for name in FILES.keys() - {"LICENSE"}:
        assert name in text
    assert "does not exist, or is hidden from you; private if new" in text
    assert "license: mit" in text
    assert not hub.repos, "nothing is uploaded yet"
    assert client.post(f"{page}/upload").status_code == 303
    wait_until(lambda: "Uploaded to" in client.get(page).text, lambda: client.get(page).text)
    assert hub.private == {"models/me/model": True}
    assert hub.tokens == {"hf_of_the_server"}
    assert "hf_of" not in client.get(page).text
    assert client.post(f"{page}/upload").status_code == 400, "only once"
    assert (export / "README.md").read_text() == CARD, "the export itself is unchanged"


def test_an_export_that_changed_since_the_page_is_not_uploaded(client: TestClient, export: Path, hub: FakeHub) -> None:
    page = planned(client, export)
    (export / "proof.json").write_text('{"other": 1}')
    client.post(f"{page}/upload")
    wait_until(lambda: "has changed since the upload was planned" in client.get(page).text)
    assert not hub.repos


def test_links_are_never_uploaded(client: TestClient, export: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("private")
    (export / "more.json").symlink_to(tmp_path / "secret")
    page = planned(client, export)
    assert "more.json is a link, which may lead elsewhere" in client.get(page).text
    assert client.post(f"{page}/upload").status_code == 400
    linked = export.parent / "step-00000002"
    linked.symlink_to(export)
    assert client.post("/share/plans", data={"export": folder_id(linked), "repo": "me/model"}).status_code == 400


@pytest.mark.parametrize("fields", [{}, {"export": "none"}, {"repo": ""}])
def test_a_form_that_is_not_complete_is_refused(client: TestClient, export: Path, fields: dict[str, Any]) -> None:
    values = {"export": folder_id(export), "repo": "me/model", **fields}
    if not fields:
        values = {}
    assert client.post("/share/plans", data=values).status_code == 400


def test_names_that_are_not_valid_are_errors_of_the_plan(client: TestClient, export: Path) -> None:
    assert "not a valid repository name" in client.get(planned(client, export, repo="a/b/c")).text
    assert "not an id of the hub" in client.get(planned(client, export, licence="<b>")).text
    assert constants.HF_HUB_OFFLINE
    for fields in ({}, {"public": "1"}):
        page = planned(client, export, **fields)
        text = client.get(page).text
        assert "HF_HUB_OFFLINE is set" in text
        assert "<button>Upload</button>" not in text
    reader = read_only_client(export.parents[2])
    assert reader.get("/share").status_code == 404
    assert "/share" not in reader.get(f"/runs/{folder_id(export.parents[1])}").text
