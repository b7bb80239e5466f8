"""What every request passes before its route: identity, size, key; and the log line after it.

Decides request ids, limits of bodies, who may call what, and what is logged. Knows no route's
body. Invariant: neither keys nor texts of requests are ever logged.
"""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine import clock
from octavo.errors import BodyTooLargeError
from octavo.server import failures
from octavo.server.keys import ANYBODY, ApiKeys, Caller

_log = logging.getLogger("octavo.server")
_REQUEST_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
# Keys of an ASGI scope.
NOTE, REQUEST_ID, CALLER = "octavo.note", "octavo.request_id", "octavo.caller"


class Gate:
    """ASGI middleware. scope_of: path to the scope that a key needs, or None where it is open.

    quiet: paths that monitors ask all the time, and that are not logged.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys | None,
        scope_of: Callable[[str], str | None],
        max_body_bytes: int,
        quiet: frozenset[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._scope_of = scope_of
        self._max_body_bytes = max_body_bytes
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        request_id = _request_id(headers.get("x-request-id"))
        scope[REQUEST_ID] = request_id
        note: dict[str, Any] = {}
        scope[NOTE] = note
        start, status = clock.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("ascii")),
                ]
            await send(message)

        try:
            scope[CALLER] = self._check(scope, headers)
            await self._app(scope, self._limited(receive), send_noting)
        except Exception as error:
            if status:
                raise
            failures.log_unexpected(error)
            await failures.reply(error)(scope, receive, send_noting)
        finally:
            if _path(scope) not in self._quiet:
                _write_line(scope, request_id, status, clock.monotonic() - start, note)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        needed = self._scope_of(_path(scope))
        if self._keys is not None and needed is not None and scope["method"] != "OPTIONS":
            return self._keys.check(headers.get("authorization"), needed)
        return ANYBODY

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with a bound, for bodies that do not tell their length."""
        num_received = 0

        async def receive_limited() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                # FastAPI tells any other exception as a body that does not parse.
                raise HTTPException(BodyTooLargeError.status, str(self._too_large()))
            return message

        return receive_limited

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body has more than {self._max_body_bytes:,} bytes, which is what the server "
            "takes. Send less, or start octavo with a larger --max-body-bytes."
        )


def _path(scope: Scope) -> str:
    """Return the path as routes see it: without the one under which a proxy offers the server."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    inner = path.removeprefix(root)
    return inner if inner.startswith("/") else path


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


def _request_id(given: str | None) -> str:
    """Return the caller's id if it can stand in a header and a log, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _write_line(
    scope: Scope, request_id: str, status: int, seconds: float, note: Mapping[str, Any]
) -> None:
    told = " ".join(f"{name}={value}" for name, value in note.items() if value is not None)
    _log.info(
        "%s %s %s status=%s seconds=%.3f %s",
        request_id,
        scope["method"],
        _path(scope) if scope.get("route") else "(no route)",
        status or "none",
        seconds,
        told,
    )
