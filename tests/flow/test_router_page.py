# SPDX-License-Identifier: Apache-2.0
"""The page at ``/`` in a real browser: it shows the router's state, follows it, and says so when it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.browser import CHROMIUM, DRIVER, browser
from support.router_under_test import ADMIN_KEY, right, serving

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DRIVER is None or CHROMIUM is None, reason="chromium and chromedriver are not installed"),
]

SAYS = "return document.body.innerText.includes({!r})"
ENTER = "document.getElementById('key').value = arguments[0]; document.querySelector('button').click()"
ROW = "return [...document.querySelectorAll('#{} tbody tr')].some(row => {})"


def row(table: str, *words: str) -> str:
    """Whether a line of a table has all of these words."""
    return ROW.format(table, " && ".join(f"row.innerText.includes({word!r})" for word in words))


def test_servers_load_and_requests_are_shown_as_they_come(tmp_path: Path) -> None:
    """Without loading the page again: what is up, down or draining; what went right and what went wrong, and why."""

    async def run() -> None:
        async with serving(2, 2) as at, browser(tmp_path) as page:
            for dark, width in ((False, 1200), (True, 1200), (False, 400)):
                await page.size(width, 900, dark=dark)
                await page.open(at.url)
                await page.until(SAYS.format("missing or wrong"), "no key is asked for")
                await page.run(ENTER, ADMIN_KEY)
                await page.until(SAYS.format("No request yet."), "an empty table")
                fits = "return document.documentElement.scrollWidth <= innerWidth"
                assert await page.run(fits), f"the page is wider than {width}"
            await page.size(1200, 900)
            assert right(await at.complete(max_tokens=4, headers={"X-Request-Id": "the-first"}))
            await page.until(row("recent", "the-first", "ok", "pull", at.prefills[0].name), "the request is not shown")
            await page.until(row("servers", "prefill", at.prefills[0].name, "up", "pull"), "prefill is not shown")
            for decode in at.decodes:
                decode.faults.append("400")
            assert (await at.complete("x", headers={"X-Request-Id": "the-second"})).status_code == 400
            await page.until(row("recent", "the-second", "server_said_no", "400"), "the refusal is not shown")
            for decode in at.decodes:
                decode.faults.clear()
            # Words of a client's are text, whatever they say.
            mark = "<img src=x onerror=document.title='changed'>"
            assert (await at.complete("x", n=2, **{"truncate_prompt_tokens": mark})).status_code == 400
            await page.until(row("recent", "truncate_prompt_tokens"), "what is wrong is not said")
            at.decodes[0].token_seconds = at.decodes[1].token_seconds = 0.1
            asking = asyncio.create_task(at.complete("y" * 4000, max_tokens=30))
            await page.until(row("servers", "decode", "1,0"), "the load is not shown")
            assert right(await asking, "y" * 4000, 30)
            await at.administer("POST", f"/{at.decodes[0].name}/drain")
            await page.until(row("servers", at.decodes[0].name, "drained"), "it does not drain")
            await at.prefills[1].stop()
            await page.until(row("servers", at.prefills[1].name, "down"), "it is not down")
            await page.until(row("servers", "no connection"), "why is not said")
            assert await page.run("return document.title") == "kvcached-nixl router"
            # The key is asked for with a 401.
            assert [one for one in await page.errors() if " 401 " not in one] == []

    asyncio.run(run())


def test_a_page_whose_router_is_gone_or_wants_a_key_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with browser(tmp_path) as page:
            async with serving(admin_key="the-key", all_up=False) as at:
                await page.open(at.url)
                await page.until(SAYS.format("missing or wrong"), "no key is asked for")
                await page.run(ENTER, "another")
                await page.until(SAYS.format("missing or wrong"), "a wrong key is taken")
                await page.run(ENTER, "the-key")
                await page.until(row("servers", at.decodes[0].name), "the servers are not shown")
                assert await page.run("return document.getElementById('ask').hidden")
            await page.until(SAYS.format("The router does not answer"), "it does not notice")
            assert at.decodes[0].name in await page.text()

    asyncio.run(run())
