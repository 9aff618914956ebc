# SPDX-License-Identifier: Apache-2.0
"""Decode: requests whose KV prefill servers are asked for, before they may begin. One per engine, on its thread.

    LOOKING ◄─► WAITING ─► ASKED ─► FETCHING ─► a step computes it
                  ▲ └────────│────────▲ │
                  └──────────┴─ FAILED ◄┴─► LOCAL: computed here, few at a time (`LocalPrefills`), or it fails, as
                                            ``kv_load_failure_policy`` says

Meanwhile requests are held: they stay in vLLM's queue, are counted and can be aborted, but no step looks at them. With
the ``kv_transfer_params`` of the answer they go on. In push a request goes on when it is asked for, so that prefill
finds its blocks and sends KV while it computes, if it has nothing else to compute, and its engine is known.

After a failure another server is asked, once, or a busy one again. What is not cached here may be too little to ask
for: the request goes on at once, or in its turn (`BreakEven`). Of several servers the one that has most of the prompt
is asked; if it has nearly all of it, that is fetched, and the rest is computed here (`Prefixes`). Of equal prompts one
is asked for; the others find it cached.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvcached_nixl.deadlines import Clock, earliest
from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.limits import QueueLimit, Window
from kvcached_nixl.scheduler.asking.local import LocalPrefills
from kvcached_nixl.scheduler.asking.prefixes import Prefixes
from kvcached_nixl.scheduler.asking.resolver import Resolver
from kvcached_nixl.scheduler.asking.servers import Server, Servers
from kvcached_nixl.scheduler.asking.wanted import Queue, Stage, Wanted
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Request
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.headroom import AskingFigures, Computed, Ended
from kvcached_nixl.wire.params import KvTransferParams, asks
from kvcached_nixl.wire.question import Outcome, engine_in, queued_tokens_in
from kvcached_nixl.wire.step import Step
from kvcached_nixl.wire.timeline import State

__all__ = ["Asking"]

MOST_TRIES = 2
MOST_LOST = 2
"""Servers that may end with a prompt before it is taken for the reason."""
MOST_PASSED = 16
PASSING_SECONDS = 10.0
"""For how long others may be asked for before one that finds no room."""
_OF_SERVER = (FailureCause.UNREACHABLE, FailureCause.LOST, FailureCause.RESTARTED)
_OF_PREFILL = (
    *(FailureCause.PARAMETERS, FailureCause.NO_MANIFEST, FailureCause.DIGEST, FailureCause.REFUSED),
    *(FailureCause.PROTOCOL, FailureCause.CHECKSUM),
)
"""Prefill may be to blame, or this prompt."""


class Asking:
    """See the module.

    Args:
        own_engine_id: of this engine, which never fetches from itself.
        local: what is computed here.
        block_tokens: of the smallest KV-cache blocks. If no more tokens are missing, they are computed here.
        pushes: prefill is told where the KV goes, and sends it.
        recomputes: what no server gives may be computed here (``kv_load_failure_policy``).
        is_required: nothing is computed here because no server answers.
        queue_seconds: how long a request may wait to be asked for.

    Attributes:
        servers, local: as above.
        window: how much is asked for at a time.
        figures: for the metrics. Read on another thread, too.
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
        pushes: bool,
        recomputes: bool,
        is_required: bool,
        queue_seconds: float = math.inf,
    ) -> None:
        self.servers = servers
        self._asker = asker
        self._resolver = resolver
        self._fetching = fetching
        self._clock = clock
        self._own_engine_id = own_engine_id
        self.local = local
        self._prefixes = Prefixes(servers, asker, own_engine_id)
        self._timelines = timelines
        self._block_tokens = block_tokens
        self._pushes = pushes
        self._computes = recomputes and not is_required
        self._is_required = is_required
        self._wanted: dict[str, Wanted] = {}
        self._queue = Queue()
        self._questions: dict[int, Wanted] = {}
        # Requests that vLLM has in its queue, and that are to be held.
        self._to_hold: list[str] = []
        self._num_arrived = 0
        self._num_asked = 0
        # When the server may be asked that those who wait are waiting for.
        self._rested_at_seconds: float | None = None
        self.window = Window()
        self._limit = QueueLimit(clock, queue_seconds)
        self.figures = AskingFigures()

    @property
    def num_waiting(self) -> int:
        """Requests that nobody is asked for yet."""
        return len(self._queue) + len(self._prefixes)

    @property
    def num_asked(self) -> int:
        """Questions without an answer."""
        return len(self._questions)

    @property
    def has_news(self) -> bool:
        """Whether `turn` has an answer to take, or a request to look at."""
        return self._asker.has_answers or self._queue.has_fresh

    @property
    def due_at_seconds(self) -> float | None:
        """When `turn` has to be called, whatever happens until then; None if it need not."""
        return earliest(self.servers.silent_at_seconds, self._rested_at_seconds, self._limit.due_at_seconds)

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, blocks: BlockPool) -> bool:
        """A request has entered the engine. Returns whether it is to be held."""
        if asks(request.params, "do_remote_decode"):
            # It is a peer's question.
            return False
        is_short = request.num_prompt_tokens <= self._block_tokens
        question = None if is_short else request.question
        if question is None:
            self.figures.computed[Computed.SHORT if is_short else Computed.NOT_ASKABLE] += 1
            return False
        self._num_arrived += 1
        order = request.priority if blocks.goes_by_priority else 0, self._num_arrived
        hashes = request.block_hashes
        prefix = hashes[-1] if hashes and blocks.caches_prefixes else None
        self._wait(Wanted(request, question, order, hashes, prefix))
        return True

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self.window.settle(request_id)
        self.local.gone(request_id)
        self._limit.gone(request_id)
        wanted = self._wanted.pop(request_id, None)
        if wanted is None:
            return
        self._prefixes.settled(wanted)
        self._withdraw(wanted, Ended.LEFT)
        self._queue.remove(wanted)
        wanted.stage = Stage.OVER
        self._queue.land(wanted, is_cached=False)

    def allocated(self, request_id: str) -> None:
        """A request was given blocks."""
        self.window.settle(request_id)

    def computed(self, progress: Iterable[Progress]) -> None:
        """A step computes these requests: what they have fetched is in the prefix cache."""
        for one in progress if self._wanted or self.local.is_busy else ():
            wanted = self._wanted.get(one.request_id)
            if wanted is not None and one.num_computed_tokens >= wanted.request.num_prompt_tokens:
                del self._wanted[one.request_id]
                if wanted.stage is Stage.FETCHING:
                    self.servers.served(wanted.tried[-1])
                wanted.stage = Stage.OVER
                self._queue.land(wanted, is_cached=True)
            self.local.computed(one.request_id, one.num_computed_tokens)

    def may_ask_again(self, request_id: str) -> bool:
        """The KV of a request does not come. Returns whether another server is asked for it, or it is computed here
        when it is its turn, so that it neither begins nor fails yet; `holds_again` follows. Idempotent until then."""
        wanted = self._wanted.get(request_id)
        if wanted is not None and wanted.stage is Stage.FETCHING:
            failure = self._fetching.failure_of(wanted.request)
            if failure is not None:
                outcome = Outcome(str(failure), is_of_server=failure.cause in _OF_SERVER)
                self._withdraw(wanted, outcome.ended)
                if outcome.is_of_server or failure.cause in _OF_PREFILL:
                    self.servers.failed(wanted.tried[-1], 0, outcome)
                self._fetched_in_vain(wanted, outcome)
        return wanted is not None and wanted.stage is Stage.FAILED

    def holds_again(self, request: Request, step: Step) -> bool:
        """Called where vLLM asks how much KV there is for a request. Returns whether it waits once more; `turn` holds
        it."""
        request_id = request.request_id
        if not self.may_ask_again(request_id):
            return False
        self.window.settle(request_id)
        wanted = self._wanted[request_id]
        server, _ = self.servers.choose(*wanted.choice)
        is_asked_for = self._has_tries(wanted) and not self._replaces(server)
        if is_asked_for:
            self._fetching.forget(request, step)
            self._wait(wanted)
        elif self._computes and self._fetching.may_compute(request):
            self._wait_locally(wanted, wanted.outcome.computed, wanted.request.num_prompt_tokens)
        else:
            self._fetching.forget(request, step)
            self._compute_here(wanted)
        self._to_hold.append(request_id)
        return True

    def turn(self, blocks: BlockPool, step: Step, *, may_ask: bool) -> bool:
        """Takes the answers, and asks for what there is room for. Called before each step. Returns whether requests
        may begin that could not before.

        Args:
            may_ask: the engine is not paused, and no neighbour waits for its memory.
        """
        for request_id in self._to_hold:
            if request_id in self._wanted:
                blocks.hold(request_id)
        self._to_hold.clear()
        may_begin = self._take_answers(blocks, step)
        looked_up = self._prefixes.take()
        for wanted in looked_up:
            self.window.settle(wanted.request.request_id)
            wanted.stage = Stage.WAITING
            self._queue.push(wanted)
        self._refuse_late()
        may_begin |= self._look_up_fresh(blocks, may_compute=may_ask)
        self._rested_at_seconds = None
        if may_ask:
            may_begin |= self._ask_all(blocks, step)
        # Nobody renews the leases of what was offered and is not fetched at once.
        for wanted in looked_up:
            self._prefixes.settled(wanted)
        for params in self._prefixes.take_unneeded():
            self._fetching.unneeded(params, step)
        self.figures.held, self.figures.asked = self.num_waiting, self.num_asked
        self.figures.promised_blocks = self.window.num_promised
        return self.local.turn(blocks, self._fetching.received) or may_begin

    def close(self) -> None:
        """Ends the threads."""
        self._resolver.close()
        self._asker.close()

    def _take_answers(self, blocks: BlockPool, step: Step) -> bool:
        """Takes what the threads have found. Returns whether a request goes on."""
        for url, addresses in self._resolver.take().items():
            self.servers.are_at(url, addresses)
        may_begin = False
        for number, found in self._asker.take():
            if isinstance(found, Outcome):
                self._not_answered(number, found, blocks, step)
            else:
                may_begin |= self._answered(number, found, blocks, step)
        for server, is_well in self._asker.take_checked():
            for number in list(server.asked) if self.servers.has_failed(server, is_well=is_well) else ():
                late = Outcome("it has answered nothing for too long", is_of_server=True)
                self._not_answered(number, late, blocks, step)
        for server in self.servers.take_silent():
            self._asker.check(server)
        return may_begin

    # -------------------------------------------------------------------------------------------------------- asking

    def _wait(self, wanted: Wanted) -> None:
        self._wanted[wanted.request.request_id] = wanted
        self._limit.waits(wanted.request.request_id)
        self._timelines.begin(wanted.request, State.DECODE_HELD)
        self._queue.add(wanted)

    def _look_up_fresh(self, blocks: BlockPool, *, may_compute: bool) -> bool:
        """Lets those go on that are cached here, or computed here sooner, whatever others wait for. Returns whether any
        goes on now."""
        may_begin = False
        for wanted in self._queue.take_fresh():
            num_missing = self._missing(wanted, blocks)
            if not self._is_cached(wanted, num_missing, blocks) and not (
                may_compute and self._is_sooner_here(wanted, num_missing, *self.servers.choose(*wanted.choice))
            ):
                self._queue.push(wanted)
            may_begin |= wanted.stage is Stage.OVER
        return may_begin

    def _missing(self, wanted: Wanted, blocks: BlockPool) -> int:
        """How many tokens of a prompt are not cached here."""
        return wanted.request.num_prompt_tokens - blocks.num_cached_tokens(wanted.request.request_id)

    def _is_cached(self, wanted: Wanted, num_missing: int, blocks: BlockPool) -> bool:
        """Whether all of a prompt is cached but for less than a block. Then it goes on."""
        if num_missing > self._block_tokens:
            return False
        request_id = wanted.request.request_id
        del self._wanted[request_id]
        wanted.stage = Stage.OVER
        self._queue.land(wanted, is_cached=True)
        self._limit.gone(request_id)
        self.figures.computed[Computed.CACHED] += 1
        blocks.release(request_id, None)
        self._timelines.end(request_id)
        return True

    def _is_sooner_here(self, wanted: Wanted, num_missing: int, server: Server, num_there: int) -> bool:
        """Whether the rest of a prompt is computed here sooner than this server hands it over, which may have so many
        of its tokens cached. Then it is, in its turn; or it waits for an equal one."""
        request_id, num_tokens = wanted.request.request_id, wanted.request.num_prompt_tokens
        num_asked = server.num_tokens(self._clock.now_seconds()) + num_tokens - num_there
        num_cached, num_local = num_tokens - num_missing, self.local.num_tokens
        if not self.local.break_even.computes_here(num_missing, num_cached, num_local, num_asked):
            return False
        if not self._queue.follows(wanted):
            self._queue.leads(wanted)
            self._limit.gone(request_id)
            self._timelines.end(request_id)
            self._wait_locally(wanted, Computed.CACHED, num_missing)
        return True

    def _refuse_late(self) -> None:
        """Ends those that have waited to be asked for as long as they may."""
        for request_id in self._limit.take_late():
            wanted = self._wanted.get(request_id)
            if wanted is None or wanted.stage not in (Stage.WAITING, Stage.LOOKING):
                continue
            leader = self._queue.leader_of(wanted)
            if leader is not wanted and leader.stage is not Stage.WAITING:
                # Its prompt is computed for an equal one.
                self._limit.waits(request_id)
                continue
            self._queue.remove(wanted)
            self._prefixes.settled(wanted)
            self.window.settle(request_id)
            wanted.stage = Stage.LOCAL
            # At once: its equals may be late in this turn, too.
            self._queue.land(wanted, is_cached=False)
            self._fetching.refuse(wanted.request, self._limit.refusal(), computes=False)

    def _ask_all(self, blocks: BlockPool, step: Step) -> bool:
        """Asks for those that wait, in their order. Others pass one that finds no room, for a while. Returns whether
        one goes on."""
        passed, may_begin, waiting = 0, False, self._queue.waiting
        while len(waiting) > passed < MOST_PASSED:
            wanted = waiting[passed]
            if self._waits_no_longer(wanted, blocks, step):
                del waiting[passed]
                may_begin |= wanted.stage in (Stage.FETCHING, Stage.OVER)
                continue
            now = self._clock.now_seconds()
            wanted.passed_since_seconds = wanted.passed_since_seconds or now
            if self._rested_at_seconds is not None or now > wanted.passed_since_seconds + PASSING_SECONDS:
                break
            passed += 1
        return may_begin

    def _waits_no_longer(self, wanted: Wanted, blocks: BlockPool, step: Step) -> bool:
        """Asks for one that waits, or lets it go on here, or wait for another one."""
        request = wanted.request
        if self._queue.follows(wanted):
            return True
        rests, num_blocks = self.servers.all_rest, blocks.num_needed(request.request_id)
        room = blocks.num_free, blocks.num_used, blocks.most_running
        # First, since it is looked at in each step: a choice takes the longer the longer the prompt is.
        if not rests and not self.window.has_room(num_blocks, *room):
            return False
        server, num_cached = self.servers.choose(*wanted.choice)
        if rests and not self._replaces(server):
            self._rested_at_seconds = server.rests_until_seconds
            return False
        num_missing = self._missing(wanted, blocks)
        if self._is_cached(wanted, num_missing, blocks):
            return True
        if self._is_sooner_here(wanted, num_missing, server, num_cached):
            return True
        if rests:
            self._compute_here(wanted)
            return True
        self.window.promise(request.request_id, num_blocks)
        if self._prefixes.begin(wanted, num_missing, self.local.break_even):
            self._queue.leads(wanted)
            return True
        if not self._fetches_cached(wanted, server, num_cached, blocks, step):
            self._ask(wanted, server, num_cached, blocks, step)
        return True

    def _fetches_cached(self, wanted: Wanted, server: Server, num_there: int, blocks: BlockPool, step: Step) -> bool:
        """Whether what a server has cached is fetched as it is, and the rest computed here, sooner than this server,
        which may have so many tokens cached, would hand over all."""
        if not wanted.offers:
            return False
        offering = max(wanted.offers, key=wanted.cached.__getitem__)
        num_tokens, num_cached = wanted.request.num_prompt_tokens, wanted.cached[offering]
        num_rest, num_local = num_tokens - num_cached, self.local.num_tokens
        num_asked = server.num_tokens(self._clock.now_seconds()) + num_tokens - num_there
        is_sooner = self.local.break_even.computes_here(num_rest, num_cached, num_local, num_asked)
        if not (is_sooner and self.local.has_room(num_rest)) or self._unusable(wanted.offers[offering], wanted):
            return False
        wanted.tried.append(offering)
        self._limit.asked(wanted.request.request_id)
        self._queue.leads(wanted)
        self.figures.ended[Ended.ANSWERED] += 1
        self.local.follows(wanted.request, num_rest)
        self._go_on(wanted, wanted.offers.pop(offering), blocks, step)
        return True

    def _ask(self, wanted: Wanted, server: Server, num_cached_tokens: int, blocks: BlockPool, step: Step) -> None:
        self._num_asked += 1
        wanted.number, wanted.stage = self._num_asked, Stage.ASKED
        wanted.tried.append(server)
        self._questions[wanted.number] = wanted
        self._limit.asked(wanted.request.request_id)
        self._queue.leads(wanted)
        self._timelines.enter(wanted.request.request_id, State.DECODE_ASKING)
        # While prefill computes others, this one's blocks are better used here.
        num_before = server.num_tokens(self._clock.now_seconds())
        wanted.named = server.engine if self._pushes and not num_before else None
        num_tokens = wanted.request.num_prompt_tokens - num_cached_tokens
        self.local.break_even.is_asked_for(wanted.request.request_id, num_before + num_tokens)
        self.servers.asked(server, wanted.number, num_tokens, wanted.hashes)
        question = wanted.question
        if wanted.named is not None:
            # Never used again: prefill would pair it with another request.
            question = dataclasses.replace(question, transfer_id=uuid.uuid4().hex)
            params = KvTransferParams.for_decode(wanted.named, question.transfer_id)
            self._go_on(wanted, msgspec.to_builtins(params), blocks, step)
        self._asker.ask(wanted.number, server, question)

    def _go_on(self, wanted: Wanted, params: Mapping[str, Any], blocks: BlockPool, step: Step) -> None:
        wanted.stage = Stage.FETCHING
        blocks.release(wanted.request.request_id, params)
        self._fetching.arrived(wanted.request, step, computes=not self._is_required)

    # ------------------------------------------------------------------------------------------------------- answers

    def _answered(self, number: int, params: dict[str, Any], blocks: BlockPool, step: Step) -> bool:
        """A server has answered with parameters. Returns whether the request goes on now."""
        wanted = self._questions.get(number)
        if wanted is None:
            self._fetching.unneeded(params, step)
            return False
        self.servers.heard(wanted.tried[-1], engine_in(params))
        reason = self._unusable(params, wanted)
        if reason:
            if params.get("remote_engine_id") != self._own_engine_id:
                self._fetching.unneeded(params, step)
            self._not_answered(number, Outcome(reason), blocks, step)
            return False
        del self._questions[number]
        wanted.number = 0
        self.figures.ended[Ended.ANSWERED] += 1
        for overtaken in self.servers.answered(wanted.tried[-1], number, queued_tokens_in(params)):
            lost = Outcome("it has answered questions that it was asked long after this one")
            self._not_answered(overtaken, lost, blocks, step)
        if wanted.stage is not Stage.ASKED:
            self._fetching.answered(wanted.request, params)
            return False
        self._go_on(wanted, params, blocks, step)
        return True

    def _unusable(self, params: Mapping[str, Any], wanted: Wanted) -> str:
        """Why an answer cannot be used; "" if it can."""
        if params.get("do_remote_prefill") is not True:
            return "it offers no KV; expected do_remote_prefill in kv_transfer_params"
        if params.get("remote_engine_id") == self._own_engine_id:
            return "it is this engine itself; expected another server"
        if wanted.named is not None and engine_in(params) != wanted.named:
            return "another engine has answered than that which answered before; it was restarted, or is one of several"
        return ""

    def _not_answered(self, number: int, outcome: Outcome, blocks: BlockPool, step: Step) -> None:
        wanted = self._questions.pop(number, None)
        if wanted is None:
            return
        self._asker.cancel(number)
        wanted.number = 0
        self.figures.ended[outcome.ended] += 1
        self.servers.failed(wanted.tried[-1], number, outcome)
        if wanted.stage is Stage.ASKED:
            self.window.settle(wanted.request.request_id)
            self._learn(wanted, outcome)
            if self._has_tries(wanted):
                self._wait(wanted)
            else:
                self._compute_here(wanted)
        elif wanted.stage is Stage.FETCHING and self._fetching.end(wanted.request, _failure(outcome), blocks, step):
            self._fetched_in_vain(wanted, outcome)

    def _fetched_in_vain(self, wanted: Wanted, outcome: Outcome) -> None:
        """The KV of a request that goes on does not come."""
        self.local.gone(wanted.request.request_id)
        self._learn(wanted, outcome)
        wanted.stage = Stage.FAILED if self._computes or self._has_tries(wanted) else Stage.LOCAL

    def _learn(self, wanted: Wanted, outcome: Outcome) -> None:
        wanted.outcome = outcome
        wanted.num_lost += outcome.has_prompt
        if outcome.is_busy or (outcome.is_of_server and self._is_required and wanted.num_lost <= MOST_LOST):
            wanted.tried.clear()

    def _has_tries(self, wanted: Wanted) -> bool:
        """Whether a server is asked for it once more."""
        asks_another = not wanted.outcome.is_final or any(one not in wanted.tried for one in self.servers.all)
        return asks_another and len(wanted.tried) < MOST_TRIES

    def _replaces(self, server: Server) -> bool:
        """Whether decode computes what this server, the best one, cannot be asked for now."""
        return self.servers.rests(server) and self._computes and not server.is_busy

    def _compute_here(self, wanted: Wanted) -> None:
        """No server gives the KV of a held request: it is computed here, or fails."""
        wanted.stage = Stage.LOCAL
        if self._fetching.refuse(wanted.request, _failure(wanted.outcome), computes=not self._is_required):
            self._wait_locally(wanted, wanted.outcome.computed, wanted.request.num_prompt_tokens)

    def _wait_locally(self, wanted: Wanted, reason: Computed, num_tokens: int) -> None:
        wanted.stage = Stage.LOCAL
        self.figures.computed[reason] += 1
        self.local.add(wanted.request, wanted.order, num_tokens)

    def _withdraw(self, wanted: Wanted, ended: Ended) -> None:
        """Nobody waits for the answer any more."""
        if wanted.number:
            self.figures.ended[ended] += 1
            del self._questions[wanted.number]
            self.servers.withdrawn(wanted.tried[-1], wanted.number)
            self._asker.cancel(wanted.number)
            wanted.number = 0


def _failure(outcome: Outcome) -> HandOverFailed:
    return HandOverFailed(FailureCause.UNREACHABLE, f"no prefill server gives it: {outcome.reason}")
