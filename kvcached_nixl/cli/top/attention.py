# SPDX-License-Identifier: Apache-2.0
"""What an operator should look at, in words. What it means, and what to do, is in docs/troubleshooting.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from kvcached_nixl.cli.top.cells import short
from kvcached_nixl.cli.top.columns import ALONE, KV, ROUTER
from kvcached_nixl.cli.top.fleet import Engine, Fleet, Server
from kvcached_nixl.cli.top.look import Span
from kvcached_nixl.cli.top.target import printable

__all__ = ["Note", "notes"]

FULL = 1.5
"""Alert DecodeIsFull of docs/deploy/prometheus/alerts.yaml."""
_NO_FAULT = ("ok", "client_left")
_ALONE_FOR_WANT_OF_PREFILL = ("no_prefill", "no_parameters")
_LASTS_SECONDS = 2.0


class Note(NamedTuple):
    """One thing about one server.

    Attributes:
        name: of the server, or of one of its engines, as the table has it.
        text: printable ASCII.
    """

    name: str
    text: str


def notes(fleet: Fleet) -> list[Note]:
    """Everything that needs attention now: routers first, then engines in the order of the table."""
    fits = fleet.fits()
    found = [Note(one.name, text) for one in fleet.routers for text in (*_of_server(one), *_of_router(one))]
    told = None
    for one in fleet.engines:
        # Engines of one server follow each other, and it fails once.
        found += [Note(one.server.name, text) for text in _of_server(one.server) if one.server is not told]
        found += [Note(one.name, text) for text in _of_engine(one, fits.get(one.name))]
        told = one.server
    if fleet.left_out:
        found.append(Note("fleet", f"servers that routers name, and that are too many to ask: {fleet.left_out}"))
    return found


def _of_server(server: Server) -> Iterator[str]:
    if server.error:
        seconds = time.monotonic() - server.failed_at_seconds
        lasts = f", for {seconds:.0f} s" if seconds >= _LASTS_SECONDS else ""
        yield f"does not answer: {server.error}{lasts}"
    if server.is_ejected:
        yield "gets no requests: the router's health checks fail"
    if server.span is not None and server.span.now.unread_lines and not server.error:
        yield f"lines of its metrics that cannot be read: {server.span.now.unread_lines}"


def _of_router(server: Server) -> Iterator[str]:
    if server.error or server.span is None:
        return
    span = server.span
    failed = _grown(span, f"{ROUTER}requests_total", "outcome", without=_NO_FAULT)
    if failed:
        yield f"requests failed since the last look: {failed}"
    if growth := span.growth(f"{ROUTER}ejections_total"):
        yield f"servers that stopped getting requests since the last look: {short(growth)}"
    if alone := _grown(span, ALONE, "reason", only=_ALONE_FOR_WANT_OF_PREFILL):
        yield f"decode computed prompts since the last look: {alone}"


def _of_engine(engine: Engine, fits: tuple[int, int] | None) -> Iterator[str]:
    if engine.server.error or engine.span is None:
        return
    span = engine.span
    if failed := _grown(span, f"{KV}handover_failures_total", "cause"):
        yield f"hand-overs failed since the last look: {failed}"
    if revoked := _grown(span, f"{KV}revoked_offers_total", "cause"):
        yield f"offers taken back since the last look: {revoked}"
    if blocks := span.total(f"{KV}quarantined_blocks"):
        yield f"blocks in quarantine: {short(blocks)}"
    used, free, queued = (span.total(f"{KV}{what}_tokens") or 0.0 for what in ("used", "free", "queued"))
    if used + free and used + queued > FULL * (used + free):
        yield f"full: {short(queued)} tokens wait, and all of its memory holds {short(used + free)}"
    if fits is not None and fits[1] and not fits[0]:
        yield f"fits none of {fits[1]} peers: hand-overs with them would be refused"


def _grown(span: Span, name: str, label: str, *, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> str:
    """What has grown, and by how much; "" if nothing has."""
    found = {
        key: growth
        for key, growth in span.growth_by(name, label).items()
        if growth > 0 and key not in without and (not only or key in only)
    }
    largest = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{printable(key) or 'none'} +{short(growth)}" for key, growth in largest)
