"""Upload exports to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from sd3_light.config.faults import UserError

# a failed connection raises the HTTP library's error, the base class of the hub's errors
_FAILURES: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
_PRIVATE = ("config.toml",)
"""Not published: it contains paths of the training machine."""


def check_push(repo: str, api: HfApi | None = None) -> None:
    """Raise a UserError if ``repo`` is not a valid repository name or the user is not logged in."""
    with _hub_errors(repo):
        validate_repo_id(repo)
        (api or HfApi()).whoami()


def push(folder: Path, repo: str, api: HfApi | None = None) -> str:
    """Upload an export as a model repository in one commit, created if needed, and return its address."""
    api = api or HfApi()
    with _hub_errors(repo, f"the export is complete: {folder}; retry with `hf upload {repo} {folder}`"):
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload an export of sd3-light",
            ignore_patterns=list(_PRIVATE),
            # files that only an earlier export had
            delete_patterns=["*.safetensors", "*.json", "*.py", *_PRIVATE],
        )
    return str(address)


@contextmanager
def _hub_errors(repo: str, note: str = "") -> Iterator[None]:
    """Convert the hub's errors to a UserError of one line."""
    end = f" ({note})" if note else ""
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo}: not a valid repository name; pass USER/NAME{end}") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"--push-to-hub {repo}: HF_HUB_OFFLINE is set; unset it to upload{end}") from error
    except LocalTokenNotFoundError as error:
        raise UserError(f"--push-to-hub {repo}: not logged in; run `hf auth login`, or set HF_TOKEN{end}") from error
    except HfHubHTTPError as error:
        reason = " ".join((error.server_message or str(error)).split())
        raise UserError(f"--push-to-hub {repo}: the hub refused: {reason}{end}") from error
    except _FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--push-to-hub {repo}: cannot reach the hub: {reason}{end}") from error
