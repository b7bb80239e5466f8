"""`octavo explain`: what happened to one request of a running server.

Decides how a life looks on a terminal. The server decides the words. Invariant: stdout carries the
explanation alone; whatever keeps it from coming is one line on stderr.
"""

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from octavo.errors import OctavoError, SettingError

TIMEOUT_SECONDS = 30.0
Json = dict[str, Any]


def run_explain(request_id: str, url: str, *, as_json: bool) -> None:
    """Ask the server at `url`, and print its words and a table of the parts, or its JSON."""
    found = _ask(request_id, url.rstrip("/"))
    if as_json:
        print(json.dumps(found))
        return
    for line in _lines(found):
        print(line)


def _ask(request_id: str, url: str) -> Json:
    if urlsplit(url).scheme not in ("http", "https"):
        raise SettingError(f"--url must begin with http:// or https://, not {url!r}.")
    address = f"{url}/v1/requests/{quote(request_id, safe='')}/explain"
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(address, headers=headers), timeout=TIMEOUT_SECONDS) as reply:
            content = reply.read()
    except HTTPError as error:
        raise OctavoError(_refusal(error, url)) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise OctavoError(
            f"No server answers at {url}: {reason}. Start one with `octavo serve`, or name its "
            "address with --url."
        ) from None
    found = _parsed(content)
    if found.get("object") != "request.explanation":
        raise OctavoError(f"What answers at {url} explains no requests: is it Octavo?")
    return found


def _refusal(error: HTTPError, url: str) -> str:
    told = _parsed(error.read()).get("error")
    told = told if isinstance(told, dict) else {}
    message = told.get("message")
    if not message or (error.code == 404 and told.get("code") != "request_not_found"):
        return f"What answers at {url} explains no requests: it said {error.code}. Is it Octavo?"
    return str(message)


def _parsed(content: bytes) -> Json:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _lines(found: Json) -> Iterator[str]:
    yield f"{found['id']} ({found['model']}, {found['status']})"
    yield ""
    yield from found["summary"]
    yield ""
    wall = found["wall_seconds"]
    for part in found["parts"]:
        share = 100 * part["seconds"] / wall if wall else 0.0
        yield f"{1e3 * part['seconds']:10,.1f} ms {share:5.1f} %  {part['what']}"
    yield f"{1e3 * wall:10,.1f} ms 100.0 %  in all"
