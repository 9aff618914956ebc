# SPDX-License-Identifier: Apache-2.0
"""The servers: those that the command line names, and those that the routers among them name."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvcached_nixl.cli.top.columns import KINDS, UP
from kvcached_nixl.cli.top.look import Look, Span
from kvcached_nixl.cli.top.scrape import Scraper, Unanswered
from kvcached_nixl.cli.top.target import Target, printable, target_of_name
from kvcached_nixl.proxy.kind import Kind

__all__ = ["Engine", "Fleet", "Server"]

MOST_SERVERS = 1024
_ROLES = ("prefill", "decode")


class Server:
    """One server, and its last two answers.

    Attributes:
        role: what a router says; "" if none does.
        is_ejected: a router says that its health checks fail.
        error: why it does not answer; "" if it does, or was not asked yet.
        failed_at_seconds: ``time.monotonic`` of the first of the failures in a row.
    """

    def __init__(self, target: Target, *, is_given: bool) -> None:
        self.target = target
        self.is_given = is_given
        self.role = ""
        self.is_ejected = False
        self.error = "" if target.url else "the router's name for it is not HOST:PORT, so it cannot be asked"
        self.failed_at_seconds = time.monotonic()
        self.span: Span | None = None
        self._parts: dict[str, Look] = {}
        self._parts_before: dict[str, Look] = {}
        self.asking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return printable(self.target.name)

    @property
    def is_router(self) -> bool:
        return self.span is not None and self.span.now.is_router

    def ask(self, scraper: Scraper) -> None:
        """Begin to ask it, unless that is under way."""
        if self.target.url and (self.asking is None or self.asking.done()):
            self.asking = asyncio.create_task(self._look(scraper))

    async def _look(self, scraper: Scraper) -> None:
        try:
            self.answered(await scraper.look(self.target.url))
        except Unanswered as failure:
            self.failed(str(failure))
        except Exception as error:  # noqa: BLE001 - recorded as this server's error, which the screen shows
            self.failed(f"top failed to read it: {type(error).__name__}: {printable(str(error))[:120]}")

    def answered(self, look: Look) -> None:
        self.error = ""
        self.span = Span(None if self.span is None else self.span.now, look)
        self._parts_before, self._parts = self._parts, {} if look.is_router else look.by_engine()

    def failed(self, error: str) -> None:
        if not self.error:
            self.failed_at_seconds = time.monotonic()
        self.error = error

    def engines(self) -> list[Engine]:
        """Its data-parallel engines; one where it has not answered yet."""
        several = len(self._parts) > 1
        return [
            Engine(self, f"{self.name} #{printable(key)}" if several else self.name, Span(before, now))
            for key, now in self._parts.items()
            for before in [self._parts_before.get(key)]
        ] or [Engine(self, self.name, None)]


class Engine(NamedTuple):
    """One engine of a server.

    Attributes:
        span: its last two answers; None before the first.
    """

    server: Server
    name: str
    span: Span | None

    @property
    def kind(self) -> Kind | None:
        """What its handshake compares; None if it does not say so."""
        if self.span is None or self.server.error:
            return None
        found = [self.span.total(name) for name in KINDS]
        return None if None in found or not found[0] else Kind(*(value or 0.0 for value in found))


class Fleet:
    """See the module.

    Attributes:
        left_out: number of servers that routers name and that are too many.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        self._servers = {target.name: Server(target, is_given=True) for target in targets}
        self.left_out = 0

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    @property
    def routers(self) -> list[Server]:
        return [one for one in self if one.is_router]

    @property
    def engines(self) -> list[Engine]:
        """By role and name, numbers in names as numbers. A server that has not answered yet counts as an engine."""
        servers = sorted((one for one in self if not one.is_router), key=_order)
        return [engine for server in servers for engine in server.engines()]

    def ask(self, scraper: Scraper, *, only_new: bool = False) -> list[asyncio.Task[None]]:
        """Begin to ask every server, or those that were never asked. Returns what is under way."""
        for one in self:
            if not only_new or one.asking is None:
                one.ask(scraper)
        return [one.asking for one in self if one.asking is not None and not one.asking.done()]

    def follow(self) -> bool:
        """Take over what the routers say of their servers. Returns whether there are new ones.

        Only routers that the command line names are believed.
        """
        listed: dict[str, tuple[str, bool]] = {}
        for router in self.routers:
            if router.is_given and router.span is not None:
                for labels, value in router.span.now.series.get(UP, {}).items():
                    said = dict(labels)
                    name, role = said.get("instance", ""), said.get("role", "")
                    was_ejected = listed.get(name, ("", False))[1]
                    # What a router said before it fell silent may have changed.
                    listed[name] = (role, was_ejected or (value == 0.0 and not router.error))
        for name in [one.target.name for one in self if not one.is_given and one.target.name not in listed]:
            gone = self._servers.pop(name)
            if gone.asking is not None:
                gone.asking.cancel()
        new = [name for name in listed if name not in self._servers]
        room = max(0, MOST_SERVERS - len(self._servers))
        self.left_out = len(new[room:])
        for name in new[:room]:
            self._servers[name] = Server(target_of_name(name), is_given=False)
        for one in self:
            role, one.is_ejected = listed.get(one.target.name, ("", False))
            one.role = printable(role)
        return bool(new[:room])

    def fits(self) -> dict[str, tuple[int, int]]:
        """With how many engines of the other role each can hand over, and how many there are, by the engine's name.

        Only of and among engines that say their kind. Without roles every other engine counts.
        """
        kinds = [(one.name, one.server.role, kind) for one in self.engines if (kind := one.kind) is not None]
        counts = Counter((role, kind) for _, role, kind in kinds)
        found: dict[tuple[str, Kind], tuple[int, int]] = {}
        for role, kind in counts:
            others = [
                (kind.fits(other), count - ((other_role, other) == (role, kind)))
                for (other_role, other), count in counts.items()
                if not role or not other_role or other_role != role
            ]
            found[role, kind] = sum(count for fits, count in others if fits), sum(count for _, count in others)
        return {name: found[role, kind] for name, role, kind in kinds}

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel what is under way, and return it."""
        tasks = [one.asking for one in self if one.asking is not None and not one.asking.done()]
        for one in tasks:
            one.cancel()
        return tasks


def _order(server: Server) -> tuple[int, str, list[tuple[int, str]]]:
    place = _ROLES.index(server.role) if server.role in _ROLES else len(_ROLES)
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", server.target.name)
    return place, server.role, [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts]
