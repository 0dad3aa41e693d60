"""Uploads to the hub without network: the library's offline mode, and a fake with the real signatures."""

import inspect
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import get_session

from sd3_light.config.faults import UserError
from sd3_light.export.hub import check_push, push

HTTP_ERROR = HfHubHTTPError.__bases__[0]


class FakeHub(HfApi):
    """Accepts exactly the calls that the real API accepts."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(token="hf_x")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def _record(self, name: str, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(getattr(HfApi, name)).bind(self, *args, **kwargs)
        self.calls.append((name, {key: value for key, value in bound.arguments.items() if key != "self"}))
        if self.error is not None:
            raise self.error

    def whoami(self, *args: Any, **kwargs: Any) -> Any:
        self._record("whoami", *args, **kwargs)

    def create_repo(self, *args: Any, **kwargs: Any) -> Any:
        self._record("create_repo", *args, **kwargs)
        return "https://huggingface.co/me/model"

    def upload_folder(self, *args: Any, **kwargs: Any) -> Any:
        self._record("upload_folder", *args, **kwargs)


def refusal(status: int, message: str) -> HfHubHTTPError:
    request = get_session().build_request("GET", "https://huggingface.co/api/whoami-v2")
    response = type(get_session().build_request("GET", "https://x")).__module__  # the HTTP library in use
    library = __import__(response.split(".")[0])
    return HfHubHTTPError("refused", response=library.Response(status, request=request), server_message=message)


def test_a_folder_becomes_a_repository(tmp_path: Path) -> None:
    hub = FakeHub()
    assert push(tmp_path, "me/model", api=hub) == "https://huggingface.co/me/model"
    (first, created), (second, uploaded) = hub.calls
    assert (first, second) == ("create_repo", "upload_folder")
    assert (created["repo_id"], created["exist_ok"]) == ("me/model", True)
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("me/model", tmp_path)
    assert uploaded["ignore_patterns"] == ["config.toml"], "it contains paths of the training machine"


@pytest.mark.parametrize("repo", ["a/b/c", "me/", "bad name", "--x"])
def test_an_invalid_name_is_refused_before_any_request(repo: str) -> None:
    hub = FakeHub()
    with pytest.raises(UserError, match=r"not a valid repository name; pass USER/NAME"):
        check_push(repo, hub)
    assert not hub.calls


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 sets it (tests/conftest.py does, before the library is imported)."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "no such file")


def test_offline_is_one_line(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    for action in (lambda: check_push("me/model"), lambda: push(tmp_path, "me/model")):
        with pytest.raises(UserError, match=r"^--push-to-hub me/model: HF_HUB_OFFLINE is set; unset it.*$") as error:
            action()
        assert "\n" not in str(error.value)


def test_not_logged_in_is_one_line() -> None:
    with pytest.raises(UserError, match=r"not logged in; run `hf auth login`"):
        check_push("me/model", FakeHub(LocalTokenNotFoundError("no token\nat all")))


def test_a_refusal_contains_the_hubs_message_and_the_path_of_the_export(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"the hub refused: You have no right .*complete: .*hf upload me/model"
    ) as error:
        push(tmp_path, "me/model", api=FakeHub(refusal(403, "You have no\nright")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("failure", [HTTP_ERROR("Name or service\nnot known"), ConnectionResetError("reset")])
def test_an_unreachable_hub_is_one_line(tmp_path: Path, failure: Exception) -> None:
    with pytest.raises(UserError, match="cannot reach the hub: ") as error:
        push(tmp_path, "me/model", api=FakeHub(failure))
    assert "\n" not in str(error.value)
