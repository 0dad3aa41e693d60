"""Uploads to the hub without network: the library's offline mode, and a fake with the real signatures."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import get_session
from safetensors.torch import save_file

from sd3_light.config.faults import UserError
from sd3_light.export.hub import Target, Upload, check_push, prepare_upload, push
from sd3_light.export.licence import NO_LICENCE_FILE
from sd3_light.export.lora_file import write_lora
from sd3_light.model.lora_layers import LoraModule
from tests.fake_hub import FakeHub, serve_hub, use_hub
from tests.refusals import refused

TARGET = Target("me/model")
HTTP_ERROR = HfHubHTTPError.__bases__[0]


CARD = """---
license: other
license_link: LICENSE
license_name: not-stated
tags:
- sd3
---

# A LoRA trained with SD3-Light

## Licence

Not stated.
"""
FILES = {
    "README.md": CARD.encode(),
    "LICENSE": NO_LICENCE_FILE.encode(),
    "proof.json": b"{}",
    "config.toml": b"output_dir = '/home/me/private'",
    "transformer/a.safetensors": b"weights",
    ".notes": b"",
}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "export"


def committed(api: Any) -> dict[str, Any]:
    """Return what the only commit added, as name -> path or bytes, and deleted, as name -> None."""
    (call,) = api.create_commit.call_args_list
    return {each.path_in_repo: getattr(each, "path_or_fileobj", None) for each in call.args[1]}


def refusal(status: int, message: str, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    request = get_session().build_request("GET", "https://huggingface.co/api/whoami-v2")
    response = type(get_session().build_request("GET", "https://x")).__module__  # the HTTP library in use
    library = __import__(response.split(".")[0])
    return kind("refused", response=library.Response(status, request=request), server_message=message)


def recorded_api(error: Exception | None = None, files: Mapping[str, bytes] | None = None) -> Any:
    """Return an API that accepts exactly the calls of the real one, and knows a repository with these files."""
    api = create_autospec(HfApi, instance=True)
    api.whoami.side_effect = api.create_repo.side_effect = error
    api.repo_info.side_effect = error
    if files is None:
        api.repo_info.side_effect = error or refusal(404, "Repository not found", RepositoryNotFoundError)
    api.repo_info.return_value = SimpleNamespace(sha="a" * 40, private=True)
    api.create_repo.return_value = "https://huggingface.co/me/model"
    api.list_repo_tree.return_value = tree = []
    for name, data in (files or {}).items():
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        lfs = {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
        tree.append(RepoFile(path=name, size=len(data), oid=blob, lfs=lfs if name.endswith(".safetensors") else None))
    return api


def called(api: Any) -> list[str]:
    return [call[0] for call in api.method_calls]


def test_a_folder_becomes_a_private_repository(export: Path) -> None:
    api = recorded_api()
    plan = prepare_upload(export, TARGET, api)
    assert called(api) == ["repo_info"], "a plan changes nothing"
    assert push(plan, api) == "https://huggingface.co/me/model"
    api.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    added = committed(api)
    assert set(added) == set(FILES) - {"config.toml", ".notes"}, "the config contains paths of the training machine"
    assert added["transformer/a.safetensors"] == str(export / "transformer/a.safetensors")
    assert plan.left_out == (".notes", "config.toml")


def test_a_plan_names_what_is_new_changed_unchanged_and_deleted(export: Path) -> None:
    known = {**FILES, "proof.json": b"[]", "old.safetensors": b"", "notes.txt": b"", "transformer/a.safetensors": b"w"}
    known.pop("LICENSE")
    api = recorded_api(files=known)
    plan = prepare_upload(export, TARGET, api)
    assert plan.rows == [
        ("LICENSE", f"{len(NO_LICENCE_FILE)} B", "new"),
        ("README.md", f"{len(CARD)} B", "unchanged"),
        ("proof.json", "2 B", "changed"),
        ("transformer/a.safetensors", "7 B", "changed"),
        ("config.toml", "", "deleted"),
        ("old.safetensors", "", "deleted"),
    ]
    push(plan, api)
    names = ("LICENSE", "proof.json", "transformer/a.safetensors", "config.toml", "old.safetensors")
    assert set(committed(api)) == set(names), "what the plan says is done, and nothing else"
    assert api.create_commit.call_args.kwargs["parent_commit"] == "a" * 40, "refused if the repository has changed"
    unchanged = {name: FILES[name] for name in FILES if name not in ("config.toml", ".notes")}
    api = recorded_api(files=unchanged)
    push(prepare_upload(export, TARGET, api), api)
    assert "create_commit" not in called(api)


def test_a_licence_is_stated_in_the_card_and_a_public_repository_needs_one(export: Path) -> None:
    plan = prepare_upload(export, Target("me/model", "apache-2.0"), recorded_api())
    data = ModelCard(plan.card).data.to_dict()
    assert (data["license"], data["tags"], plan.licence) == ("apache-2.0", ["sd3"], "apache-2.0")
    assert not data.keys() & {"license_name", "license_link"}
    assert "## Licence\n\n`license: apache-2.0`." in plan.card
    assert "LICENSE" not in [file.name for file in plan.files], "it says that there is none"
    assert (export / "README.md").read_text() == CARD
    (export / "LICENSE").write_text("the text of a licence")
    assert "LICENSE" in [file.name for file in prepare_upload(export, TARGET, recorded_api()).files]
    api = recorded_api()
    with pytest.raises(UserError, match=r"its card states no licence; give one with --license"):
        push(prepare_upload(export, Target("me/model", public=True), api), api)
    assert called(api) == ["repo_info"]
    push(prepare_upload(export, Target("me/model", "mit", True), api), api)
    assert api.create_repo.call_args.kwargs["private"] is False


def test_a_file_that_changed_since_the_plan_is_not_uploaded(export: Path) -> None:
    api = recorded_api()
    plan = prepare_upload(export, TARGET, api)
    (export / "proof.json").write_text('{"new": 1}')
    refused(r"proof.json has changed since the upload was planned", push, plan, api)
    assert called(api) == ["repo_info"]


def test_an_adapters_file_gets_a_card(tmp_path: Path) -> None:
    modules = {"transformer_blocks.0.attn.to_q": LoraModule(torch.ones(2, 8), torch.ones(8, 2))}
    facts = {"base": "stabilityai/sd3", "adapter": {"rank": 2, "alpha": 2}, "step": 7, "weights": "a|b"}
    file = write_lora(tmp_path / "mine.safetensors", modules, facts=facts)
    api = recorded_api(files={"other.safetensors": b""})
    plan = prepare_upload(file, TARGET, api)
    data = ModelCard(plan.card).data.to_dict()
    assert (data["base_model"], data["license_name"]) == ("stabilityai/sd3", "not-stated")
    assert "| rank | 2 |" in plan.card
    assert "| weights | a\\|b |" in plan.card
    assert "load_lora_weights" in plan.card
    push(plan, api)
    assert committed(api) == {"README.md": plan.card.encode(), "mine.safetensors": str(file)}, "no file is deleted"
    save_file({"x.lora_A.weight": torch.ones(1, 2), "x.lora_B.weight": torch.ones(2, 1)}, tmp_path / "a.safetensors")
    card = prepare_upload(tmp_path / "a.safetensors", TARGET, recorded_api()).card
    assert "SD3-Light" not in card, "that of another program"
    assert "base_model" not in ModelCard(card).data.to_dict()


def test_errors_have_no_token_and_other_inputs_are_refused(export: Path, tmp_path: Path) -> None:
    for message in ("Illegal header value b'Bearer secret-1'", "bad token hf_abc123"):
        plan = prepare_upload(export, TARGET, recorded_api(HTTP_ERROR(message)))
        assert "***" in plan.problem
        assert "secret-1" not in plan.problem
        assert "hf_abc123" not in plan.problem
    (tmp_path / "secret").write_text("private")
    (export / "more.json").symlink_to(tmp_path / "secret")
    refused(r"more.json is a link, which may lead elsewhere", prepare_upload, export, TARGET, recorded_api())
    (export / "more.json").unlink()
    os.mkfifo(export / "pipe")
    refused(r"pipe is not a regular file", prepare_upload, export, TARGET, recorded_api())
    refused(r"is not an export: it has no proof.json", prepare_upload, tmp_path, TARGET, recorded_api())
    with pytest.raises(UserError, match=r"secret is neither the folder of an export nor the \.safetensors file"):
        prepare_upload(tmp_path / "secret", TARGET, recorded_api())
    save_file({"transformer.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is not an adapter's file: .* upload a model as a folder"):
        prepare_upload(tmp_path / "model.safetensors", TARGET, recorded_api())


def test_a_real_upload_to_a_local_hub(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(root=tmp_path / "hub")
    with serve_hub(hub):
        use_hub(hub, tmp_path / "cache", monkeypatch)
        api = HfApi(hub.address, token="hf_secret")
        plan = prepare_upload(export, TARGET, api)
        assert {file.change for file in plan.files} == {"new"}
        assert not hub.repos
        push(plan, api)
        stored = tmp_path / "hub" / "models" / "me" / "model"
        files = {path.relative_to(stored).as_posix(): path.read_bytes() for path in stored.rglob("*") if path.is_file()}
        assert files == {name: FILES[name] for name in FILES if name not in ("config.toml", ".notes")}
        assert hub.private == {"models/me/model": True}
        assert hub.tokens == {"hf_secret"}
        again = prepare_upload(export, TARGET, api)
        assert {file.change for file in again.files} == {"unchanged"}
        (stored / "old.json").write_text("{}")
        (export / "proof.json").write_text("[1]")
        push(prepare_upload(export, TARGET, api), api)
        assert not (stored / "old.json").exists()
        assert (stored / "proof.json").read_text() == "[1]"


@pytest.mark.parametrize(
    "target",
    [
        *(Target(repo) for repo in ("a/b/c", "me/", "bad name", "--x")),
        *(Target("me/model", licence) for licence in ("MIT", "mit\nextra: 1", "a b", "x" * 65, "-")),
    ],
)
def test_an_invalid_name_or_licence_is_refused_before_any_request(target: Target) -> None:
    hub = recorded_api()
    fault = r"--license .*: not an id of the hub" if target.licence else "not a valid repository name; pass USER/NAME"
    for call in (lambda: check_push(target, hub), lambda: prepare_upload(Path("nowhere"), target, hub)):
        refused(fault, call)
    assert called(hub) == []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 sets it (tests/conftest.py does, before the library is imported)."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "no such file")


def test_offline_is_one_line_and_leaves_a_plan(export: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare_upload(export, TARGET)
    assert "HF_HUB_OFFLINE is set" in plan.problem
    assert ("proof.json", "2 B", "upload") in plan.rows
    assert any("not compared with the hub" in text for _, text in plan.facts)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    for action in (lambda: check_push(TARGET), lambda: push(Upload(export, TARGET, ()))):
        refused(r"^--push-to-hub me/model: HF_HUB_OFFLINE is set; unset it.*$", action)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("no token\nat all"), "not logged in; run `hf auth login`"),
        (refusal(403, "No\nright"), r"the hub refused: No right.*complete: .*sd3-light export .* --push-to-hub me/mod"),
        (HTTP_ERROR("Name or service\nnot known"), "cannot reach the hub: "),
        (ConnectionResetError("reset"), "cannot reach the hub: "),
    ],
)
def test_errors_of_the_hub_are_one_line(export: Path, error: Exception, message: str) -> None:
    refused(message, push, Upload(export, TARGET, ()), api=recorded_api(error))
