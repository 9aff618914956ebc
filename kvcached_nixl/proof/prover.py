# SPDX-License-Identifier: Apache-2.0
"""Lane by lane: whose bytes arrive, before and after a page is replaced under a registration, and how fast.

Runs in the prover, which touches no device itself, so that it can fork. One lane after the other: each NIXL agent keeps
a core busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from kvcached_nixl.proof.lanes import transports_of
from kvcached_nixl.proof.member import PAGE_BYTES, PAGES, SMALL_BYTES, Answered, Place, Remote
from kvcached_nixl.proof.result import AS_CONFIGURED, LaneFound, Question, Rates
from kvcached_nixl.transport.base import Operation

__all__ = ["prove_lanes"]

TRIES = 8
"""Where kvcached's pages look slow: a busy host is no slow lane."""


def prove_lanes(question: Question) -> tuple[LaneFound, ...]:
    """What was found of every lane that could be chosen, and of what is chosen as it is configured.

    Raises:
        Answered: it cannot be told what could be chosen.
    """
    lanes: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ("",)) for name in question.backends if name != "UCX"]
    if "UCX" in question.backends:
        member = Remote(question, "")
        try:
            names = member.call("lanes")
        finally:
            member.end()
        lanes += [("UCX", name, transports_of(name, question.device)) for name in names]
        lanes += [("UCX", AS_CONFIGURED, ("",))]
    return tuple(
        _prove(msgspec.structs.replace(question, backends=(backend,)), name, transports)
        for backend, name, transports in lanes
    )


def _prove(question: Question, name: str, transports: Sequence[str]) -> LaneFound:
    """The first of ``transports`` counts under which the two can be connected."""
    found = LaneFound(name, transports[0])
    for one in dict.fromkeys(transports):
        pair = _Pair(question, LaneFound(name, one))
        try:
            pair.check()
            pair.measure()
        except Answered as cause:
            unusable = f"{found.unusable}; with {one}: {cause}" if found.unusable else str(cause)
            found = LaneFound(name, one, unusable)
        else:
            return pair.found
        finally:
            pair.end()
    return found


class _Pair:
    """One with kvcached's pages, as a server has them, and one that reads and writes them, and is read and written.

    Both of its methods raise `Answered` if nothing can be moved.
    """

    def __init__(self, question: Question, found: LaneFound) -> None:
        self.found = found
        self._question = question
        self._holder, self._peer = (Remote(question, found.transports) for _ in range(2))
        # Side by side; what they answer is looked at when it is needed.
        self._holder.tell("open", elastic=True)
        self._peer.tell("open", elastic=False)
        # No byte is ever what was there before, or zero, which is what unbacked pages hold.
        self._values = itertools.count(1)

    def end(self) -> None:
        self._holder.end()
        self._peer.end()

    def check(self) -> None:
        """Whether a registration follows, in every way that bytes are moved."""
        self._holder_at, self._peer_at = self._holder.answer(), self._peer.answer()
        self.found = msgspec.structs.replace(self.found, wrong=tuple(self._wrong()))

    def measure(self) -> None:
        """The peer's READs and WRITEs."""
        places: list[Place] = ["elastic", "ordinary"]
        if self._question.memory_type != "DRAM":
            places.append("host")
        rates: dict[Place, Rates] = {}
        for _ in range(TRIES):
            for place in places:
                rates[place] = self._rates(place).best_of(rates.get(place))
            self.found = msgspec.structs.replace(self.found, rates=rates)
            if not self.found.is_slow:
                return

    def _wrong(self) -> Iterator[str]:
        holder, peer = self._holder, self._peer
        holder.call("map", [0])
        metadata = holder.call("register"), peer.call("register")
        peer.call("meet", metadata[0])
        holder.call("meet", metadata[1])
        yield from self._compare(0, "mapped before registration")
        holder.call("map", list(range(1, PAGES)))
        yield from self._compare(1, "mapped after registration")
        holder.call("unmap", [0])
        holder.call("map", [0])
        yield from self._compare(0, "mapped again")

    def _compare(self, page: int, what: str) -> Iterator[str]:
        """All four ways in which a hand-over moves bytes; what was wrong, in words."""
        holder, peer = (self._holder, "elastic"), (self._peer, "ordinary")
        wrong = []
        ways: tuple[tuple[Remote, Operation, tuple[Remote, Place], tuple[Remote, Place]], ...] = (
            (self._peer, "READ", holder, peer),
            (self._peer, "WRITE", peer, holder),
            (self._holder, "WRITE", holder, peer),
            (self._holder, "READ", peer, holder),
        )
        for mover, operation, source, target in ways:
            value = next(self._values)
            source[0].call("fill", source[1], page, value)
            if mover is self._peer:
                mover.call("move", operation, "ordinary", self._holder_at["elastic"], [page])
            else:
                mover.call("move", operation, "elastic", self._peer_at["ordinary"], [page])
            if not target[0].call("holds", target[1], page, value):
                wrong.append(f"{'a peer' if mover is self._peer else 'its own'} {operation}")
        if wrong:
            yield f"{what} ({', '.join(wrong)})"

    def _rates(self, place: Place) -> Rates:
        pages = list(range(PAGES))
        here, there = ("host" if place == "host" else "ordinary"), self._holder_at[place]
        read = self._peer.call("move", "READ", here, there, pages)
        write = self._peer.call("move", "WRITE", here, there, pages)
        small = self._peer.call("move", "READ", here, there, pages[:1], is_small=True)
        return Rates(PAGES * PAGE_BYTES / read, PAGES * PAGE_BYTES / write, PAGE_BYTES / SMALL_BYTES / small)
