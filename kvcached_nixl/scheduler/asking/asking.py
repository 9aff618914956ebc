# SPDX-License-Identifier: Apache-2.0
"""Decode: requests whose KV prefill servers are asked for, before they may begin. One per engine, on its thread.

    waiting ─► asked ─► answered ─► goes on with the answer's ``kv_transfer_params``, until its KV has come
       ▲         │          │
       └─────────┴──────────┴─ failed: another server is asked, once, or a busy one again; then it is computed here, few
                               at a time (`LocalPrefills`), or fails, as ``kv_load_failure_policy`` says

What is not cached here may be too little to ask for: the request goes on at once. Of equal prompts one is asked for;
the others find it cached.

Meanwhile requests are held: they stay in vLLM's queue, are counted and can be aborted, but no step looks at them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcached_nixl.clock import Clock
from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.known_prefixes import KnownPrefixes
from kvcached_nixl.scheduler.asking.local_prefills import LocalPrefills
from kvcached_nixl.scheduler.asking.resolver import Resolver
from kvcached_nixl.scheduler.asking.servers import Server, Servers
from kvcached_nixl.scheduler.asking.window import Window
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Request
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.question import Outcome, Question, queued_tokens_in
from kvcached_nixl.wire.step import Step
from kvcached_nixl.wire.timeline import State

__all__ = ["Asking"]

MOST_TRIES = 2
MOST_PASSED = 16
PASSING_SECONDS = 10.0
"""For how long others may be asked for before one that finds no room."""
_OF_PREFILL = frozenset(
    {
        *(FailureCause.PARAMETERS, FailureCause.NO_MANIFEST, FailureCause.DIGEST, FailureCause.REFUSED),
        *(FailureCause.PROTOCOL, FailureCause.CHECKSUM),
    }
)
"""Prefill may be to blame, or this prompt."""


@dataclass(eq=False)
class _Held:
    """A request that waits to be asked for, or for an answer.

    Attributes:
        order: its place among those that wait.
        hashes: of its full blocks, as vLLM's prefix cache has them.
        prefix: of equal prompts only one is asked for at a time; None if nothing of it can be cached.
        number: of the question; 0 while nobody is asked.
        outcome: of the last question.
        tried: the servers that were asked, and were not busy.
        passed_since_seconds: when it first found no room; 0 if it never did.
    """

    request: Request
    question: Question
    order: tuple[int, int]
    hashes: Sequence[bytes]
    prefix: bytes | None
    number: int = 0
    asked_at_seconds: float = 0.0
    outcome: Outcome = Outcome("none may be asked now")
    tried: list[Server] = field(default_factory=list)
    passed_since_seconds: float = 0.0


class Asking:
    """See the module.

    Args:
        own_engine_id: of this engine, which never fetches from itself.
        local: what is computed here because no server gives it.
        block_tokens: of the smallest KV-cache blocks. If no more tokens are missing, they are computed here.
        recomputes: what no server gives may be computed here (``kv_load_failure_policy``).
        is_required: nothing is computed here because no server answers.

    Attributes:
        servers, local: as above.
        window: how much is asked for at a time.
    """

    def __init__(
        self,
        servers: Servers,
        asker: Asker,
        resolver: Resolver,
        fetching: DecodeFetches,
        clock: Clock,
        own_engine_id: str,
        local: LocalPrefills,
        timelines: Timelines,
        block_tokens: int,
        *,
        recomputes: bool,
        is_required: bool,
    ) -> None:
        self.servers = servers
        self._asker = asker
        self._resolver = resolver
        self._fetching = fetching
        self._clock = clock
        self._own_engine_id = own_engine_id
        self.local = local
        self._timelines = timelines
        self._block_tokens = block_tokens
        self._computes = recomputes and not is_required
        self._is_required = is_required
        self._held: dict[str, _Held] = {}
        # In the order in which they are asked for.
        self._waiting: list[_Held] = []
        # Those that wait for another request with the same prefix.
        self._followers: dict[bytes, list[_Held]] = {}
        # Prefixes that are asked for or fetched -> the request that does, and back.
        self._leaders: dict[bytes, str] = {}
        self._prefixes: dict[str, bytes] = {}
        self._asked: dict[int, _Held] = {}
        # By request: what was answered, until a step computes it.
        self._answered: dict[str, _Held] = {}
        # By request: answered in vain, until vLLM asks how much KV there is for it.
        self._failed: dict[str, _Held] = {}
        # Requests that vLLM has in its queue, and that are to be held.
        self._to_hold: list[str] = []
        self._num_arrived = 0
        self._num_asked = 0
        # When the server may be asked that those who wait are waiting for.
        self._rested_at_seconds: float | None = None
        self.window = Window(clock)
        self._prompts = KnownPrefixes()

    @property
    def num_waiting(self) -> int:
        """Requests that nobody is asked for yet. May be called from any thread."""
        return len(self._held) - len(self._asked)

    @property
    def num_asked(self) -> int:
        """Questions without an answer. May be called from any thread."""
        return len(self._asked)

    @property
    def has_news(self) -> bool:
        """Whether `turn` has an answer to take."""
        return self._asker.has_answers

    @property
    def due_at_seconds(self) -> float | None:
        """When `turn` has to be called, whatever happens until then; None if it need not."""
        some = (self.servers.silent_at_seconds, self._rested_at_seconds)
        return min((one for one in some if one is not None), default=None)

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, blocks: BlockPool) -> bool:
        """A request has entered the engine. Returns whether it is to be held."""
        question = None if request.num_prompt_tokens <= self._block_tokens else request.question
        if question is None:
            return False
        self._num_arrived += 1
        order = request.priority if blocks.goes_by_priority else 0, self._num_arrived
        hashes = request.block_hashes
        prefix = hashes[-1] if hashes and blocks.caches_prefixes else None
        self._wait(_Held(request, question, order, hashes, prefix))
        return True

    def gone(self, request_id: str, num_freed_blocks: int) -> None:
        """A request has ended, and has freed so many blocks."""
        self.window.freed(num_freed_blocks)
        self.window.settle(request_id)
        self._answered.pop(request_id, None)
        self._failed.pop(request_id, None)
        self.local.gone(request_id)
        held = self._held.pop(request_id, None)
        if held is not None:
            if held.number:
                del self._asked[held.number]
                self.servers.withdrawn(held.tried[-1], held.number)
                self._asker.cancel(held.number)
            for waiting in (self._waiting, self._followers.get(held.prefix or b"", [])):
                if held in waiting:
                    waiting.remove(held)
        self._land(request_id)

    def allocated(self, request_id: str) -> None:
        """A request was given blocks."""
        self.window.settle(request_id)

    def computed(self, progress: Iterable[Progress]) -> None:
        """A step computes these requests: what they have fetched is in the prefix cache."""
        for one in progress if self._answered or self._prefixes or self.local.is_busy else ():
            held = self._answered.pop(one.request_id, None)
            if held is not None:
                self.servers.served(held.tried[-1])
            self._land(one.request_id)
            self.local.computed(one.request_id, one.num_computed_tokens)

    def may_ask_again(self, request_id: str) -> bool:
        """The KV of a request does not come. Returns whether another server is asked for it, so that it is neither
        computed here nor fails yet; `holds_again` follows. Idempotent until then."""
        if request_id in self._failed:
            return True
        held = self._answered.pop(request_id, None)
        failure = None if held is None else self._fetching.failure_of(held.request)
        if held is None or failure is None:
            return False
        held.outcome = Outcome(str(failure))
        is_of_server = failure.cause in (FailureCause.UNREACHABLE, FailureCause.LOST, FailureCause.RESTARTED)
        if is_of_server or failure.cause in _OF_PREFILL:
            self.servers.failed(held.tried[-1], held.number, Outcome(str(failure), is_of_server=is_of_server))
        if is_of_server and self._is_required:
            held.tried.clear()
        if len(held.tried) >= MOST_TRIES or (self._rests(self.servers.choose(held.tried)) and self._computes):
            return False
        self._failed[request_id] = held
        return True

    def holds_again(self, request: Request, step: Step) -> bool:
        """Called where vLLM asks how much KV there is for a request. Returns whether it waits for an answer once
        more; `turn` holds it."""
        request_id = request.request_id
        if request_id in self._answered and self._fetching.failure_of(request) is not None:
            self.may_ask_again(request_id)
        held = self._failed.pop(request_id, None)
        if held is None:
            return False
        held.number = 0
        self._land(request_id)
        self.window.settle(request_id)
        self._fetching.forget(request, step)
        self._wait(held)
        self._to_hold.append(request_id)
        return True

    def turn(self, blocks: BlockPool, step: Step, *, may_ask: bool) -> bool:
        """Takes the answers, and asks for what there is room for. Called before each step. Returns whether requests
        may begin that could not before.

        Args:
            may_ask: the engine is not paused, and no neighbour waits for its memory.
        """
        for request_id in self._to_hold:
            if request_id in self._held:
                blocks.hold(request_id)
        self._to_hold.clear()
        for url, addresses in self._resolver.take().items():
            self.servers.are_at(url, addresses)
        num_held = len(self._held)
        for number, found in self._asker.take():
            if isinstance(found, Outcome):
                self._not_answered(number, found)
            else:
                self._goes_on_with(number, found, blocks, step)
        for server, is_well in self._asker.take_checked():
            for number in list(server.asked) if self.servers.has_failed(server, is_well=is_well) else ():
                self._not_answered(number, Outcome("it has answered nothing for too long", is_of_server=True))
        for server in self.servers.take_silent():
            self._asker.check(server)
        self._rested_at_seconds = None
        if may_ask:
            self._ask_all(blocks)
        return self.local.turn(blocks) or len(self._held) < num_held

    def close(self) -> None:
        """Ends the threads."""
        self._resolver.close()
        self._asker.close()

    # -------------------------------------------------------------------------------------------------------- inside

    def _wait(self, held: _Held) -> None:
        self._held[held.request.request_id] = held
        self._timelines.begin(held.request, State.DECODE_HELD)
        insort(self._waiting, held, key=lambda one: one.order)

    def _ask_all(self, blocks: BlockPool) -> None:
        """Asks for those that wait, in their order. Others pass one that finds no room, for a while."""
        passed = 0
        while len(self._waiting) > passed < MOST_PASSED:
            held = self._waiting[passed]
            if self._goes_on_here_or_asked(held, blocks):
                self._waiting.remove(held)
                continue
            now = self._clock.now_seconds()
            held.passed_since_seconds = held.passed_since_seconds or now
            if self._rested_at_seconds is not None or now > held.passed_since_seconds + PASSING_SECONDS:
                return
            passed += 1

    def _goes_on_here_or_asked(self, held: _Held, blocks: BlockPool) -> bool:
        """Asks for one that waits, or lets it go on here. Returns whether it waits no longer."""
        request, prefix = held.request, held.prefix
        if prefix is not None and prefix in self._leaders:
            self._followers.setdefault(prefix, []).append(held)
            return True
        server = self.servers.choose(held.tried)
        rests = self._rests(server)
        if rests and (server.is_busy or not self._computes):
            self._rested_at_seconds = server.rests_until_seconds
            return False
        num_blocks = blocks.num_needed(request.request_id)
        if not rests and not self.window.has_room(num_blocks, blocks.num_free, blocks.most_running):
            return False
        if request.num_prompt_tokens - blocks.num_cached_tokens(request.request_id) <= self._block_tokens:
            self._go_on(held, blocks)
            self._timelines.end(request.request_id)
        elif rests:
            self._give_up(held)
        else:
            self.window.promise(request.request_id, num_blocks)
            self._ask(held)
        return True

    def _rests(self, server: Server) -> bool:
        return server.rests_until_seconds > self._clock.now_seconds()

    def _ask(self, held: _Held) -> None:
        request = held.request
        found = self._prompts.find(held.hashes)
        cached = {} if found is None else {found[0]: found[1] * self._block_tokens}
        server = self.servers.choose(held.tried, cached)
        self._num_asked += 1
        held.number, held.asked_at_seconds = self._num_asked, self._clock.now_seconds()
        held.tried.append(server)
        self._asked[held.number] = held
        if held.prefix is not None:
            self._leaders[held.prefix] = request.request_id
            self._prefixes[request.request_id] = held.prefix
        self._timelines.enter(request.request_id, State.DECODE_ASKING)
        self.servers.asked(server, held.number, request.num_prompt_tokens - cached.get(server, 0))
        self._prompts.add(held.hashes, server)
        self._asker.ask(held.number, server, held.question)

    def _goes_on_with(self, number: int, params: dict[str, Any], blocks: BlockPool, step: Step) -> None:
        if params.get("do_remote_prefill") is not True:
            self._not_answered(number, Outcome("it offers no KV; expected do_remote_prefill in kv_transfer_params"))
            return
        if params.get("remote_engine_id") == self._own_engine_id:
            self._not_answered(number, Outcome("it is this engine itself; expected another server"))
            return
        held = self._asked.pop(number, None)
        if held is None:
            self._fetching.unneeded(params, step)
            return
        self.servers.answered(held.tried[-1], number, queued_tokens_in(params))
        self.window.answered(self._clock.now_seconds() - held.asked_at_seconds)
        self._go_on(held, blocks, params)
        self._answered[held.request.request_id] = held
        self._fetching.arrived(held.request, step, computes=not self._is_required)

    def _not_answered(self, number: int, outcome: Outcome) -> None:
        held = self._asked.pop(number, None)
        if held is None:
            return
        self._asker.cancel(number)
        held.number, held.outcome = 0, outcome
        self.window.settle(held.request.request_id)
        self._land(held.request.request_id)
        if outcome.is_final:
            self.servers.answered(held.tried[-1], number)
            self._give_up(held)
            return
        self.servers.failed(held.tried[-1], number, outcome)
        if outcome.is_busy or (outcome.is_of_server and self._is_required):
            held.tried.clear()
        if len(held.tried) < MOST_TRIES:
            self._wait(held)
        else:
            self._give_up(held)

    def _give_up(self, held: _Held) -> None:
        """No server gives its KV: the request is computed here, or fails."""
        failure = HandOverFailed(FailureCause.UNREACHABLE, f"no prefill server gives it: {held.outcome.reason}")
        del self._held[held.request.request_id]
        if self._fetching.refuse(held.request, failure, computes=not self._is_required):
            self.local.add(held.request)

    def _go_on(self, held: _Held, blocks: BlockPool, params: dict[str, Any] | None = None) -> None:
        del self._held[held.request.request_id]
        blocks.release(held.request.request_id, params)

    def _land(self, request_id: str) -> None:
        """A request fetches its prefix no longer: those with the same one have it cached here, or may ask for it."""
        prefix = self._prefixes.pop(request_id, None)
        if prefix is None or self._leaders.get(prefix) != request_id:
            return
        del self._leaders[prefix]
        for held in self._followers.pop(prefix, []):
            # If it does not find its prompt cached, those like it would not either.
            held.prefix = None
            insort(self._waiting, held, key=lambda one: one.order)
