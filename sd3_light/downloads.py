"""Downloads of models and datasets from the Hugging Face hub into its local cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import HubId
from sd3_light.runlog import info, is_main_process

_LOG_IN = "run `hf auth login` or set HF_TOKEN"
_FOLDER = "connect, or give a folder that exists, such as one copied from another machine"


def download(hub_id: HubId, only: Sequence[str] | None = None, without: Sequence[str] | None = None) -> Path:
    """Return the local folder or file of ``hub_id``, downloaded if the hub's cache does not contain all of it.

    ``only`` and ``without`` are patterns of file names. A complete cache needs no request to the hub, so a
    branch stays at the commit that was downloaded first (`hf download` updates it).
    """
    only = [hub_id.inner, f"{hub_id.inner}/*"] if hub_id.inner else only
    request = {
        "repo_type": hub_id.kind,
        "revision": hub_id.revision,
        "allow_patterns": only,
        "ignore_patterns": without,
    }
    with _one_line_errors(hub_id):
        folder = _cached(hub_id, request) or _downloaded(hub_id, request)
    if not (folder / hub_id.inner).exists():
        raise UserError(f"{hub_id}: the repository has no file or folder {hub_id.inner!r}; check the spelling")
    return folder / hub_id.inner


def _cached(hub_id: HubId, request: dict[str, Any]) -> Path | None:
    """Return the folder in the cache if the list of its files is known and none is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id.repo, local_files_only=True, **request)) if _is_listed(hub_id) else None
    except LocalEntryNotFoundError:
        return None


def _is_listed(hub_id: HubId) -> bool:
    """Return whether the cache has the list of all files of the revision."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        get_cached_repo_tree(hub_id.repo, repo_type=hub_id.kind, revision=hub_id.revision)
    except CachedRepoTreeNotFoundError:
        return False
    return True


def _downloaded(hub_id: HubId, request: dict[str, Any]) -> Path:
    """Download what is missing; processes that start together share the work through the locks of the cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not constants.HF_HUB_OFFLINE:
        info(f"downloading {hub_id} into {constants.HF_HUB_CACHE}")
    if not is_main_process():
        disable_progress_bars()
    folder = Path(snapshot_download(hub_id.repo, **request))
    # without a connection the hub's client returns what the cache has; a missing part of a model is found later
    if hub_id.kind == "dataset" and not _is_listed(hub_id):
        raise UserError(
            f"{hub_id}: cannot reach the hub, and its files in the local cache may be incomplete; {_FOLDER}"
        )
    return folder


@contextmanager
def _one_line_errors(hub_id: HubId) -> Iterator[None]:
    """Convert the hub's errors to a UserError with the remedy."""
    from huggingface_hub import constants, errors

    # a failed connection raises the HTTP library's error, the base class of the hub's errors
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"{hub_id}: not a valid id; write OWNER/NAME") from error
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{'datasets/' if hub_id.kind == 'dataset' else ''}{hub_id.repo}"
        raise UserError(f"{hub_id}: gated; accept its conditions at {page}, then {_LOG_IN}") from error
    except errors.RepositoryNotFoundError as error:
        remedy = f"check the spelling; if it is private, {_LOG_IN}"
        raise UserError(f"{hub_id}: no such {hub_id.kind} on the hub; {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{hub_id}: no such revision on the hub; write a branch, a tag or a commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(f"{hub_id}: {_why_unreachable(error)}") from error
    except errors.HfHubHTTPError as error:
        reason = " ".join((error.server_message or str(error)).split())
        raise UserError(f"{hub_id}: the hub refused: {reason}; if you need access, {_LOG_IN}") from error
    except (http_error, errors.XetDownloadError) as error:
        raise UserError(f"{hub_id}: {_why_unreachable(error)}") from error


def _why_unreachable(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error.__cause__, OfflineModeIsEnabled):
        return f"not in the local cache, and HF_HUB_OFFLINE is set; {_FOLDER}"
    reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return f"cannot reach the hub ({reason}); {_FOLDER}; the same command continues the download"
