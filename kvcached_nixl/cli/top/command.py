# SPDX-License-Identifier: Apache-2.0
"""Runs ``kvcached-nixl top``: two looks and one table, or a live screen until a signal ends it.

GET of ``/metrics`` only, bounded in time and in size. Keys and cookies are never sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcached_nixl.cli.top.look import COLUMNS, Server, printable, read

__all__ = ["run"]

ANSWER_SECONDS = 5.0
MOST_BODY_BYTES = 16 << 20
PIPE_WIDTH = 200
"""Where standard output is no terminal, and COLUMNS is not set."""
DRAWN_A_SECOND = 2
_NEVER_FOLDED = ("server", "role", "run", "wait", "held", "asked")


def run(urls: Sequence[str], interval_seconds: float, *, is_once: bool) -> int:
    """Show the servers. Returns the exit status: 1 if a server did not answer the last look of a table."""
    servers = [Server(url) for url in dict.fromkeys(urls)]
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = PIPE_WIDTH
    if not is_once:
        asyncio.run(_live(servers, interval_seconds, console))
        return 0
    asyncio.run(_twice(servers, interval_seconds))
    console.print(shown(servers))
    return 1 if any(one.error for one in servers) else 0


def shown(servers: Sequence[Server]) -> Group:
    """A row for each server, and a line for each that does not answer. Those, and what has failed, are red."""
    table = Table(*COLUMNS, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header in _NEVER_FOLDED
    for server in servers:
        *cells, failed = server.row()
        table.add_row(*cells, Text(failed, "red" if "+" in failed else ""))
    silent = (Text(f"{one.url} does not answer: {one.error}", "red") for one in servers if one.error)
    return Group(table, *silent)


async def _twice(servers: Sequence[Server], interval_seconds: float) -> None:
    async with _session() as session:
        for pause_seconds in (0.0, interval_seconds):
            await asyncio.sleep(pause_seconds)
            await asyncio.gather(*(_look(session, one) for one in servers))


async def _live(servers: Sequence[Server], interval_seconds: float, console: Console) -> None:
    async def follow(server: Server) -> None:
        while True:
            await _look(session, server)
            await asyncio.sleep(interval_seconds)

    async with _session() as session:
        # Each for itself: who is slow must not hold up the others.
        all_of_them = asyncio.gather(*map(follow, servers))
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(one, all_of_them.cancel)
        screen = Live(
            get_renderable=lambda: shown(servers), console=console, screen=True, refresh_per_second=DRAWN_A_SECOND
        )
        with screen, contextlib.suppress(asyncio.CancelledError):
            await all_of_them


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS), cookie_jar=aiohttp.DummyCookieJar()
    )


async def _look(session: aiohttp.ClientSession, server: Server) -> None:
    try:
        async with session.get(f"{server.url}/metrics", allow_redirects=False) as answer:
            if answer.status != 200:
                server.error = f"HTTP status {answer.status}"
                return
            text = await _text(answer.content)
    except asyncio.TimeoutError:
        server.error = f"no whole answer within {ANSWER_SECONDS:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        server.error = printable(str(reason))[:120]
    else:
        look = read(text, time.monotonic())
        if look.values:
            server.answered(look)
        else:
            server.error = "its answer has no metrics of vLLM"


async def _text(content: aiohttp.StreamReader) -> str:
    try:
        await content.readexactly(MOST_BODY_BYTES)
    except asyncio.IncompleteReadError as whole:
        return whole.partial.decode("utf-8", "replace")
    raise ValueError(f"its answer has more than {MOST_BODY_BYTES >> 20} MiB")
