"""From a body's bytes to JSON values, within a bound on their number.

Decides how much there may be to build and to check while nothing else is served. Knows no field.

Invariant: values are counted before any is built, so that a body of many costs no more than a
look at its bytes. Letters of a text count for nothing, however many.
"""

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.errors import BodyTooLargeError


def check_values(body: bytes, limit: int) -> None:
    """Raise HTTPException where JSON has more than `limit` values and names.

    What is no JSON may be told either way: it is refused in any case.
    """
    if _count(body) <= limit:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = bare.count(b'"') // 2
    if num_texts > limit or _count(b'"'.join(bare.split(b'"')[::2])) > limit:
        # FastAPI tells any other exception as a body that does not parse.
        raise HTTPException(
            BodyTooLargeError.status,
            f"The body has more than {limit:,} values and names, which is what the server "
            "takes. Send fewer at a time, or start octavo with a larger --max-body-values.",
        )


def _count(text: bytes) -> int:
    """Return what JSON has of commas, colons and brackets that open something.

    Each value or name follows one of them, the outermost value aside.
    """
    opened = sum(map(text.count, (b",", b":", b"[", b"{")))
    return opened - text.count(b"[]") - text.count(b"{}")


def bounded_route(max_values: int) -> type[APIRoute]:
    """Return the class of routes whose bodies have at most so many values."""

    class BoundedRequest(HttpRequest):
        async def json(self) -> Any:
            check_values(await self.body(), max_values)
            return await super().json()

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[HttpRequest], Any]:
            handle = super().get_route_handler()

            async def handle_bounded(http: HttpRequest) -> Response:
                found: Response = await handle(BoundedRequest(http.scope, http.receive))
                return found

            return handle_bounded

    return BoundedRoute
