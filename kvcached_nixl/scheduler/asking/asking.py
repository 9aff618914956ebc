# SPDX-License-Identifier: Apache-2.0
"""Decode: requests whose KV prefill servers are asked for, before they may begin. One per engine, on its thread.

    LOOKING ◄─► WAITING ─► ASKED ─► FETCHING ─► a step computes it
                  ▲ └────────│────────▲ │
                  └──────────┴─ FAILED ◄┴─► LOCAL: computed here, few at a time (`LocalPrefills`), or it fails, as
                                            ``kv_load_failure_policy`` says

Meanwhile requests are held: they stay in vLLM's queue, are counted and can be aborted, but no step looks at them. With
the ``kv_transfer_params`` of the answer they go on. In push a request goes on when it is asked for, so that prefill
finds its blocks and sends KV while it computes, if it has nothing else to compute, and its engine is known.

What is not cached here may be too little to ask for: the request goes on at once, or in its turn (`BreakEven`). Of
equal prompts one is asked for (`Queue`). After a failure another server is asked, once, or a busy one again.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcached_nixl.deadlines import earliest
from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.local import BreakEven, LocalPrefills
from kvcached_nixl.scheduler.asking.questions import Questions
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.scheduler.asking.servers import Choice, Servers
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.asking.wanted import Queue, QueueLimit, Stage, Wanted, Window
from kvcached_nixl.scheduler.context import EngineContext, Progress
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.headroom import Computed, Ended
from kvcached_nixl.wire.params import asks, params_to_decode
from kvcached_nixl.wire.question import Outcome
from kvcached_nixl.wire.timeline import State

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView

MOST_PASSED = 16
PASSING_SECONDS = 10.0
"""For how long others may be asked for before one that finds no room."""


class Asking:
    """See the module."""

    def __init__(self, engine: EngineContext, settings: AskSettings, asker: Asker, fetching: DecodeFetches) -> None:
        clock, most_tokens = engine.clock, engine.stock.max_num_batched_tokens
        self._engine = engine
        self._asker = asker
        self._fetching = fetching
        # If no more tokens are missing, they are computed here. Where layers keep states, a block of theirs may be as
        # long as the longest request.
        self._block_tokens = min(one.block_size for one in engine.groups.all)
        silence_seconds = engine.settings.handover_timeout_seconds
        # What no server gives may be computed here.
        self._computes = engine.stock.recomputes and not settings.is_required
        more: dict[str, Any] = {"computes": self._computes, "woken": engine.woken}
        self.servers = Servers(settings.servers, clock, silence_seconds, self._block_tokens, **more)
        break_even = BreakEven(clock, most_tokens, settings.max_local_prefill_tokens)
        self.local = LocalPrefills(most_tokens // 4, break_even)
        self.questions = Questions(self.servers, asker, engine.own.engine_id, is_required=settings.is_required)
        self.figures = self.questions.figures
        # Prefill is told where the KV goes, and sends it. Two that ask each other would wait for the blocks that they
        # keep for each other.
        self._pushes = engine.is_push and not settings.is_asked
        self._is_required = settings.is_required
        self._wanted: dict[str, Wanted] = {}
        self._queue = Queue()
        # Requests that vLLM has in its queue, and that are to be held.
        self._to_hold: list[str] = []
        self._num_arrived = 0
        # Those who wait are waiting for a server that rests.
        self._rests = False
        self.window = Window()
        self._limit = QueueLimit(clock, settings.queue_seconds)

    @property
    def has_news(self) -> bool:
        return self._asker.has_answers or bool(self._queue.fresh) or (self._awaits_rested and self.servers.have_changed)

    @property
    def _awaits_rested(self) -> bool:
        return self._rests or bool(self._queue.resting)

    @property
    def due_at_seconds(self) -> float | None:
        """When `turn` has to be called, whatever happens until then; None if it need not."""
        of_queue = self._queue.due_at_seconds, self._limit.deadlines.first_seconds
        rested_at_seconds = self.servers.rested_at_seconds if self._awaits_rested else None
        return earliest(self.servers.silent_at_seconds, rested_at_seconds, *of_queue)

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: RequestView) -> bool:
        """A request has entered the engine. Returns whether it is to be held."""
        # The latter is a peer's question.
        if not self.servers.all or asks(request.params, "do_remote_decode"):
            return False
        is_short = request.num_prompt_tokens <= self._block_tokens
        # Prefill computes it to its end, which leaves no state that decode could go on from.
        is_left_whole = self._engine.groups.have_states and request.ends_in_media
        question = None if is_short or is_left_whole else request.question
        if question is None:
            self.figures.computed[Computed.SHORT if is_short else Computed.NOT_ASKABLE] += 1
            return False
        self._num_arrived += 1
        blocks, hashes = self._engine.blocks, request.block_hashes
        order = request.priority if blocks.goes_by_priority else 0, self._num_arrived
        prefix = hashes[-1] if hashes and blocks.caches_prefixes else None
        self._wait(Wanted(request, question, order, hashes, prefix))
        return True

    def gone(self, request_id: str) -> None:
        self.window.settle(request_id)
        self.local.gone(request_id)
        self._limit.gone(request_id)
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None:
            self.questions.settled(wanted)
            self.questions.close(wanted, Ended.LEFT)
            self._queue.remove(wanted)
            wanted.stage = Stage.OVER
            self._queue.land(wanted, is_cached=False)

    def computed(self, progress: Iterable[Progress]) -> None:
        """A step computes these requests: what they have fetched is in the prefix cache."""
        for one in progress if self._wanted or self.local.num_tokens else ():
            wanted = self._wanted.get(one.request_id)
            if wanted is not None and one.num_computed_tokens >= wanted.request.num_prompt_tokens:
                if wanted.stage is Stage.FETCHING:
                    self.servers.served(wanted.tried[-1], wanted.asked_seconds)
                self._is_over(wanted)
            self.local.computed(one.request_id, one.num_computed_tokens)

    def may_ask_again(self, request_id: str) -> bool:
        """The KV of a request does not come. Returns whether another server is asked for it, or it is computed here
        when it is its turn, so that it neither begins nor fails yet; `holds_again` follows. Idempotent until then."""
        wanted = self._wanted.get(request_id)
        if wanted is not None and wanted.stage is Stage.FETCHING:
            failure = self._fetching.failure_of(wanted.request)
            if failure is not None:
                self._fetched_in_vain(wanted, self.questions.lost(wanted, failure))
        return wanted is not None and wanted.stage is Stage.FAILED

    def holds_again(self, request: RequestView) -> bool:
        """Called where vLLM asks how much KV there is for a request. Returns whether it waits once more; `turn` holds
        it."""
        request_id = request.request_id
        if not self.may_ask_again(request_id):
            return False
        self.window.settle(request_id)
        wanted = self._wanted[request_id]
        if self.questions.has_tries(wanted) and not self._replaces(self.servers.choose(*wanted.choice).server):
            self._fetching.forget(request)
            self._wait(wanted)
        elif self._computes and self._fetching.is_tried(request):
            self._wait_locally(wanted, wanted.outcome.computed, wanted.request.num_prompt_tokens)
        else:
            self._fetching.forget(request)
            self._compute_here(wanted)
        self._to_hold.append(request_id)
        return True

    def turn(self, *, may_ask: bool) -> bool:
        """Takes the answers, and asks for what there is room for if it may: the engine is not paused, and no neighbour
        waits for its memory. Called before each step. Returns whether requests may begin that could not before."""
        blocks = self._engine.blocks
        for request_id in self._to_hold:
            if request_id in self._wanted:
                blocks.hold(request_id)
        self._to_hold.clear()
        may_begin = self._take_answers()
        looked_up = self.questions.take_looked_up()
        for wanted in looked_up:
            self.window.settle(wanted.request.request_id)
            wanted.stage = Stage.WAITING
            self._queue.push(wanted)
        self._refuse_late()
        if self.servers.note_rests():
            self._queue.wake()
        may_begin |= self._look_up_fresh(may_compute=may_ask)
        self._rests = False
        if may_ask:
            may_begin |= self._ask_all()
        # Nobody renews the leases of what was offered and is not fetched at once.
        for wanted in looked_up:
            self.questions.settled(wanted)
        for params in self.questions.take_unneeded():
            self._fetching.unneeded(params)
        self.figures.held = len(self._queue) + len(self.questions.looked_up)
        self.figures.asked = len(self.questions.asked)
        self.figures.promised_blocks = self.window.num_promised
        return self.local.turn(blocks, self._fetching.received) or may_begin

    def close(self) -> None:
        self.servers.resolver.close()
        self._asker.close()

    # ------------------------------------------------------------------------------------------- before one is asked

    def _wait(self, wanted: Wanted) -> None:
        self._wanted[wanted.request.request_id] = wanted
        self._engine.timelines.begin(wanted.request, State.DECODE_HELD)
        wanted.stage = Stage.WAITING
        self._queue.fresh.append(wanted)

    def _look_up_fresh(self, *, may_compute: bool) -> bool:
        """Lets those go on that are cached here, or computed here sooner, whatever others wait for. Returns whether any
        goes on now."""
        may_begin = False
        for wanted in self._queue.take_fresh(self._engine.clock.now_seconds()):
            # Before, it did not wait for a server.
            if wanted.request.request_id not in self._limit.deadlines:
                self._limit.waits(wanted.request.request_id)
            choice = self.servers.choose(*wanted.choice) if may_compute else None
            if not self._goes_on_here(wanted, choice):
                self._queue.push(wanted)
            may_begin |= wanted.stage is Stage.OVER
        return may_begin

    def _goes_on_here(self, wanted: Wanted, choice: Choice | None) -> bool:
        """Whether a prompt needs no server: all of it is cached but for less than a block, so that it goes on; or the
        rest is computed here, in its turn, sooner than the chosen server hands it over, or for an equal one."""
        request_id, num_tokens = wanted.request.request_id, wanted.request.num_prompt_tokens
        num_cached = self._engine.blocks.num_cached_tokens(request_id)
        wanted.num_missing = num_tokens - num_cached
        if wanted.num_missing <= self._block_tokens:
            self._is_over(wanted)
            self.figures.computed[Computed.CACHED] += 1
            self._engine.blocks.release(request_id, None)
        elif choice is None or not self.local.is_sooner(wanted.num_missing, num_cached, choice.num_tokens):
            return False
        elif self._queue.follows(wanted):
            return True
        else:
            self._queue.leads(wanted)
            self._wait_locally(wanted, Computed.CACHED, wanted.num_missing)
        self._limit.gone(request_id)
        self._engine.timelines.end(request_id)
        return True

    def _is_over(self, wanted: Wanted) -> None:
        """Its prompt is cached here."""
        del self._wanted[wanted.request.request_id]
        wanted.stage = Stage.OVER
        self._queue.land(wanted, is_cached=True)

    def _refuse_late(self) -> None:
        """Ends those that have waited to be asked for as long as they may."""
        for request_id in self._limit.deadlines.take_due(self._engine.clock.now_seconds()):
            wanted = self._wanted.get(request_id)
            if wanted is None or wanted.stage not in (Stage.WAITING, Stage.LOOKING):
                continue
            leader = self._queue.leader_of(wanted)
            if leader is not wanted and leader.stage is not Stage.WAITING:
                # Its prompt is computed for an equal one.
                self._limit.waits(request_id)
                continue
            self._queue.remove(wanted)
            self.questions.settled(wanted)
            self.window.settle(request_id)
            wanted.stage = Stage.LOCAL
            # At once: its equals may be late in this turn, too.
            self._queue.land(wanted, is_cached=False)
            self._fetching.refuse(wanted.request, self._limit.refusal(), computes=False)

    # -------------------------------------------------------------------------------------------------------- asking

    def _ask_all(self) -> bool:
        """Asks for those that wait, in their order. Others pass one that finds no room, for a while. Returns whether
        one goes on."""
        passed, may_begin, waiting = 0, False, self._queue.waiting
        while len(waiting) > passed < MOST_PASSED:
            wanted = waiting[passed]
            if self._waits_no_longer(wanted):
                del waiting[passed]
                may_begin |= wanted.stage in (Stage.FETCHING, Stage.OVER)
                continue
            now = self._engine.clock.now_seconds()
            wanted.passed_since_seconds = wanted.passed_since_seconds or now
            if self._rests or now > wanted.passed_since_seconds + PASSING_SECONDS:
                break
            passed += 1
        return may_begin

    def _waits_no_longer(self, wanted: Wanted) -> bool:
        """Asks for one that waits, or lets it go on here, or wait for another one."""
        request_id, blocks = wanted.request.request_id, self._engine.blocks
        if self._queue.follows(wanted):
            return True
        rests = all(self.servers.rests(one, wanted.lacking) for one in self.servers.those_for(wanted.lacking))
        num_blocks = blocks.num_needed(request_id)
        # First, since it is looked at in each step: a choice takes the longer the longer the prompt is.
        if not rests and not self.window.has_room(num_blocks, blocks):
            return False
        choice = self.servers.choose(*wanted.choice)
        if rests and choice.server not in wanted.lacking and not self._replaces(choice.server):
            if wanted.lacking:
                self._queue.rest(wanted)
                return True
            self._rests = True
            return False
        if self._goes_on_here(wanted, choice):
            return True
        if rests:
            self._compute_here(wanted)
            return True
        self.window.promise(request_id, num_blocks)
        if self.questions.look_up(wanted, self.local.break_even):
            self._queue.leads(wanted)
        elif not self._fetches_cached(wanted, choice):
            self._ask(wanted, choice)
        return True

    def _fetches_cached(self, wanted: Wanted, choice: Choice) -> bool:
        """Whether what a server has cached is fetched as it is, and the rest computed here, sooner than the chosen
        server would hand over all."""
        if not wanted.offers:
            return False
        offering = max(wanted.offers, key=wanted.cached.__getitem__)
        num_cached = wanted.cached[offering]
        num_rest = wanted.request.num_prompt_tokens - num_cached
        is_sooner = self.local.is_sooner(num_rest, num_cached, choice.num_tokens) and self.local.has_room(num_rest)
        if not is_sooner or self.questions.unusable(wanted.offers[offering], wanted):
            return False
        self._is_asked_for(wanted, offering)
        self.figures.ended[Ended.ANSWERED] += 1
        self.local.follows(wanted.request, num_rest)
        self._go_on(wanted, wanted.offers.pop(offering))
        return True

    def _is_asked_for(self, wanted: Wanted, server: Server) -> None:
        wanted.tried.append(server)
        wanted.asked_seconds = self._engine.clock.now_seconds()
        self.servers.tries(server, wanted)
        self._limit.asked(wanted.request.request_id)
        self._queue.leads(wanted)

    def _ask(self, wanted: Wanted, choice: Choice) -> None:
        server, wanted.stage = choice.server, Stage.ASKED
        self._is_asked_for(wanted, server)
        self._engine.timelines.enter(wanted.request.request_id, State.DECODE_ASKING)
        self.local.break_even.begins(wanted.request.request_id, choice.num_tokens, is_local=False)
        question = wanted.question
        # While prefill computes others, this one's blocks are better used here. After a rolling restart no server has
        # the engine that answered last.
        may_name = self._pushes and not choice.num_before and not wanted.outcome.is_of_engine
        wanted.named = server.engine if may_name else None
        if wanted.named is not None:
            # Never used again: prefill would pair it with another request.
            question = dataclasses.replace(question, transfer_id=uuid.uuid4().hex)
            self._go_on(wanted, params_to_decode(wanted.named, question.transfer_id))
        self.questions.ask(wanted, choice, question)

    def _go_on(self, wanted: Wanted, params: Mapping[str, Any]) -> None:
        wanted.stage = Stage.FETCHING
        self._engine.blocks.release(wanted.request.request_id, params)
        self._fetching.arrived(wanted.request, computes=not self._is_required, is_asked=True)

    # ------------------------------------------------------------------------------------------------ answers

    def _take_answers(self) -> bool:
        """Takes what has come of questions. Returns whether a request goes on."""
        self.servers.take_addresses()
        may_begin = False
        for wanted, found in self.questions.take():
            is_held = wanted.stage is Stage.ASKED
            if is_held and not isinstance(found, Outcome):
                self._go_on(wanted, found)
                may_begin = True
            elif not isinstance(found, Outcome):
                self._fetching.answered(wanted.request, found)
            elif is_held:
                self.window.settle(wanted.request.request_id)
                self.questions.learn(wanted, found)
                if self.questions.has_tries(wanted):
                    self._wait(wanted)
                else:
                    self._compute_here(wanted)
            elif wanted.stage is Stage.FETCHING and self._fetching.end(wanted.request, _failure(found)):
                self._fetched_in_vain(wanted, found)
        return may_begin

    def _fetched_in_vain(self, wanted: Wanted, outcome: Outcome) -> None:
        """The KV of a request that goes on does not come."""
        self.local.gone(wanted.request.request_id)
        self.questions.learn(wanted, outcome)
        wanted.stage = Stage.FAILED if self._computes or self.questions.has_tries(wanted) else Stage.LOCAL

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


def _failure(outcome: Outcome) -> HandOverFailed:
    return HandOverFailed(FailureCause.UNREACHABLE, f"no prefill server gives it: {outcome.reason}")
