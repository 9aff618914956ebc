# SPDX-License-Identifier: Apache-2.0
"""The prover process, which `find.find` starts. Operators use ``python -m kvcached_nixl doctor`` instead.

Standard input: a `Question` as JSON. Last line of standard output: the `Proof`. Exit status 1: the transports that
could be chosen are unknown; the reason is on standard error.

It tests each lane: do the right bytes arrive before and after a page is replaced under a registration, and how fast. It
uses no device itself, so that it can fork the two members of a lane, which it asks over pipes and kills.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.proof.result import (
    AS_CONFIGURED,
    COPIES,
    LaneFound,
    Place,
    Proof,
    Question,
    Rates,
    Ucx,
    carriers,
    is_never_chosen,
    transports_of,
    ucx_of_this_process,
)
from kvcached_nixl.transport.agent import Operation, Transport, make_agent, register, select_device

LANES_SECONDS = 150.0
"""No lane is begun after this time. The caller's timeout would discard the results of all lanes."""
TRIES = 8
"""Most measurements of a lane that looks slow: a busy host does not make a slow lane."""
PAGE_BYTES, PAGES = 2 << 20, 4
SMALL_BYTES = 4096
BEGIN_SECONDS = 60.0
"""Timeout until a member has memory and an agent: the first use of a device or of UCX may take most of a minute."""
ANSWER_SECONDS = 10.0
MIXED = ((1 << 20, 1), (64 << 10, 8), (4096, 64), (512, 128), (192 << 10, 1))
"""(bytes, count) of a page's descriptors when bytes are compared: UCX moves long and short descriptors in different
ways, and KV has both."""
_PR_SET_PDEATHSIG = 1


class MemberAnswer(Exception):
    """A member reported a failure, or did not answer. The message gives the reason."""


class Member:
    """The commands of a member, in its forked process. It takes the same steps as a server, in the same order and on
    the same kinds of threads, because UCX's choice depends on both: the main thread stands for the engine's, which
    selects the device, makes the agent, allocates memory and registers it; a second one for the transfer thread.

    Attributes:
        addresses: of each place where it has memory; only ``is_elastic`` ones have kvcached's pages.
    """

    def __init__(self, question: Question, transports: str, *, is_elastic: bool, has_memory: bool) -> None:
        if transports:
            os.environ["UCX_TLS"] = transports
        # Without this it is not known which transport carried the bytes.
        os.environ["UCX_PROTO_INFO"] = "y"
        import torch

        # A fork has none of torch's threads, and two members with their agents already use more than two cores.
        torch.set_num_threads(1)
        self._synchronize = torch.accelerator.synchronize if question.device != "cpu" else lambda: None
        self._question = question
        device = question.device, question.device_index
        select_device(*device)
        self._agent = make_agent(question.backends)
        self._transport = Transport(self._agent, question.memory_type, question.device_index)
        self._transfers = ThreadPoolExecutor(1, "transfers", initializer=select_device, initargs=device)
        self._memory: dict[Place, Any] = {}
        self.addresses: dict[Place, Any] = {}
        if not has_memory:
            return
        if is_elastic:
            from kvcached import vmm_ops

            # kvcached calls its device cuda:N on host memory, too.
            name = f"cuda:{question.device_index}"
            vmm_ops.init_kvcached(name, PAGE_BYTES, False)
            (pool,) = vmm_ops.create_kv_tensors(2 * PAGES * PAGE_BYTES, 1, name, 1)
            self._memory["elastic"] = pool.view(torch.uint8)[: PAGES * PAGE_BYTES]
        self._memory["ordinary"] = torch.zeros(PAGES * PAGE_BYTES, dtype=torch.uint8, device=question.torch_device)
        self._memory["host"] = torch.zeros(PAGES * PAGE_BYTES, dtype=torch.uint8, device="cpu")
        self.addresses |= {place: memory.data_ptr() for place, memory in self._memory.items()}

    def ucx(self) -> Ucx:
        return ucx_of_this_process()

    def map(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.map_to_kv_tensors([page * PAGE_BYTES for page in pages])

    def unmap(self, pages: list[int]) -> None:
        from kvcached import vmm_ops

        vmm_ops.unmap_from_kv_tensors([page * PAGE_BYTES for page in pages])

    def register(self) -> bytes:
        """Register all memory, mapped or not. Returns the agent's metadata for the other member."""
        question = self._question
        for place, address in self.addresses.items():
            where = ("DRAM", 0) if place == "host" else (question.memory_type, question.device_index)
            register(self._agent, [(address, PAGES * PAGE_BYTES)], question.backends, *where)
        return self._transport.metadata()

    def meet(self, metadata: bytes) -> None:
        added = self._transfers.submit(self._transport.add_peer, metadata, self._question.device_index)
        self._peer = added.result()

    def fill(self, place: Place, page: int, value: int) -> None:
        self._page(place, page).fill_(value)
        self._synchronize()

    def holds(self, place: Place, page: int, value: int) -> bool:
        self._synchronize()
        return bool((self._page(place, page) == value).all())

    def move(
        self, operation: Operation, here: Place, there: int, pages: list[int], sizes: Sequence[tuple[int, int]] = ()
    ) -> float:
        """Transfer between the same pages of this member's memory and the other member's, which begins at ``there``.
        ``sizes``: (bytes, count) of a page's descriptors; by default one per page. Returns the duration in seconds."""
        lengths = np.repeat(*np.array(sizes).T) if sizes else np.array([PAGE_BYTES])
        rows = np.stack((np.cumsum(lengths) - lengths, lengths), axis=1)
        rows = np.concatenate([rows + (page * PAGE_BYTES, 0) for page in pages]).astype(np.int64)
        local, remote = (rows + (base, 0) for base in (self.addresses[here], there))
        ways = operation, self._peer, local, remote, ANSWER_SECONDS / 2
        return self._transfers.submit(self._transport.move, *ways, is_host=here == "host").result()

    def _page(self, place: Place, page: int) -> Any:
        return self._memory[place][page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


class Remote:
    """The prover's handle of a member, which begins at once. `begun` and `call` raise `MemberAnswer` if it failed,
    ended, or did not answer in time."""

    def __init__(
        self, question: Question, transports: str, *, is_elastic: bool = False, has_memory: bool = True
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # Not a pipe: it would fill up and block the member, because nothing reads it meanwhile.
        self._said = os.memfd_create("said")
        begin = functools.partial(Member, question, transports, is_elastic=is_elastic, has_memory=has_memory)
        arguments = (theirs, self._pipe, self._said, begin)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        """Kill the process, so that a hanging member does not block the prover."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        os.close(self._said)

    @property
    def said(self) -> str:
        """What the member and its libraries have written to standard output and error."""
        return os.pread(self._said, os.fstat(self._said).st_size, 0).decode(errors="replace")

    def begun(self) -> dict[Place, int]:
        """Wait until it has memory and an agent. Returns `Member.addresses`. Call once."""
        return self._answer("its start", BEGIN_SECONDS)  # type: ignore[no-any-return]

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the `Member`, and wait for the result."""
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise MemberAnswer(f"the process ended before {name}") from error
        return self._answer(name, ANSWER_SECONDS)

    def _answer(self, what: str, within_seconds: float) -> Any:
        try:
            if not self._pipe.poll(within_seconds):
                raise MemberAnswer(f"{what} did not end within {within_seconds:g} s")
            failed, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise MemberAnswer(f"the process ended in {what}") from error
        if failed:
            raise MemberAnswer(failed)
        return answer


def _serve(pipe: Connection, theirs: Connection, said: int, begin: Callable[[], Member]) -> None:
    # If the prover is killed, nothing else ends this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    theirs.close()
    os.dup2(said, 1)
    os.dup2(said, 2)

    def tried(work: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "", work()
        except Exception as error:  # noqa: BLE001 - the prover is told, and records it
            return traceback.format_exception_only(error)[-1].strip(), None

    failed, member = tried(begin)
    pipe.send((failed, None if failed else member.addresses))
    with contextlib.suppress(EOFError):
        while not failed:
            name, arguments = pipe.recv()
            pipe.send(tried(lambda: getattr(member, name)(*arguments)))  # noqa: B023


class _Pair:
    """Two members: one with kvcached's pages, as in a server, and a peer. Each reads and writes the other's memory."""

    def __init__(self, question: Question, transports: str) -> None:
        self._question = question
        self._holder, self._peer = Remote(question, transports, is_elastic=True), Remote(question, transports)
        # Each test writes a new value. It is never zero, which is what unbacked pages contain.
        self._values = itertools.count(1)

    def end(self) -> None:
        self._holder.end()
        self._peer.end()

    @property
    def said(self) -> str:
        return self._holder.said + self._peer.said

    def wrong(self) -> Iterator[str]:
        """Test whether a registration follows the pages; yields in which states it does not."""
        holder, peer = self._holder, self._peer
        self._holder_at, self._peer_at = holder.begun(), peer.begun()
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

    def measure(self, found: LaneFound) -> LaneFound:
        """Measure, again and again while kvcached's pages look slow. Returns ``found`` with the rates."""
        places: list[Place] = ["elastic", "ordinary"]
        if self._question.memory_type != "DRAM":
            places.append("host")
        pages, sizes = list(range(PAGES)), ((SMALL_BYTES, PAGE_BYTES // SMALL_BYTES),)
        for _ in range(TRIES):
            rates: dict[Place, Rates] = {}
            for place in places:
                ways = ("host" if place == "host" else "ordinary"), self._holder_at[place]
                read = self._peer.call("move", "READ", *ways, pages)
                write = self._peer.call("move", "WRITE", *ways, pages)
                small = self._peer.call("move", "READ", *ways, pages[:1], sizes)
                one = Rates(PAGES * PAGE_BYTES / read, PAGES * PAGE_BYTES / write, PAGE_BYTES / SMALL_BYTES / small)
                rates[place] = one.best_of(found.rates.get(place))
            found = msgspec.structs.replace(found, rates=rates)
            if not any(found.is_slow(place) for place in places[1:]):
                break
        return found

    def _compare(self, page: int, what: str) -> Iterator[str]:
        """Test all four ways in which a hand-over moves bytes. Yields a description of those that were wrong."""
        sides: dict[bool, tuple[Remote, Place, dict[Place, int]]] = {
            True: (self._peer, "ordinary", self._holder_at),
            False: (self._holder, "elastic", self._peer_at),
        }
        wrong = []
        for is_peer, operation in ((True, "READ"), (True, "WRITE"), (False, "WRITE"), (False, "READ")):
            (mover, here, addresses), (other, there, _) = sides[is_peer], sides[not is_peer]
            source, target = ((other, there), (mover, here)) if operation == "READ" else ((mover, here), (other, there))
            value = next(self._values)
            source[0].call("fill", source[1], page, value)
            mover.call("move", operation, here, addresses[there], [page], MIXED)
            if not target[0].call("holds", target[1], page, value):
                wrong.append(f"{'a peer' if is_peer else 'its own'} {operation}")
        if wrong:
            yield f"{what} ({', '.join(wrong)})"


def prove_lanes(question: Question) -> Proof:
    """Test every lane that could be chosen, and UCX's choice as it is configured, one after the other: each NIXL agent
    keeps a core busy. Raises MemberAnswer: the lanes that could be chosen are unknown."""
    lanes: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ("",)) for name in question.backends if name != "UCX"]
    ucx: Ucx | None = None
    if "UCX" in question.backends:
        # A device that is full must not keep it from answering: each lane then says that it lacks memory.
        member = Remote(question, "", has_memory=False)
        try:
            member.begun()
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
    return Proof(question, {}, tuple(found), ucx)


def prove_one(question: Question, name: str, transports: Sequence[str]) -> LaneFound:
    """Test one lane. ``transports`` are values of ``UCX_TLS`` to try; the first with which UCX used this lane counts:
    bytes that another transport carried prove nothing about it."""
    unusable: list[str] = []
    for one in dict.fromkeys(transports):
        pair = _Pair(question, one)
        try:
            found = pair.measure(LaneFound(name, one, wrong=tuple(pair.wrong())))
            carried = carriers(pair.said)
            is_behind_another = name in COPIES and question.device != "cpu"
            if question.backends != ("UCX",) or name == AS_CONFIGURED or is_behind_another or name in carried:
                return found
            unusable.append(f"UCX moves bytes over {', '.join(sorted(carried)) or 'nothing'} with UCX_TLS={one}")
        except MemberAnswer as error:
            if is_never_chosen(name, pair.said):
                return LaneFound(name, one, never="it does not detect peer failure, so NIXL does not use it")
            unusable.append(f"{error}, with UCX_TLS={one}" if one else str(error))
        finally:
            pair.end()
    return LaneFound(name, transports[-1], "; ".join(unusable))


def main() -> int:
    question = msgspec.json.decode(sys.stdin.read(), type=Question)
    # Imported once for all forked members. The import touches no device.
    import nixl._api  # noqa: F401

    try:
        found = prove_lanes(question)
    except MemberAnswer as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
