"""A headless Chromium, spoken to over its DevTools protocol: just enough to look at a page."""

import asyncio
import base64
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
WHY_MISSING = "no Chromium: apt-get install --no-install-recommends chromium"
_SECONDS = 60


class Page:
    """One tab. errors: what the console said of errors, and exceptions that nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method and return its result; note errors that come before."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_SECONDS)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def open(self, file: Path, *, width: int = 1280, is_dark: bool = False) -> None:
        """Open a file as a screen or a phone would show it, and wait until it is drawn."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=file.resolve().as_uri())
        async with asyncio.timeout(_SECONDS):
            while not await self.evaluate("document.documentElement?.dataset.drawn"):
                await asyncio.sleep(0.05)

    async def screenshot(self, file: Path, selector: str = "html") -> None:
        """Keep a picture of one element, by default of the whole page."""
        box = await self.evaluate(
            f"(({{x, y, width, height}}) => ({{x, y: y + scrollY, width, height, scale: 1}}))"
            f"(document.querySelector('{selector}').getBoundingClientRect())"
        )
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=box)
        file.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Start Chromium with a profile in `folder`, and open a tab."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _tab(session, await _address(process))
            async with session.ws_connect(address, max_msg_size=1 << 28) as socket:
                yield Page(socket)
    finally:
        process.kill()
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Return host and port that Chromium listens at, as it says itself."""
    assert process.stderr is not None
    async with asyncio.timeout(_SECONDS):
        async for line in process.stderr:
            found = re.search(rb"DevTools listening on ws://([^/]+)/", line)
            if found:
                return found[1].decode()
    raise AssertionError("Chromium ended without listening")


async def _tab(session: aiohttp.ClientSession, address: str) -> str:
    async with session.get(f"http://{address}/json/list") as response:
        tabs = await response.json()
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
