# SPDX-License-Identifier: Apache-2.0
"""Questions to prefill servers. Used on the engine's thread only.

For KV one server is asked. Before that, a few that could compute a prompt say how many of its tokens they have cached,
because a conversation may have been somewhere else before. If one has so much that the rest may be computed here, it
offers what it has at once, without a step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from kvcached_nixl.scheduler.asking.asker import Asker, taken
from kvcached_nixl.scheduler.asking.local import BreakEven
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.scheduler.asking.servers import Choice, Servers
from kvcached_nixl.scheduler.asking.wanted import Stage, Wanted
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.headroom import AskingFigures, Ended
from kvcached_nixl.wire.params import HAS_CLIENTS_KEY, cached_tokens_in, offered_tokens_in
from kvcached_nixl.wire.question import Outcome, Question, engine_in, queued_tokens_in

MOST_TRIES = 2
MOST_LOST = 2
"""Servers that may end, or hang, with a prompt before it is taken for the reason."""
LEAST_TOKENS = 128
"""Of less, so little is saved that nobody is asked first."""
MOST_ASKED = 4
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 1.0
"""How long answers to look-ups are waited for: half as long as the KV itself is likely to take."""

_OF_SERVER = (FailureCause.UNREACHABLE, FailureCause.LOST, FailureCause.RESTARTED)
_OF_DECODE = (
    *(FailureCause.REVOKED, FailureCause.QUARANTINE, FailureCause.NO_BLOCKS, FailureCause.MEDIA),
    FailureCause.QUEUE_TIMEOUT,
)
"""For all others prefill may be to blame, or this prompt."""
OWN = Outcome("it is this engine itself; expected another server", is_own=True)
Found: TypeAlias = Mapping[str, Any] | Outcome
"""``kv_transfer_params`` of a server, or why there are none."""


class Questions:
    """See the module.

    Args:
        own_engine_id: of this engine, which never fetches from itself. A name may stand for its own server, too.
        is_required: nothing is computed here because no server answers.

    Attributes:
        asked: by number, the requests whose questions have no answer yet.
        looked_up: by request, who has not answered yet how much of it is cached.
        figures: for the metrics. Read on another thread, too.
    """

    def __init__(self, servers: Servers, asker: Asker, own_engine_id: str, *, is_required: bool) -> None:
        self._servers = servers
        self._asker = asker
        self._own_engine_id = own_engine_id
        self._is_required = is_required
        self.asked: dict[int, Wanted] = {}
        self._num_asked = 0
        self.looked_up: dict[str, tuple[Wanted, set[Server]]] = {}
        self._unneeded: list[Mapping[str, Any]] = []
        self.figures = AskingFigures()

    def take_unneeded(self) -> list[Mapping[str, Any]]:
        """Returns offers, since the last call, that nobody fetches."""
        found, self._unneeded = self._unneeded, []
        return found

    def ask(self, wanted: Wanted, choice: Choice, question: Question) -> None:
        self._num_asked += 1
        wanted.number = self._num_asked
        self.asked[wanted.number] = wanted
        self._servers.asked(choice.server, wanted.number, choice.num_missing, wanted.hashes)
        self._asker.ask(wanted.number, choice.server, question)

    def close(self, wanted: Wanted, ended: Ended) -> None:
        """The question for a request, if there is one, is answered, or its answer is not waited for any more."""
        if wanted.number:
            self.figures.ended[ended] += 1
            del self.asked[wanted.number]
            wanted.tried[-1].asked.pop(wanted.number, None)
            if ended is not Ended.ANSWERED:
                self._asker.cancel(wanted.number)
            wanted.number = 0

    def take(self) -> list[tuple[Wanted, Found]]:
        """Returns what has come of questions since the last call, and has servers checked that are silent."""
        found: list[tuple[Wanted, Found]] = []
        for number, answer in taken(self._asker.answers):
            found += self._answered(number, answer)
        late = Outcome("it has answered nothing for too long", is_of_server=True, has_prompt=True)
        for server, is_well in taken(self._asker.checked):
            if self._servers.has_failed(server, is_well=is_well):
                found += [self._failed(number, late) for number in list(server.asked)]
        for server in self._servers.take_silent():
            self._asker.check(server)
        return found

    def _answered(self, number: int, found: Found) -> list[tuple[Wanted, Found]]:
        wanted = self.asked.get(number)
        if wanted is None:
            self._unneeded += () if isinstance(found, Outcome) else (found,)
            return []
        if isinstance(found, Outcome):
            return [self._failed(number, found)]
        server = wanted.tried[-1]
        self._servers.heard(server, engine_in(found))
        if (unusable := self.unusable(found, wanted)) is not None:
            self._unneeded += () if unusable.is_own else (found,)
            return [self._failed(number, unusable)]
        self.close(wanted, Ended.ANSWERED)
        overtaken = self._servers.answered(server, number, queued_tokens_in(found))
        lost = Outcome("it has answered questions that it was asked long after this one")
        return [*(self._failed(one, lost) for one in overtaken), (wanted, found)]

    def _failed(self, number: int, outcome: Outcome) -> tuple[Wanted, Found]:
        wanted = self.asked[number]
        outcome = self._servers.judged(wanted, outcome)
        if not wanted.question.adapter:
            outcome = msgspec.structs.replace(outcome, is_of_adapter=False)
        self.close(wanted, outcome.ended)
        self._charge(wanted, outcome)
        return wanted, outcome

    def lost(self, wanted: Wanted, failure: HandOverFailed) -> Outcome:
        """The KV of a request that goes on does not come."""
        cause, has_adapter = failure.cause, bool(wanted.question.adapter)
        is_of_adapter = has_adapter and cause is FailureCause.DIGEST
        # Where prefill sends KV, an adapter of another version is found by an answer only.
        is_unproven = cause is FailureCause.UNREACHABLE or (has_adapter and cause is FailureCause.DEADLINE)
        is_of_engine = wanted.named is not None and is_unproven
        is_of_server = cause in _OF_SERVER and not is_of_engine
        outcome = Outcome(
            str(failure),
            is_of_server=is_of_server,
            is_of_adapter=is_of_adapter,
            is_of_engine=is_of_engine,
            is_late=cause is FailureCause.DEADLINE,
            # Its question has no answer: that the connection has ended is seen here first. Or the server has ended with
            # the transfer.
            has_prompt=is_of_server and (bool(wanted.number) or cause is not FailureCause.UNREACHABLE),
        )
        self.close(wanted, outcome.ended)
        if cause not in _OF_DECODE:
            self._charge(wanted, outcome)
        return outcome

    def _charge(self, wanted: Wanted, outcome: Outcome) -> None:
        *before, server = wanted.tried
        if outcome.is_of_engine:
            # Nothing says that the server is not well.
            server.engine = None
            return
        # One adapter says nothing of the others, nor of the base model. A prompt that fails twice is one prompt: with
        # another one like it, a server that is well would rest.
        if outcome.is_of_server or not (outcome.is_of_adapter or server in before):
            self._servers.failed(server, outcome)

    def learn(self, wanted: Wanted, outcome: Outcome) -> None:
        """A request has no use of the server that was asked for it."""
        wanted.outcome = outcome
        wanted.num_lost += outcome.has_prompt or self._servers.fails_it_alone(wanted, outcome)
        # What was refused counts for the next question only: the other server may not be there for long.
        wanted.lacking.difference_update(wanted.tried)
        if outcome.is_of_adapter:
            wanted.lacking.add(wanted.tried.pop())
        elif outcome.is_busy or (outcome.is_of_engine and not outcome.is_late):
            # KV that is late has cost a whole timeout, whosever fault it was.
            wanted.tried.pop()
        elif outcome.is_of_server and self._is_required and wanted.num_lost <= MOST_LOST:
            wanted.tried.clear()
        elif outcome.is_final:
            wanted.lacking.add(wanted.tried[-1])

    def has_tries(self, wanted: Wanted) -> bool:
        """Whether a server is asked for it once more. What one refuses, another one may take, if it is there, or on
        trial. Adapters are spread over servers: one of them may have it, and is waited for whenever it is there."""
        outcome, others = wanted.outcome, self._servers.those_for(wanted.lacking)
        if outcome.is_of_adapter:
            return any(not (one.is_own and self._servers.pauses(one)) for one in others)
        is_left = not outcome.is_final or not all(map(self._servers.pauses, others))
        return is_left and wanted.num_lost <= MOST_LOST and len(wanted.tried) < MOST_TRIES

    def unusable(self, params: Mapping[str, Any], wanted: Wanted) -> Outcome | None:
        """Why an answer cannot be used; None if it can."""
        if params.get("do_remote_prefill") is not True:
            return Outcome("it offers no KV; expected do_remote_prefill in kv_transfer_params")
        if params.get("remote_engine_id") == self._own_engine_id:
            return OWN
        if wanted.named is not None and engine_in(params) != wanted.named:
            reason = "another engine has answered than before; it was restarted, or is one of several"
            return Outcome(reason, is_of_engine=True)
        return None

    def look_up(self, wanted: Wanted, break_even: BreakEven) -> bool:
        """Asks who has the prefix of a request, once. Returns whether an answer is waited for."""
        num_missing = wanted.num_missing
        if wanted.is_looked_up or num_missing < LEAST_TOKENS or wanted.question.prompt is not None:
            return False
        wanted.is_looked_up = True
        num_tokens, rest_tokens = wanted.request.num_prompt_tokens, min(break_even.longest_tokens, num_missing - 1)
        tried = *wanted.tried, *wanted.lacking
        asked = self._servers.that_may_have(tried, wanted.hashes, num_tokens, MOST_ASKED, rest_tokens)
        likely_seconds = break_even.asked_seconds(num_missing)
        seconds = LONGEST_SECONDS if likely_seconds is None else likely_seconds / 2
        seconds = min(max(SHORTEST_SECONDS, seconds), LONGEST_SECONDS)
        for one in asked:
            wished = (num_tokens - rest_tokens, seconds) if one.answers_look_ups else (0, LONGEST_SECONDS)
            self._asker.look_up(one, wanted.question, *wished)
        waited_for = {one for one in asked if one.answers_look_ups}
        if waited_for:
            wanted.stage = Stage.LOOKING
            self.looked_up[wanted.request.request_id] = wanted, waited_for
        return bool(waited_for)

    def take_looked_up(self) -> list[Wanted]:
        """Returns requests whose servers have all answered, or are not waited for any longer."""
        ended: list[Wanted] = []
        for request_id, server, params in taken(self._asker.cached):
            server.answers_look_ups = params is not None
            wanted, waited_for = self.looked_up.get(request_id, (None, set()))
            if params is not None:
                self._has_cached(server, wanted, params)
            waited_for.discard(server)
            if wanted is not None and not waited_for:
                del self.looked_up[request_id]
                ended.append(wanted)
        return ended

    def _has_cached(self, server: Server, wanted: Wanted | None, params: Mapping[str, Any]) -> None:
        is_own = params.get("remote_engine_id") == self._own_engine_id
        if is_own and not server.has_others:
            self._servers.failed(server, OWN)
        server.has_clients = params.get(HAS_CLIENTS_KEY) is True
        server.queued_tokens, server.queued_seconds = queued_tokens_in(params), self._servers.clock.now_seconds()
        num_offered = 0 if is_own else offered_tokens_in(params)
        if wanted is not None:
            wanted.cached[server] = min(num_offered or cached_tokens_in(params), wanted.request.num_prompt_tokens)
        if num_offered and wanted is not None:
            wanted.offers[server] = params
        elif num_offered:
            self._unneeded.append(params)

    def settled(self, wanted: Wanted) -> None:
        """What servers have offered of a request's prompt, and is not fetched, is not needed."""
        self.looked_up.pop(wanted.request.request_id, None)
        self._unneeded += wanted.offers.values()
        wanted.offers.clear()
