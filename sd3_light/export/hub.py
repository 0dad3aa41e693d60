"""Exports on the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from sd3_light.config.faults import UserError

# a connection that fails raises the HTTP library's own error, of which the hub's are kinds
_FAILURES: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
_OURS = ("config.toml",)
"""Not published: it names folders of the machine that trained."""


def check_push(repo: str, api: HfApi | None = None) -> None:
    """Raise a UserError where ``repo`` is no name for a repository, or the hub does not know who is asking."""
    with _one_line(repo):
        validate_repo_id(repo)
        (api or HfApi()).whoami()


def push(folder: Path, repo: str, private: bool = False, api: HfApi | None = None) -> str:
    """Upload an export as a model repository, made where there is none; its address.

    One commit, so the repository never shows half of it; files that an earlier export had and this one has not go.
    """
    api = api or HfApi()
    with _one_line(repo, f"the export itself is whole: {folder}; `hf upload {repo} {folder}` tries again"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload an export of sd3-light",
            ignore_patterns=list(_OURS),
            delete_patterns=["*.safetensors", "*.json", "*.py", *_OURS],
        )
    return str(address)


@contextmanager
def _one_line(repo: str, besides: str = "") -> Iterator[None]:
    """The hub's many ways to fail, each as one line that says what to do."""
    end = f" ({besides})" if besides else ""
    try:
        yield
    except HFValidationError as fault:
        raise UserError(f"--push-to-hub {repo}: no name of a repository; give USER/NAME{end}") from fault
    except OfflineModeIsEnabled as fault:
        raise UserError(f"--push-to-hub {repo}: HF_HUB_OFFLINE is set; unset it to upload{end}") from fault
    except LocalTokenNotFoundError as fault:
        raise UserError(f"--push-to-hub {repo}: not logged in; run `hf auth login`, or set HF_TOKEN{end}") from fault
    except HfHubHTTPError as fault:
        said = " ".join((fault.server_message or str(fault)).split())
        raise UserError(f"--push-to-hub {repo}: the hub refused: {said}{end}") from fault
    except _FAILURES as fault:
        said = " ".join(str(fault).split()) or type(fault).__name__
        raise UserError(f"--push-to-hub {repo}: the hub cannot be reached: {said}{end}") from fault
