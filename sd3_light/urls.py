"""Access to URLs through fsspec, with one-line errors instead of each library's exceptions.

No state is kept between calls, except the time of the next line about a retry. fsspec creates one file system object
per process, so forked workers are safe.
"""

import asyncio
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations, registry

from sd3_light.config.faults import UserError

PAUSES_SEC = (0.5, 2.0, 8.0, 30.0)
"""Mean delays before a failed request is repeated; a store that throttles needs seconds."""
REPORT_EVERY_SEC = 10.0
"""Time between two lines about repeated requests."""
HTML_BYTES = 512
"""Bytes of an object that show whether it is an HTML page."""
_next_report = 0.0
_LOGGER = logging.getLogger(__name__)  # not `runlog`: sources must not import torch
_JITTER = random.SystemRandom()  # so that the processes of many machines do not return at the same moment

_Result = TypeVar("_Result")
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # protocol -> the extra of sd3-light that installs its package
# Exceptions of the protocols' libraries besides OSError, looked up in the modules that are already loaded.
_LIBRARY_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
# Errors of opening a file system that no retry can fix; the last two by protocols that open a file of this machine.
_UNUSABLE = (
    *(TypeError, ValueError, LookupError, AttributeError, ImportError, RuntimeError),
    *(IsADirectoryError, NotADirectoryError),
)
_CLOCK_CODES = ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture")
_MOST_SKEW_MINUTES = 14.5  # stores accept 15
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")


class RemoteNotFound(UserError):
    """Nothing exists at a URL."""


class RemoteForbidden(UserError):
    """A URL that this user may not read or write."""


class RemoteConflict(UserError):
    """An object was written by another process meanwhile."""


class RemoteUnreachable(UserError):
    """A URL could not be read; a retry may succeed."""


def protocol_problem(url: str) -> str | None:
    """Return why this installation cannot read a URL and what to do; None if it can."""
    protocol = url.partition("://")[0]
    if protocol not in registry and protocol not in known_implementations:
        return f"fsspec does not support the protocol {protocol!r}; give a path, or a URL such as s3://bucket/folder"
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        if protocol in _EXTRAS:
            return f"{protocol}:// needs a package: pip install 'sd3-light[{_EXTRAS[protocol]}]'"
        return f"{protocol}:// needs a package: {_first_line(error)}"
    return None


@contextmanager
def remote_filesystem(url: str, action: str = "read") -> Iterator[tuple[Any, str]]:
    """Yield (file system, path) of a URL; convert errors of the network and its libraries to UserErrors."""
    if problem := protocol_problem(url):
        raise UserError(f"{url}: {problem}")
    with remote_errors(url, action):
        yield _open_filesystem(url)


@contextmanager
def remote_errors(url: str, action: str = "read") -> Iterator[None]:
    """Convert errors of the network and its libraries to UserErrors."""
    try:
        yield
    except FileNotFoundError as error:
        if action != "read":
            problem = "the bucket does not exist or is not visible; create it, or correct cache_dir"
            raise RemoteNotFound(f"cannot {action} {url}: {problem}") from error
        raise RemoteNotFound(
            f"nothing found at {url}; copy the whole cache folder there, or correct cache_dir"
        ) from error
    except PermissionError as error:
        if clock := _clock_problem(error):
            raise RemoteForbidden(f"cannot {action} {url}: {clock}") from error
        raise RemoteForbidden(f"no permission to {action} {url} ({_first_line(error)}); {_remedy(url)}") from error
    except _network_errors() as error:
        if clock := _clock_problem(error):
            raise RemoteForbidden(f"cannot {action} {url}: {clock}") from error
        kind = RemoteForbidden if type(error).__name__ in _NO_CREDENTIALS else RemoteUnreachable
        raise kind(f"cannot {action} {url} ({_first_line(error)}); {_remedy(url)}") from error


def with_retries(url: str, call: Callable[[Any, str], _Result], action: str = "read") -> _Result:
    """Return ``call(file system, path)``; repeat it after growing pauses while the store cannot be reached."""
    for number, pause in enumerate(PAUSES_SEC, start=2):
        try:
            with remote_filesystem(url, action) as (files, path):
                return call(files, path)
        except RemoteUnreachable as error:
            time.sleep(_pause_before_retry(f"cannot {action} {url}", error, number, pause))
    with remote_filesystem(url, action) as (files, path):
        return call(files, path)


async def await_with_retries(url: str, request: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return ``await request()``; repeat it like `with_retries`, while other requests of the event loop continue."""
    for number, pause in enumerate(PAUSES_SEC, start=2):
        try:
            return await request()
        except RemoteUnreachable as error:
            await asyncio.sleep(_pause_before_retry(f"cannot read {url}", error, number, pause))
    return await request()


def _pause_before_retry(problem: str, error: RemoteUnreachable, number: int, mean: float) -> float:
    """Return the seconds before attempt ``number``.

    Prints why, at most once in `REPORT_EVERY_SEC`: a store that throttles rejects many requests.
    """
    global _next_report
    pause = mean * _JITTER.uniform(0.5, 1.5)
    now = time.monotonic()
    if now >= _next_report:
        _next_report = now + REPORT_EVERY_SEC
        reason = _first_line(error.__cause__ or error)
        _LOGGER.warning(f"{problem} ({reason}); retrying in {pause:.0f} s ({number} of {len(PAUSES_SEC) + 1})")
    return pause


def _open_filesystem(url: str) -> tuple[Any, str]:
    """Return (file system, path); a protocol that needs more than a URL, or another library, is a UserError."""
    protocol = url.partition("://")[0]
    try:
        # not `url_to_fs`, which takes "::" in a file name for a chain of protocols
        implementation = fsspec.get_filesystem_class(protocol)
        options = implementation._get_kwargs_from_urls(url)
        return fsspec.filesystem(protocol, **options), implementation._strip_protocol(url)
    except _UNUSABLE as error:
        raise UserError(f"{url}: fsspec cannot open it ({_first_line(error)}); give another URL or a path") from error


def _network_errors() -> tuple[type[BaseException], ...]:
    errors = [getattr(sys.modules.get(module), name, None) for module, name in _LIBRARY_ERRORS]
    return (OSError, *(error for error in errors if error is not None))


def html_problem(url: str, data: bytes) -> str | None:
    """Return one line if the first bytes of an object are those of an HTML page; None for other bytes."""
    if not data[:HTML_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return None
    return (
        f"{url} is an HTML page instead of the file: a login page or a proxy answers instead of the store; log in to "
        f"the network, or {_remedy(url)}"
    )


def _clock_problem(error: BaseException) -> str | None:
    """Return one line if a store refused a request because this machine's clock is wrong; None for other errors.

    The reply to a HEAD request has no error code, but the time of the store.
    """
    responses = (getattr(each, "response", None) for each in _causes(error))
    response = next((each for each in responses if isinstance(each, dict)), {})
    is_skewed = response.get("Error", {}).get("Code") in _CLOCK_CODES
    try:
        date = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
        minutes = (time.time() - date.timestamp()) / 60
    except (LookupError, TypeError, ValueError):  # no date, or not one
        minutes = 0.0
    is_skewed |= isinstance(error, PermissionError) and abs(minutes) > _MOST_SKEW_MINUTES
    if not is_skewed:
        return None
    side = "ahead" if minutes > 0 else "behind"
    offset = f"{abs(minutes):,.0f} minutes {side}" if abs(minutes) >= 1 else "wrong"
    return f"the clock of this machine is {offset}, and the store refuses requests of another time; set the clock"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _remedy(url: str) -> str:
    protocol = url.partition("://")[0]
    if protocol in ("file", "local"):
        return "check the folder and its permissions"
    if protocol in ("s3", "s3a"):
        return (
            "check the network and the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) for "
            "credentials, AWS_ENDPOINT_URL or FSSPEC_S3_ENDPOINT_URL for another endpoint"
        )
    return (
        f"check the network and the environment: credentials as the protocol's library reads them, "
        f"FSSPEC_{protocol.upper()}_... for its settings"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
