# SPDX-License-Identifier: Apache-2.0
"""The prover process, which `find.find` starts. Operators use ``python -m kvcached_nixl doctor`` instead.

Standard input: a `Question` as JSON. Last line of standard output: the result (`Said`) as JSON. Exit status 1: the
transports that could be chosen are unknown; the reason is on standard error.

It tests each lane: do the right bytes arrive before and after a page is replaced under a registration, and how fast. It
uses no device itself, so that it can fork. Lanes are tested one after the other, because each NIXL agent keeps a core
busy.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from kvcached_nixl.proof.lanes import carriers, is_never_chosen, only_copies, transports_of
from kvcached_nixl.proof.member import MIXED, PAGE_BYTES, PAGES, SMALL_BYTES, MemberAnswer, Place, Remote
from kvcached_nixl.proof.result import AS_CONFIGURED, LaneFound, Question, Rates, Said, Ucx
from kvcached_nixl.transport.agent import Operation

LANES_SECONDS = 150.0
"""No lane is begun after this time. The caller's timeout would discard the results of all lanes."""
TRIES = 8
"""Most measurements of a lane that looks slow: a busy host does not make a slow lane."""


def prove_lanes(question: Question) -> Said:
    """Test every lane that could be chosen, and UCX's choice as it is configured.

    Raises:
        MemberAnswer: the lanes that could be chosen are unknown.
    """
    lanes: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ("",)) for name in question.backends if name != "UCX"]
    ucx: Ucx | None = None
    if "UCX" in question.backends:
        member = Remote(question, "")
        try:
            ucx = member.call("ucx")
        finally:
            member.end()
        lanes += [("UCX", name, transports_of(name, question.device)) for name in ucx.lanes]
        lanes += [("UCX", AS_CONFIGURED, ("",))]
    until, found = time.monotonic() + LANES_SECONDS, []
    for backend, name, transports in lanes:
        if time.monotonic() < until:
            found.append(prove_one(msgspec.structs.replace(question, backends=(backend,)), name, transports))
        else:
            found.append(LaneFound(name, "", f"the lanes before it took {LANES_SECONDS:g} s"))
    return Said(tuple(found), ucx)


def prove_one(question: Question, name: str, transports: Sequence[str]) -> LaneFound:
    """Test one lane. ``transports`` are values of ``UCX_TLS`` to try; the first with which UCX used this lane counts.

    Bytes that another transport carried prove nothing about this lane.
    """
    unusable: list[str] = []
    for one in dict.fromkeys(transports):
        pair = _Pair(question, LaneFound(name, one))
        try:
            pair.check()
            pair.measure()
            carried = pair.carried
            is_behind_another = only_copies(name) and question.device != "cpu"
            if question.backends != ("UCX",) or name == AS_CONFIGURED or is_behind_another or name in carried:
                return pair.found
            unusable.append(f"UCX moves bytes over {', '.join(sorted(carried)) or 'nothing'} with UCX_TLS={one}")
        except MemberAnswer as error:
            if is_never_chosen(name, pair.said):
                return LaneFound(name, one, never="it does not detect peer failure, so NIXL does not use it")
            unusable.append(f"{error}, with UCX_TLS={one}" if one else str(error))
        finally:
            pair.end()
    return LaneFound(name, transports[-1], "; ".join(unusable))


class _Pair:
    """Two members: one with kvcached's pages, as in a server, and a peer. Each reads and writes the other's memory.

    `check` and `measure` raise `MemberAnswer` if nothing can be moved.
    """

    def __init__(self, question: Question, found: LaneFound) -> None:
        self.found = found
        self._question = question
        self._holder, self._peer = (Remote(question, found.transports) for _ in range(2))
        # In parallel. Their results are read in `check`.
        self._holder.tell("open", elastic=True)
        self._peer.tell("open", elastic=False)
        # Each test writes a new value. It is never zero, which is what unbacked pages contain.
        self._values = itertools.count(1)

    def end(self) -> None:
        self._holder.end()
        self._peer.end()

    @property
    def said(self) -> str:
        return self._holder.said + self._peer.said

    @property
    def carried(self) -> frozenset[str]:
        return carriers(self.said)

    def check(self) -> None:
        """Test whether a registration follows the pages, for each way in which a hand-over moves bytes."""
        self._holder_at, self._peer_at = self._holder.answer(), self._peer.answer()
        self.found = msgspec.structs.replace(self.found, wrong=tuple(self._wrong()))

    def measure(self) -> None:
        places: list[Place] = ["elastic", "ordinary"]
        if self._question.memory_type != "DRAM":
            places.append("host")
        rates: dict[Place, Rates] = {}
        for _ in range(TRIES):
            for place in places:
                rates[place] = self._rates(place).best_of(rates.get(place))
            self.found = msgspec.structs.replace(self.found, rates=rates)
            if not any(self.found.is_slow(place) for place in places[1:]):
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
        """Test all four ways in which a hand-over moves bytes. Yields a description of those that were wrong."""
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
                mover.call("move", operation, "ordinary", self._holder_at["elastic"], [page], MIXED)
            else:
                mover.call("move", operation, "elastic", self._peer_at["ordinary"], [page], MIXED)
            if not target[0].call("holds", target[1], page, value):
                wrong.append(f"{'a peer' if mover is self._peer else 'its own'} {operation}")
        if wrong:
            yield f"{what} ({', '.join(wrong)})"

    def _rates(self, place: Place) -> Rates:
        pages = list(range(PAGES))
        here, there = ("host" if place == "host" else "ordinary"), self._holder_at[place]
        read = self._peer.call("move", "READ", here, there, pages)
        write = self._peer.call("move", "WRITE", here, there, pages)
        sizes = ((SMALL_BYTES, PAGE_BYTES // SMALL_BYTES),)
        small = self._peer.call("move", "READ", here, there, pages[:1], sizes)
        return Rates(PAGES * PAGE_BYTES / read, PAGES * PAGE_BYTES / write, PAGE_BYTES / SMALL_BYTES / small)


def main() -> int:
    question = msgspec.json.decode(sys.stdin.read(), type=Question)
    # Imported once for all forked members. The import touches no device.
    import nixl._api  # noqa: F401

    try:
        said = prove_lanes(question)
    except MemberAnswer as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(said).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
