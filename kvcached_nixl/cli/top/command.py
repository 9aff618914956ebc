# SPDX-License-Identifier: Apache-2.0
"""Runs ``kvcached-nixl top``: two looks and one table, or a live screen until a key or a signal ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvcached_nixl.cli.top.attention import notes
from kvcached_nixl.cli.top.cells import cell
from kvcached_nixl.cli.top.columns import ENGINE_COLUMNS, ROUTER_COLUMNS, Column
from kvcached_nixl.cli.top.fleet import Fleet
from kvcached_nixl.cli.top.keys import Key, Keys
from kvcached_nixl.cli.top.look import Span
from kvcached_nixl.cli.top.options import Options
from kvcached_nixl.cli.top.scrape import Scraper
from kvcached_nixl.cli.top.screen import Frame, frame

__all__ = ["run", "to_json"]

INTERRUPTED = 128 + signal.SIGINT
PIPE_WIDTH = 200
"""Where standard output is no terminal, and COLUMNS is not set."""
STDIN = 0
_DRAW_SECONDS = 0.25
"""How long the screen waits for answers before it is drawn."""
_KEYS = "q quit   j k space b g G scroll   ! "
_PICKS = ("only engines to look at", "all engines")


def run(options: Options) -> int:
    """Show the servers. Returns the exit status: 1 if a server did not answer the last look with --once."""
    try:
        if options.once:
            return asyncio.run(_once(options))
        return asyncio.run(_Screen(options).run())
    except KeyboardInterrupt:
        # With --once nothing was printed. The live screen is left in another way.
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has enough. The interpreter would flush, and complain, at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


async def _once(options: Options) -> int:
    fleet = Fleet(options.targets)
    async with Scraper() as scraper:
        for pause_seconds in (0.0, options.interval_seconds):
            await asyncio.sleep(pause_seconds)
            await _all(fleet.ask(scraper))
            if fleet.follow():
                await _all(fleet.ask(scraper, only_new=True))
    if options.as_json:
        sys.stdout.write(json.dumps(to_json(fleet), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()
    else:
        console = _console()
        drawn = frame(fleet, console.width, is_ascii=_is_ascii(console))
        for line in (*drawn.head, *drawn.rows, *([Text("")] if drawn.notes else []), *drawn.notes):
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return 1 if any(one.error or one.span is None for one in fleet) else 0


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _console() -> Console:
    # What servers say is no markup, and no emoji has a place here.
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = PIPE_WIDTH
    return console


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


class _Screen:
    """The live screen."""

    def __init__(self, options: Options) -> None:
        self._interval_seconds = options.interval_seconds
        self._fleet = Fleet(options.targets)
        self._console = _console()
        self._live = Live(
            Text(""),
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._terminal = ExitStack()
        self._first = 0
        self._only_marked = False
        self._is_over = False
        self._woken = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        async with Scraper() as scraper:
            with self._signals(), self._terminal:
                self._take_terminal()
                due_seconds = loop.time()
                while not self._is_over:
                    await self._some(self._fleet.ask(scraper))
                    if self._fleet.follow():
                        await self._some(self._fleet.ask(scraper, only_new=True))
                    due_seconds = max(due_seconds + self._interval_seconds, loop.time())
                    await self._until(due_seconds)
            await _all(self._fleet.close())
        return 0

    def _take_terminal(self) -> None:
        self._terminal.enter_context(Keys(STDIN, self._pressed))
        self._terminal.enter_context(self._live)

    def _stopped(self) -> None:
        """Ctrl-Z: the shell has its terminal as it was, until it continues this process."""
        self._terminal.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take_terminal()
        self._woken.set()

    async def _some(self, under_way: Sequence[asyncio.Task[None]]) -> None:
        """Wait for answers, but not long: who is slow must not hold up the others."""
        if under_way:
            await asyncio.wait(under_way, timeout=min(_DRAW_SECONDS, self._interval_seconds / 4))

    async def _until(self, due_seconds: float) -> None:
        """Draw now, and again for each key, until it is time for the next look."""
        loop = asyncio.get_running_loop()
        while not self._is_over:
            self._draw()
            self._woken.clear()
            waits_seconds = due_seconds - loop.time()
            if waits_seconds <= 0:
                return
            try:
                await asyncio.wait_for(self._woken.wait(), waits_seconds)
            except asyncio.TimeoutError:
                return

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for one in ends:
            loop.add_signal_handler(one, self._pressed, Key.QUIT)
        loop.add_signal_handler(signal.SIGWINCH, self._woken.set)
        loop.add_signal_handler(signal.SIGTSTP, self._stopped)
        try:
            yield
        finally:
            for one in (*ends, signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(one)

    def _pressed(self, key: Key) -> None:
        if key is Key.QUIT:
            self._is_over = True
        elif key is Key.ATTENTION:
            self._only_marked, self._first = not self._only_marked, 0
        else:
            page = max(1, self._console.height // 2)
            steps = {Key.UP: -1, Key.DOWN: 1, Key.PAGE_UP: -page, Key.PAGE_DOWN: page}
            self._first += steps.get(key, 0)
            self._first = {Key.FIRST: 0, Key.LAST: sys.maxsize}.get(key, self._first)
        self._woken.set()

    def _draw(self) -> None:
        width, height = self._console.size
        drawn = frame(self._fleet, width, is_ascii=_is_ascii(self._console))
        lines = self._laid_out(drawn, height)
        self._live.update(Text("\n").join(lines[:height]), refresh=True)

    def _laid_out(self, drawn: Frame, height: int) -> list[Text]:
        rows = [drawn.rows[place] for place in drawn.marked] if self._only_marked else drawn.rows
        most_notes = min(len(drawn.notes), max(3, height // 3))
        room = max(1, height - len(drawn.head) - 2 - (most_notes + 1 if most_notes else 0))
        self._first = max(0, min(self._first, len(rows) - room))
        last = min(len(rows), self._first + room)
        shown = rows[self._first : last] + [Text("")] * (room - (last - self._first))
        told = drawn.notes[:most_notes]
        if len(drawn.notes) > most_notes:
            more = len(drawn.notes) - most_notes + 1
            told[-1] = Text(f"! and {more} more")
        where = f"engines {self._first + 1} to {last} of {len(rows)}   " if len(rows) > room else ""
        foot = Text(f"{where}{_KEYS}{_PICKS[self._only_marked]}", "dim")
        return [*drawn.head, *shown, *([Text("")] if told else []), *told, Text(""), foot]


def to_json(fleet: Fleet) -> dict[str, Any]:
    """What the screen shows, for programs; null where a server does not say it."""
    fits = fleet.fits()
    return {
        "routers": [
            {"name": one.name, "error": one.error or None, **_figures(ROUTER_COLUMNS, None if one.error else one.span)}
            for one in fleet.routers
        ],
        "engines": [
            {
                "name": one.name,
                "role": one.server.role or None,
                "error": one.server.error or None,
                "gets_requests": None if not one.server.role else not one.server.is_ejected,
                "fits_peers": None if one.name not in fits else fits[one.name][0],
                "peers": None if one.name not in fits else fits[one.name][1],
                **_figures(ENGINE_COLUMNS, None if one.server.error else one.span),
            }
            for one in fleet.engines
        ],
        "attention": [note._asdict() for note in notes(fleet)],
    }


def _figures(columns: Sequence[Column], span: Span | None) -> dict[str, Any]:
    seconds = None if span is None else span.seconds
    return {"seconds": seconds, **{one.key: None if span is None else cell(one, span).value for one in columns}}
