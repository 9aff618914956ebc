# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven through chromedriver (WebDriver over HTTP), so no library is needed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_SECONDS = 60.0
STARTS = 5
_LISTENS = re.compile(rb"started successfully on port ([0-9]+)")
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
)


class Browser:
    """One browser window."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self._http = http
        self._session = session

    async def open(self, url: str) -> None:
        await self._say("url", {"url": url})

    async def run(self, script: str, *arguments: Any) -> Any:
        """Returns what ``script`` returns in the page."""
        return await self._say("execute/sync", {"script": script, "args": list(arguments)})

    async def until(self, script: str, words: str, seconds: float = 20.0) -> None:
        """Waits until the condition holds in the page, which checks it at every change and at least twice a second."""
        waits = (
            "const [look, done] = [new Function(arguments[0]), arguments[1]];"
            "const again = () => { if (look()) done(true); else setTimeout(again, 50); }; again();"
        )
        await self._say("timeouts", {"script": int(1000 * seconds)})
        try:
            await self._say("execute/async", {"script": waits, "args": [script]})
        except AssertionError as cause:
            raise AssertionError(f"{words}; the page shows: {await self.text()}") from cause

    async def text(self) -> str:
        return str(await self.run("return document.body.innerText"))

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})
        await self._cdp("Emulation.setDeviceMetricsOverride", metrics)

    async def errors(self) -> list[str]:
        """Returns the errors in the page's console since the last call."""
        return [one["message"] for one in await self._say("se/log", {"type": "browser"}) if one["level"] == "SEVERE"]

    async def picture(self, path: Path) -> None:
        reply = await self._http.get(f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(reply.json()["value"]))

    async def _cdp(self, name: str, params: dict[str, Any]) -> None:
        await self._say("goog/cdp/execute", {"cmd": name, "params": params})

    async def _say(self, what: str, body: dict[str, Any]) -> Any:
        reply = await self._http.post(f"/session/{self._session}/{what}", json=body)
        value = reply.json()["value"]
        assert reply.status_code == 200, f"{what}: {value}"
        return value


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Starts Chromium with an empty profile, and stops it when the ``with`` block ends."""
    async with (
        _driver() as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=2 * START_SECONDS) as http,
    ):
        options = {"binary": CHROMIUM, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        reply = await http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
        assert reply.status_code == 200, reply.text
        session = reply.json()["value"]["sessionId"]
        try:
            yield Browser(http, session)
        finally:
            await http.delete(f"/session/{session}")


@contextlib.asynccontextmanager
async def _driver() -> AsyncIterator[str]:
    assert DRIVER is not None
    # No part of it may use a proxy for loopback addresses.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # chromedriver exits if the port that it draws is not free for both IPv4 and IPv6.
    for _ in range(STARTS):
        process = await asyncio.create_subprocess_exec(
            DRIVER, "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            assert process.stdout is not None
            if port := await asyncio.wait_for(_port(process.stdout), START_SECONDS):
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    raise AssertionError("chromedriver does not start")


async def _port(said: asyncio.StreamReader) -> int | None:
    while line := await said.readline():
        if found := _LISTENS.search(line):
            return int(found[1])
    return None
