# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV is wanted, in which order they are asked for, how much at a time, and how long they wait for that.
Used on the engine's thread only.

Of equal prompts one is asked for, the leader; the others follow it, and find its prompt in the prefix cache when it was
computed. If the leader gets no KV, the first of its followers leads.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.question import Outcome, Question

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView
    from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks


class Stage(Enum):
    """Of a request whose KV is wanted; see `asking.asking`."""

    WAITING = auto()
    """In the queue of those to be asked for, or for another request with the same prompt."""
    LOOKING = auto()
    """Servers are asked how much of it they have cached (`Questions`)."""
    ASKED = auto()
    """Held until the answer."""
    FETCHING = auto()
    """It goes on with ``kv_transfer_params``, until a step computes it."""
    FAILED = auto()
    """Its KV does not come. When vLLM asks how much there is for it, it is held again."""
    LOCAL = auto()
    """No server gives its KV."""
    OVER = auto()
    """A step computes it, or it has ended."""


@dataclass(eq=False)
class Wanted:
    """A request whose KV is wanted.

    Attributes:
        order: its place among those that wait.
        hashes: of its full blocks, as vLLM's prefix cache has them.
        prefix: of equal prompts only one is asked for at a time; None if nothing of it can be cached.
        followers: others with its prefix, which wait for it.
        number: of the question without an answer; 0 if there is none.
        named: the engine that was named before the answer (push).
        outcome: of the last question.
        tried: the servers that were asked, and were neither busy, nor ``lacking``, nor another engine than was named.
        lacking: those that lack its adapter, or have it in another version, and the one that has just refused it.
        is_looked_up: servers were asked how much of it they have cached.
        cached: tokens, by what they have said.
        offers: what they have offered of it: ``kv_transfer_params``.
        num_missing: tokens that are not cached here, as it was found last.
        num_lost: servers that have ended or hung with its prompt, or failed it and served others.
        asked_seconds: when a server was asked for it last.
        failed_seconds: when one was that has failed it for a reason of the server's; 0 if none has. Of those that have
            served nobody since, the first.
        busy_seconds: when a server was first too busy for it, and last; None if none was.
        passed_since_seconds: when it first found no room; 0 if it never did.
    """

    request: RequestView
    question: Question
    order: tuple[int, int]
    hashes: Sequence[bytes]
    prefix: bytes | None
    stage: Stage = Stage.WAITING
    followers: list[Wanted] = field(default_factory=list)
    number: int = 0
    named: RemotePrefill | None = None
    outcome: Outcome = Outcome("none may be asked now", is_of_server=True)
    tried: list[Server] = field(default_factory=list)
    lacking: set[Server] = field(default_factory=set)
    is_looked_up: bool = False
    cached: dict[Server, int] = field(default_factory=dict)
    offers: dict[Server, Mapping[str, Any]] = field(default_factory=dict)
    num_missing: int = 0
    num_lost: int = 0
    asked_seconds: float = 0.0
    failed_seconds: float = 0.0
    busy_seconds: tuple[float, float] | None = None
    passed_since_seconds: float = 0.0

    @property
    def server(self) -> Server | None:
        """The one that is asked for it now, or whose KV it fetches."""
        return self.tried[-1] if self.tried and self.stage in (Stage.ASKED, Stage.FETCHING) else None

    @property
    def choice(self) -> tuple[Collection[Server], Collection[Server], Sequence[bytes], int, Mapping[Server, int]]:
        """What `Servers.choose` takes."""
        return self.tried, self.lacking, self.hashes, self.request.num_prompt_tokens, self.cached


GRAMMAR_SECONDS = 0.01
"""Interval for looking whether a grammar is compiled."""


class Queue:
    """Those that nobody is asked for yet.

    Attributes:
        waiting: in the order in which they are asked for.
        fresh: they have begun to wait, and are yet to be looked up in the prefix cache.
        resting: the servers that have what these need rest; others need not wait for that.
        due_at_seconds: when to look again whether grammars are compiled; None if none is waited for.
    """

    def __init__(self) -> None:
        self.waiting: list[Wanted] = []
        self.fresh: list[Wanted] = []
        self.resting: dict[Wanted, None] = {}
        self.due_at_seconds: float | None = None
        # vLLM begins them when their grammars are compiled, which may be never: nothing is kept or promised for them.
        self._compiling: list[Wanted] = []
        # By prefix: the request that is asked for.
        self._leaders: dict[bytes, Wanted] = {}

    def __len__(self) -> int:
        num_following = sum(len(one.followers) for one in self._leaders.values())
        return len(self.fresh) + len(self._compiling) + len(self.resting) + len(self.waiting) + num_following

    def take_fresh(self, now_seconds: float) -> list[Wanted]:
        """Returns those that may be looked up: they have begun to wait, or their grammars are compiled now."""
        fresh, self.fresh = self.fresh, []
        if self.due_at_seconds is not None and now_seconds >= self.due_at_seconds:
            fresh, self._compiling, self.due_at_seconds = self._compiling + fresh, [], None
        found: list[Wanted] = []
        for one in fresh:
            if one.stage is Stage.WAITING:
                (self._compiling if one.request.awaits_grammar else found).append(one)
        if self._compiling and self.due_at_seconds is None:
            self.due_at_seconds = now_seconds + GRAMMAR_SECONDS
        return found

    def push(self, wanted: Wanted) -> None:
        """It is not cached, and has to be asked for."""
        insort(self.waiting, wanted, key=_order)

    def rest(self, wanted: Wanted) -> None:
        """No server may be asked for it now, whatever others are asked for."""
        self.resting[wanted] = None

    def wake(self) -> None:
        """Other servers rest than before."""
        self.fresh += self.resting
        self.resting.clear()

    def remove(self, wanted: Wanted) -> None:
        self.resting.pop(wanted, None)
        leader = self._leaders.get(wanted.prefix or b"")
        for waiting in (self.waiting, [] if leader is None else leader.followers):
            place = bisect_left(waiting, wanted.order, key=_order)
            if waiting[place : place + 1] == [wanted]:
                del waiting[place]

    def leader_of(self, wanted: Wanted) -> Wanted:
        """The request with the same prompt that is asked for; itself if there is none."""
        return self._leaders.get(wanted.prefix or b"", wanted)

    def follows(self, wanted: Wanted) -> bool:
        """Whether it waits for an equal one from now on, and not for its own turn."""
        leader = self.leader_of(wanted)
        if leader.order[0] > wanted.order[0]:
            # It would wait for one that others go before.
            wanted.prefix = None
        elif leader is not wanted:
            insort(leader.followers, wanted, key=_order)
            return True
        return False

    def leads(self, wanted: Wanted) -> None:
        """It is asked for: equal ones follow it."""
        if wanted.prefix is not None:
            self._leaders[wanted.prefix] = wanted

    def land(self, wanted: Wanted, *, is_cached: bool) -> None:
        """A request fetches its prefix no longer: those with the same one have it cached here, or may ask for it."""
        if self._leaders.get(wanted.prefix or b"") is not wanted:
            return
        del self._leaders[wanted.prefix or b""]
        found, wanted.followers = wanted.followers, []
        for one in found if is_cached else ():
            # If it does not find its prompt cached, those like it would not either.
            one.prefix = None
        if found and not is_cached:
            # The others wait for the next one: no step looks at all of them.
            found, found[0].followers = found[:1], found[1:]
            self._leaders[wanted.prefix or b""] = found[0]
        self.fresh += found


_order = attrgetter("order")

AHEAD = 0.5
"""Fraction of all blocks that prefill computes ahead of what is free."""


class Window:
    """How much decode asks for at a time: prompts that will find room when their KV can be fetched.

    Prompts are asked for as long as those that have no blocks yet fit into what is free, and half of all blocks more:
    while prefill computes them, others end here. At least one prompt is always asked for.

    Attributes:
        num_promised: blocks that those need which were asked for and have none yet.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}
        self.num_promised = 0

    def has_room(self, num_blocks: int, blocks: EngineBlocks) -> bool:
        if not self._promised:
            return True
        room = blocks.num_free + AHEAD * (blocks.num_free + blocks.num_used)
        return len(self._promised) < blocks.most_running and self.num_promised + num_blocks <= room

    def promise(self, request_id: str, num_blocks: int) -> None:
        """A request is asked for that will need so many blocks."""
        self.settle(request_id)
        self._promised[request_id] = num_blocks
        self.num_promised += num_blocks

    def settle(self, request_id: str) -> None:
        """A request has its blocks, or will not get what was asked for."""
        self.num_promised -= self._promised.pop(request_id, 0)


LONGEST_RETRY_SECONDS = 60


class QueueLimit:
    """How long requests may wait to be asked for (``queue_timeout``), and when those that are refused may try again.

    What counts is the time in which nobody is asked for a request, also between two questions. A client is told to come
    again after as long as requests wait now: as the last one that was asked for has waited, or longer, if nobody was
    asked for since. ``deadlines``: of those that wait; none if ``timeout_seconds`` is infinite.
    """

    def __init__(self, clock: Clock, timeout_seconds: float) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self.deadlines = Deadlines[str]()
        # How long those that are asked for have waited, or were asked for.
        self._waited_seconds: dict[str, float] = {}
        self._last_wait_seconds = 0.0
        # Since then somebody waits, and nobody was asked for.
        self._since_seconds = 0.0

    def waits(self, request_id: str) -> None:
        if self._timeout_seconds < math.inf:
            now = self._clock.now_seconds()
            if not self.deadlines:
                self._since_seconds = now
            self.deadlines[request_id] = now + self._timeout_seconds - self._waited_seconds.pop(request_id, 0.0)

    def asked(self, request_id: str) -> None:
        deadline_seconds = self.deadlines.pop(request_id, None)
        if deadline_seconds is not None:
            self._since_seconds = self._clock.now_seconds()
            self._last_wait_seconds = self._since_seconds - (deadline_seconds - self._timeout_seconds)
            self._waited_seconds[request_id] = self._last_wait_seconds

    def gone(self, request_id: str) -> None:
        self.deadlines.pop(request_id, None)
        self._waited_seconds.pop(request_id, None)

    def refusal(self) -> HandOverFailed:
        waits_seconds = max(self._last_wait_seconds, self._clock.now_seconds() - self._since_seconds)
        return HandOverFailed(
            FailureCause.QUEUE_TIMEOUT,
            f"no prefill server could be asked for it within {self._timeout_seconds:g} s (queue_timeout)",
            retry_after_seconds=min(max(1, math.ceil(waits_seconds)), LONGEST_RETRY_SECONDS),
        )
