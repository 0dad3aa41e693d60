"""Requests as values, and values as replies: what all routes share."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from sd3_light.config.faults import UserError
from sd3_light.inputs import parse_json
from sd3_light.sources.captions import is_utf8
from sd3_light.ui import connections

Routes = TypeVar("Routes")
Body = TypeVar("Body")
Handler = Callable[[Routes, Request, Body], Response]
Route = Callable[[Routes, Request], Awaitable[Response]]

_LARGEST_BODY = 1 << 20  # bytes of a request


async def body_of(request: Request) -> bytes:
    """Return the body of a request, which must arrive in time. Raises UserError."""
    body = b""
    try:
        async with asyncio.timeout(connections.REQUEST_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > _LARGEST_BODY:
                    raise UserError("the request is too long")
    except TimeoutError as error:
        raise UserError(
            f"the request did not arrive within {connections.REQUEST_SECONDS:.0f} s; send it again"
        ) from error
    return body


async def fields_of(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form."""
    return parse_qs((await body_of(request)).decode(errors="replace"), keep_blank_values=True)


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form, of several equal ones the first."""
    return {name: values[0] for name, values in (await fields_of(request)).items()}


async def object_of(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises UserError for anything else."""
    body = await body_of(request)
    try:
        values = parse_json(body)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError("the request is not a JSON object")
    return values


def given(read: Callable[[Request], Awaitable[Body]]) -> Callable[[Handler[Routes, Body]], Route[Routes]]:
    """Return a decorator: the method gets what ``read`` makes of the body of a request, and runs in a thread."""

    def decorate(method: Handler[Routes, Body]) -> Route[Routes]:
        async def route(self: Routes, request: Request) -> Response:
            body = await read(request)
            return await run_in_threadpool(method, self, request, body)

        return route

    return decorate


def text_in(values: dict[str, Any], name: str) -> str:
    """Return a text of a JSON object. Raises UserError for anything else, and for half of a surrogate pair."""
    text = values.get(name)
    if not isinstance(text, str):
        raise UserError(f"{name} is not a text")
    if not is_utf8(text):
        raise UserError(f"{name} contains half of a surrogate pair")
    return text


def integer(text: str) -> int | None:
    """Return the integer from 0 that a text is, None for other texts and for more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def number_in(request: Request) -> int:
    """Return the ``number`` in the path of a request; 0, which nothing has, for other texts."""
    return integer(request.path_params["number"]) or 0


def page_reply(request: Request, text: str) -> Response:
    """Return a page, or only that it has not changed since the browser fetched it."""
    body = text.encode("utf-8", "backslashreplace")
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(body, headers=headers)


def json_reply(value: object, code: int = 200) -> Response:
    """Return a value as JSON in ASCII: names of files may contain bytes that are not UTF-8."""
    return Response(json.dumps(value), code, media_type="application/json")
