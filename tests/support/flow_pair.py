# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode engine, and a router's two requests, for tests that are written step by step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, ClassVar

import pytest

from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.messages import Message, Peer, decode, is_heartbeat
from support.flow_cluster import FORGOTTEN_SECONDS, LEASE_SECONDS, TIMEOUT_SECONDS, Cluster
from support.flow_engine import Engine, Kind, Request, Status
from support.flow_memory import Shape
from support.flow_schedule import Defects
from support.memory_transport import Posted

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
DIRECTIONS = pytest.mark.parametrize("mode", [PULL, PUSH], ids=["pull", "push"])
PROMPT = tuple(range(3, 21))
"""18 tokens: four full blocks and a half."""
BLOCKS_EACH = 5
"""Blocks of `PROMPT`, and of `prompt`."""


def prompt(seed: int) -> tuple[int, ...]:
    return tuple(100 * seed + token for token in PROMPT)


def kind(**changed: Any) -> Kind:
    shape = {name: changed.pop(name) for name in list(changed) if name in Shape.__dataclass_fields__}
    return Kind(shape=Shape(**shape), **changed)


def is_right(found: Request, num_external: int = len(PROMPT)) -> bool:
    """Whether the request has finished with ``num_external`` tokens from prefill."""
    return (found.status, found.num_external) == (Status.STOPPED, num_external)


def is_computed(found: Request) -> bool:
    """Whether decode has computed it by itself: it took nothing from prefill."""
    return found.status is Status.STOPPED and not found.num_external


class Pair:
    """One prefill and one decode engine in a `Cluster`. ``made``: all that there are."""

    made: ClassVar[list[Pair]] = []

    def __init__(
        self,
        mode: TransferMode,
        prefill: Kind | None = None,
        decode: Kind | None = None,
        *,
        verify_fraction: float = 0.0,
        is_traced: bool = False,
        prefill_name: str = "p",
    ) -> None:
        self.cluster = Cluster(mode, verify_fraction, is_traced=is_traced)
        self.wire, self.clock = self.cluster.wire, self.cluster.clock
        self.settle, self.pass_time, self.turn = self.cluster.settle, self.cluster.pass_time, self.cluster.turn
        self.prefill = self.cluster.engine(prefill_name, prefill)
        self.decode = self.cluster.engine("d", decode)
        self._numbers = itertools.count(1)
        self.made.append(self)

    # ------------------------------------------------------------------------------------------------------- a router

    def ask_prefill(self, prompt: tuple[int, ...] = PROMPT, name: str = "cmpl-1-0", **request: Any) -> Request:
        params = {"do_remote_decode": True}
        if "transfer_id" in request:
            params["transfer_id"] = request.pop("transfer_id")
        engine = request.pop("engine", self.prefill)
        found: Request = engine.add(Request(self._id(name), prompt, request.pop("params", params), **request))
        return found

    def ask_decode(
        self, params: Any, prompt: tuple[int, ...] = PROMPT, name: str = "cmpl-1-0", **request: Any
    ) -> Request:
        engine = request.pop("engine", self.decode)
        found: Request = engine.add(Request(self._id(name), prompt, params, **{"max_tokens": 4, **request}))
        return found

    def meet(self, **changed: Any) -> dict[str, Any]:
        """Returns the parameters that decode gets from a router that sends to both engines at once."""
        own = self.prefill.own
        found = {"do_remote_prefill": True, "remote_engine_id": own.engine_id, "remote_host": own.host}
        return {**found, "remote_port": own.port, "tp_size": own.tp_size, "pp_size": own.pp_size, **changed}

    def offered(self, prompt: tuple[int, ...] = PROMPT, name: str = "cmpl-1-0", **request: Any) -> dict[str, Any]:
        """Lets prefill compute a prompt. Returns the parameters for decode."""
        upstream = self.ask_prefill(prompt, name, **request)
        self.settle()
        assert upstream.answer is not None
        return upstream.answer

    def hand_over(self, prompt: tuple[int, ...] = PROMPT, **request: Any) -> Request:
        """Runs a complete hand-over, prefill first. Returns decode's request."""
        found = self.ask_decode(self.offered(prompt), prompt, **request)
        self.settle()
        return found

    def acquaint(self) -> None:
        """Runs one hand-over, so that all ranks have done their handshakes."""
        assert self.hand_over((49, 48, 47, 46, 45)).status is Status.STOPPED

    def _id(self, name: str) -> str:
        return f"{name}-{next(self._numbers):08x}"

    # ------------------------------------------------------------------------------------------------------ progress

    def round(self, times: int = 1) -> None:
        """Runs rounds of everything but transfers: messages, handshakes, threads and steps."""
        for _ in range(times):
            self.deliver_messages()
            for question in list(self.cluster.questions):
                self.cluster.answer(question)
            self.turn()
            for engine in self.cluster.running:
                engine.step()

    def settle_wire(self) -> None:
        """Runs everything but the engines' steps for a few rounds, until nothing is in flight."""
        for _ in range(8):
            self.wire.deliver_all()
            for question in list(self.cluster.questions):
                self.cluster.answer(question)
            self.turn()

    def until_posted(self, count: int = 1, rounds: int = 30) -> list[Posted]:
        """Runs rounds until ``count`` transfers are posted. No transfer moves."""
        for _ in range(rounds):
            if len(self.transfers) >= count:
                return self.transfers
            self.round()
        raise AssertionError(f"found {len(self.transfers)} transfers under way; expected {count}")

    def until(self, request: Request, *statuses: Status, rounds: int = 30) -> None:
        """Runs rounds until the request has one of these statuses. No transfer moves, no time passes."""
        for _ in range(rounds):
            if request.status in statuses:
                return
            self.round()
        raise AssertionError(f"found {request}; expected {statuses}")

    # ------------------------------------------------------------------------------------------------------- the wire

    @property
    def transfers(self) -> list[Posted]:
        return [one for one in self.wire.pending if one.is_transfer]

    def messages(self, *types: type[Message]) -> list[Posted]:
        """Returns the messages in flight of these types (all types if none is given), without heartbeats."""
        plain = [one for one in self.wire.pending if not one.is_transfer and not is_heartbeat(one.notification)]
        return [one for one in plain if not types or isinstance(decode(one.notification), types)]

    def deliver_messages(self) -> None:
        for posted in [one for one in self.wire.pending if not one.is_transfer]:
            self.wire.deliver(posted)

    def address(self, engine: Engine, tp_rank: int = 0) -> Peer:
        own = engine.own
        return Peer(EngineId(own.engine_id), own.host, own.port, own.tp_size, tp_rank)

    # ----------------------------------------------------------------------------------------------- results

    def causes(self, engine: Engine | None = None) -> dict[str, int]:
        """Returns the number of hand-overs without KV, by cause."""
        failures = (self.decode if engine is None else engine).failures
        return {FailureCause(cause).label: count for cause, count in failures.items()}

    def dropped(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for engine in self.cluster.alive:
            for worker in engine.workers:
                found += worker.context.dropped
        return found

    def written_bytes(self) -> int:
        posted = [one for worker in self.prefill.workers for one in worker.agent.posted if one.operation == "WRITE"]
        return sum(int(one.local[:, 1].sum()) for one in posted if one.local is not None)

    def is_clean(self) -> bool:
        return next(self.cluster.left(), None) is None

    def nothing_is_left(self, within: float = FORGOTTEN_SECONDS) -> None:
        """Checks that within ``within`` seconds every block is accounted for and every table is empty."""
        with Defects() as defects:
            passed = 0.0
            self.settle()
            while not self.is_clean() and passed < within:
                self.pass_time(10.0)
                passed += 10.0
        left = "\n".join(self.cluster.left())
        assert not left, left
        assert not defects.found


def nothing_is_left_of_any() -> None:
    """Checks all pairs that were made and not checked yet."""
    while Pair.made:
        Pair.made.pop().nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)
