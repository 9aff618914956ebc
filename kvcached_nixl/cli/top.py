# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl top``: two looks at servers and one table, or a live screen until a signal ends it.

GET of ``/metrics`` only, bounded in time and in size. Keys and cookies are never sent. What servers say is data: it is
shown as printable ASCII.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_KV = "kvcached_nixl:"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USED, FREE, QUEUED = (f"{_KV}{what}_tokens" for what in ("used", "free", "queued"))
MOVED = "vllm:nixl_xfer_time_seconds_count"
HELD, ASKED = (f"{_KV}{what}_requests" for what in ("held", "asked"))
STATES = f"{_KV}handover_state_seconds_count"
FAILURES = f"{_KV}handover_failures_total"
FREE_BYTES, MAPPED_BYTES = f"{_KV}free_bytes", f"{_KV}mapped_bytes"

WANTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((RUNNING, WAITING, USED, FREE, QUEUED, MOVED, HELD, ASKED, FREE_BYTES, MAPPED_BYTES), ""),
        **{STATES: "state", FAILURES: "cause"},
    }
)
"""Name of a sample -> the label that tells its series apart here. Series of one value of it are added up."""
_LINE = re.compile(rf"^({'|'.join(map(re.escape, WANTED))})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
NOTHING = "-"


class Look(NamedTuple):
    """One answer.

    Attributes:
        at_seconds: ``time.monotonic`` when it had arrived.
        values: (name, value of the label of `WANTED`) -> the sum over series.
    """

    at_seconds: float
    values: Mapping[tuple[str, str], float]

    def total(self, name: str) -> float | None:
        """The sum of a metric's series; None if the server does not have it."""
        found = [*self.by_label(name).values()]
        return sum(found) if found else None

    def by_label(self, name: str) -> dict[str, float]:
        return {label: value for (one, label), value in self.values.items() if one == name}


def read(text: str, at_seconds: float) -> Look:
    """Reads the text format; what is not of `WANTED`, or no number, is left out."""
    values: dict[tuple[str, str], float] = {}
    for name, labels, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            wanted = WANTED[name]
            key = name, dict(_LABEL.findall(labels)).get(wanted, "") if wanted else ""
            values[key] = values.get(key, 0.0) + value
    return Look(at_seconds, values)


def printable(text: str) -> str:
    """The text with everything but printable ASCII escaped, so that a terminal shows it and does not obey it."""
    return "".join(
        one if " " <= one <= "~" else one.encode("unicode_escape", "backslashreplace").decode() for one in text
    )


@dataclass
class Server:
    """One server, and its last two answers.

    Attributes:
        url: without ``/metrics``.
        error: why it does not answer; "" if it does.
    """

    url: str
    before: Look | None = None
    now: Look | None = None
    error: str = "not heard yet"

    def answered(self, look: Look) -> None:
        self.before, self.now, self.error = self.now, look, ""

    def row(self) -> list[str]:
        if self.error or self.now is None:
            return [self.url, *[NOTHING] * (len(COLUMNS) - 1)]
        return [self.url, *(of(self.now, self.before or self.now) for of in [*COLUMNS.values()][1:])]


def _seconds(now: Look, before: Look) -> float:
    return now.at_seconds - before.at_seconds


def _growth(now: Look, before: Look, name: str, label: str = "") -> float:
    """What a counter has grown by. A restarted server counts from 0 again, so all that it has is new."""
    value, past = (look.values.get((name, label), 0.0) for look in (now, before))
    return value - past if value >= past else value


def _role(now: Look, _: Look) -> str:
    sides = {state.partition("_")[0] for state, count in now.by_label(STATES).items() if count}
    # Only of a server that asks prefill, from its start on.
    sides |= {"decode"} if now.total(HELD) is not None else set()
    return "/".join(sorted(sides & {"prefill", "decode"})) or NOTHING


def _gauge(name: str, *, is_bytes: bool = False) -> Callable[[Look, Look], str]:
    def of(now: Look, _: Look) -> str:
        value = now.total(name)
        return NOTHING if value is None else f"{value / 2**30:.1f} GiB" if is_bytes else short(value)

    return of


def _kv(now: Look, _: Look) -> str:
    used, free, queued = (now.total(name) for name in (USED, FREE, QUEUED))
    if used is None or free is None or used + free <= 0:
        return NOTHING
    return f"{used / (used + free):.0%} of {short(used + free)}{f' +{short(queued)}' if queued else ''}"


def _moved(now: Look, before: Look) -> str:
    seconds = _seconds(now, before)
    return NOTHING if now.total(MOVED) is None or seconds <= 0 else f"{_growth(now, before, MOVED) / seconds:.1f}"


def _failures(now: Look, before: Look) -> str:
    found = []
    for cause, count in sorted(now.by_label(FAILURES).items()):
        growth = _growth(now, before, FAILURES, cause)
        found += [f"{printable(cause)} {short(count)}{f' +{short(growth)}' if growth else ''}"] if count else []
    return ", ".join(found) or NOTHING


def short(value: float) -> str:
    for step, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= step:
            return f"{value / (1e3 if suffix == 'k' else step):.3g}{suffix}"
    return f"{value:.0f}"


COLUMNS: Mapping[str, Callable[[Look, Look], str]] = MappingProxyType(
    {
        "server": lambda now, before: "",
        "role": _role,
        "run": _gauge(RUNNING),
        "wait": _gauge(WAITING),
        "KV used": _kv,
        "hand-overs/s": _moved,
        "held": _gauge(HELD),
        "asked": _gauge(ASKED),
        "free mem": _gauge(FREE_BYTES, is_bytes=True),
        "mapped": _gauge(MAPPED_BYTES, is_bytes=True),
        "failed": _failures,
    }
)
"""Title -> what it shows of two answers, the last one first."""


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
