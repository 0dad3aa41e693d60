"""Restricts the server to browsers on this machine, or to clients that know the token."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Hosts that only programs on this machine can reach."""
COOKIE = "sd3_light_token"
"""Start of the cookie's name. The port follows: browsers send a host's cookies to all its ports."""

_SLOW_PAGES = ("/inspect",)  # ends of paths: the page imports torch and decodes samples
_HEADERS = (
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


@dataclass
class Guard:
    """Refuses requests without the token, if there is one, and requests that another website makes.

    Without a token, only names of this machine are valid in `Host`: another website whose name resolves to 127.0.0.1
    is refused. A browser sends `Origin` with every POST; it must be this server. It sends `Sec-Fetch-Site` with every
    request: links from other websites to a page are followed, but nothing is loaded into them, and no link leads to a
    page that takes long to make.
    """

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = self._answer(Request(scope))
        await (answer or self.app)(scope, receive, _with_headers(send, _HEADERS))

    def _answer(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        try:
            address = urlsplit(f"//{host}")
            name = address.hostname
            port = address.port or 80
            is_foreign = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            return PlainTextResponse("refused: Host or Origin is not a valid address\n", 403)
        if (request.method not in ("GET", "HEAD") and is_foreign) or _is_loaded_elsewhere(request):
            return PlainTextResponse("refused: the request comes from another website\n", 403)
        if self.token is None:
            if name in LOCAL_HOSTS:
                return None
            return PlainTextResponse(f"refused: open the page as http://127.0.0.1, not as {host}\n", 403)
        return self._check_token(request, self.token, f"{COOKIE}_{port}")

    def _check_token(self, request: Request, token: str, cookie: str) -> Response | None:
        in_address = request.query_params.get("token")
        if in_address is not None and _equal(in_address, token) and request.method == "GET":
            # move the token from the address, which ends up in histories, to a cookie
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            response = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), 303)
            is_tls = request.url.scheme == "https"  # uvicorn takes it from a proxy on this machine
            response.set_cookie(cookie, token, httponly=True, samesite="strict", secure=is_tls)
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _equal(request.cookies.get(cookie, ""), token) or _equal(bearer, token):
            return None
        return PlainTextResponse("refused: open the address that `sd3-light ui` printed, with its token\n", 401)


def _is_loaded_elsewhere(request: Request) -> bool:
    """Return whether a browser makes the request for a page of another website, other than by a link to a page."""
    if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):  # typed in, or one of our pages
        return False
    is_link = request.method == "GET" and request.headers.get("sec-fetch-dest") == "document"
    return not is_link or request.url.path.endswith(_SLOW_PAGES)


def _equal(candidate: str, token: str) -> bool:
    return hmac.compare_digest(candidate.encode(), token.encode())


def _with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return send_more
