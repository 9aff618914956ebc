# SPDX-License-Identifier: Apache-2.0
"""The prefill servers that decode may ask, and which of them is asked next. Used on the engine's thread only.

What a server was asked for before, it may have cached. vLLM's hash of a block stands for all tokens up to its end, the
adapter, the media and the salt; the least recently used hashes are forgotten.

A server that cannot be reached, or is busy, rests: it is not asked for a while, which doubles with each failure in a
row and is jittered. One that fails for one prompt rests only if it has failed for several in a row. Then one prompt
shows whether it serves again, while others go elsewhere: it may answer at once, and its KV never come. One that refuses
several in a row is asked after the others for a while: it may be an odd server that would get all prompts, because it
has nothing to compute.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.asking.resolver import Resolver
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.scheduler.asking.wanted import Wanted
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.question import LONGEST_RETRY_SECONDS, Outcome

logger = logging.getLogger(SERVER_LOGGER)

SHORTEST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
FAILURES_IN_A_ROW = 3
"""After so many, whatever they were, a server rests; after so many refusals it is asked last."""
MOST_DOUBTS = 16
"""Answers of one engine in a row after which it counts as the only one behind a URL, where others have answered."""
VAIN_SILENCES = 10
"""Times ``silence_seconds`` that a server which is well, or busy, and answers nobody, is waited for."""
MOST_HASHES = 65_536
STRIDE = 4
"""Of every so many blocks the hash of one is remembered."""


class Choice(NamedTuple):
    """Whom to ask next for a prompt.

    Attributes:
        num_before: tokens of other prompts that it has to compute.
        num_missing: tokens of this prompt that it may not have cached.
    """

    server: Server
    num_before: int
    num_missing: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has to compute until it has this prompt."""
        return self.num_before + self.num_missing


class Servers:
    """See the module.

    Args:
        silence_seconds: a server that owes answers and gives none for so long is checked.
        block_tokens: of the blocks that prompts are hashed by.
        computes: decode computes what no server gives.
        woken: called on another thread when there are addresses to take.

    Attributes:
        all: at this moment.
        rested_at_seconds: when the pause, or trial, of the next one ends, as `note_rests` has found; None if none does.
        resolver: looks up where they are.
        random: decides between equals, and jitters pauses.
    """

    def __init__(
        self,
        urls: Sequence[str],
        clock: Clock,
        silence_seconds: float,
        block_tokens: int,
        *,
        computes: bool,
        woken: Callable[[], None],
    ) -> None:
        self.clock = clock
        self._block_tokens = block_tokens
        self._silence_seconds = silence_seconds
        self._computes = computes
        self.random = random.Random()
        self.resolver = Resolver(urls, woken)
        self.all = [Server(url) for url in urls]
        self.rested_at_seconds: float | None = None
        self._noted: frozenset[tuple[Server, bool, bool]] = frozenset()
        # Since `note_rests`, for single prompts.
        self._failed: set[Server] = set()
        # The last request that a server was asked for after a failure, whose KV shows whether it serves again; and when
        # the next one is the trial: this one's answer may be lost, or decode not begin it.
        self._trials: dict[Server, tuple[Wanted, float]] = {}
        # Not at their name's addresses any more, but they owe answers.
        self._leaving: list[Server] = []
        # With how often the server had failed then: one that was restarted has nothing cached.
        self._known: OrderedDict[bytes, tuple[Server, int]] = OrderedDict()

    def take_addresses(self) -> None:
        """Takes what names stand for now; a server without an address where that is not known."""
        for url, addresses in self.resolver.take().items():
            of_url = {one.address: one for one in (*self._leaving, *self.all) if one.url == url}
            self.all = [one for one in self.all if one.url != url]
            self.all += [of_url.get(address) or Server(url, address) for address in addresses or ("",)]
            left = [one for one in (*self._leaving, *of_url.values()) if one not in self.all]
            self._leaving = [one for one in dict.fromkeys(left) if one.asked]
            for one in left:
                self._trials.pop(one, None)

    def choose(
        self,
        tried: Collection[Server],
        lacking: Collection[Server],
        hashes: Sequence[bytes],
        num_tokens: int,
        cached: Mapping[Server, int],
    ) -> Choice:
        """Returns the one to ask next for a prompt of so many tokens. It is one of `those_for` it, does not rest, was
        not tried yet, and has the fewest tokens to compute, the prompt's with them, but for those that it has
        ``cached``. The prompt's count twice where they slow a server's own clients. If all rest, it is one that is
        busy, or rests for the shortest time."""
        now = self.clock.now_seconds()
        self.random.shuffle(self.all)
        knowing, num_known = self._find(hashes)

        def may_have(one: Server) -> int:
            return cached.get(one, num_known if one is knowing else 0)

        def order(one: Server) -> tuple[bool, bool, bool, bool, bool, float, int]:
            rests, rests_seconds = self.rests(one, lacking), max(0.0, one.rests_until_seconds - now)
            num_here = (num_tokens - may_have(one)) * (2 if one.has_clients else 1)
            refuses = one.num_refused >= FAILURES_IN_A_ROW and now < one.refused_seconds + LONGEST_PAUSE_SECONDS
            last = refuses, rests and not one.is_busy, rests_seconds, one.num_tokens(now) + num_here
            return one in lacking, rests, one in tried, *last

        found = min(self.all, key=order)
        return Choice(found, found.num_tokens(now), num_tokens - may_have(found))

    def those_for(self, lacking: Collection[Server]) -> list[Server]:
        """Returns the servers that do not lack what a prompt needs."""
        return [one for one in self.all if one not in lacking]

    def that_may_have(
        self, tried: Collection[Server], hashes: Sequence[bytes], num_tokens: int, most: int, rest_tokens: int
    ) -> list[Server]:
        """Returns the servers to ask how much of a prompt they have cached: the one that was asked for most of it, and
        some others; if it has nearly all, only that one, or none if no offer is wanted. None if there is no choice.
        If a server has all but ``rest_tokens``, its offer is wanted; 0 if none is."""
        knowing, num_known = self._find(hashes)
        found = [one for one in self.all if not (self.rests(one) or one in tried)]
        nearly_all = num_tokens - max(rest_tokens, STRIDE * self._block_tokens)
        if knowing is not None and knowing in found and num_known > nearly_all:
            return [knowing] if rest_tokens else []
        if len(found) < 2:
            return []
        self.random.shuffle(found)
        return sorted(found, key=lambda one: one is not knowing)[:most]

    def pauses(self, server: Server) -> bool:
        return server.rests_until_seconds > self.clock.now_seconds()

    def rests(self, server: Server, lacking: Collection[Server] = ()) -> bool:
        """Whether a server is not asked now: its pause lasts, or it is on trial. That counts only if decode computes
        the others, or a server may that is not ``lacking``: else each prompt would wait for those before it."""
        trial, until_seconds = self._trials.get(server, (None, 0.0))
        if trial is None or trial.server is not server or self.clock.now_seconds() >= until_seconds:
            self._trials.pop(server, None)
            return self.pauses(server)
        may_others = self._computes or server.is_own or any(map(_is_reached, self.those_for(lacking)))
        return may_others or self.pauses(server)

    @property
    def have_changed(self) -> bool:
        """Whether one has come or gone, rests, or rests no longer, since `note_rests`."""
        return self._noted != self._rests_now()

    def note_rests(self) -> bool:
        """Returns whether `have_changed`. Called before each step."""
        self._failed.clear()
        # First: a pause that ends meanwhile is looked at again.
        now = self.clock.now_seconds()
        ends = (*(one.rests_until_seconds for one in self.all), *(at for _, at in self._trials.values()))
        self.rested_at_seconds = min((at for at in ends if at > now), default=None)
        before, self._noted = self._noted, self._rests_now()
        return before != self._noted

    def _rests_now(self) -> frozenset[tuple[Server, bool, bool]]:
        # A pause may end while a trial goes on that does not count for all prompts.
        return frozenset((one, self.rests(one), self.pauses(one)) for one in self.all)

    def tries(self, server: Server, trial: Wanted) -> None:
        """A server is asked for a request, or what it has cached is fetched."""
        if server.failure is not None and not server.is_busy:
            self._trials[server] = trial, self.clock.now_seconds() + self._silence_seconds
            # Whoever waits for it has to be woken when that ends.
            self._noted = frozenset()

    def asked(self, server: Server, number: int, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """A server is asked for a prompt with these blocks, of which so many tokens may not be cached there."""
        now = self.clock.now_seconds()
        if not server.asked:
            server.last_sign_seconds = now
        if now > server.rests_until_seconds + self._silence_seconds:
            # Nobody has asked it meanwhile.
            server.busy_since_seconds = 0.0
        server.asked[number] = num_tokens, now
        for one in hashes[STRIDE - 1 :: STRIDE]:
            self._known[one] = server, server.num_outages
            self._known.move_to_end(one)
        while len(self._known) > MOST_HASHES:
            self._known.popitem(last=False)

    def heard(self, server: Server, engine: RemotePrefill | None) -> None:
        """This engine has answered; None for one of several."""
        if engine != server.last_engine:
            # It was restarted, or something chooses anew for each question.
            server.num_doubts = MOST_DOUBTS if server.last_engine is not None else 0
            server.last_engine = engine
        elif server.num_doubts:
            server.num_doubts -= 1
        server.engine = None if server.num_doubts else engine

    def answered(self, server: Server, number: int, queued_tokens: int = 0) -> list[int]:
        """A server has answered with parameters, and says what is in its queue. Returns the questions whose answers are
        not waited for any longer, since it has answered a much later one."""
        now = server.last_sign_seconds = self.clock.now_seconds()
        server.num_refused, server.busy_since_seconds, server.has_others = 0, 0.0, True
        server.queued_tokens, server.queued_seconds = queued_tokens, now
        last_seconds = now - VAIN_SILENCES * self._silence_seconds
        return [one for one, (_, at_seconds) in server.asked.items() if one < number and at_seconds < last_seconds]

    def served(self, server: Server, asked_seconds: float) -> None:
        """Its KV was used, for which it was asked then."""
        if server.failure is not None:
            logger.info("Prefill server %s serves again", server)
        server.num_failures, server.failure, server.rests_until_seconds = 0, None, 0.0
        server.served_seconds = max(server.served_seconds, asked_seconds)
        self._trials.pop(server, None)

    def judged(self, wanted: Wanted, outcome: Outcome) -> Outcome:
        """What to make of an outcome: a server that is busy for too long, and answers nobody meanwhile, is a balancer
        that has none behind it; one that answers others refuses this prompt."""
        if not outcome.is_busy:
            return outcome
        server, now = wanted.tried[-1], self.clock.now_seconds()
        server.busy_since_seconds = server.busy_since_seconds or now
        since_seconds, before_seconds = wanted.busy_seconds or (now, now)
        if server.asked[wanted.number][1] > before_seconds + LONGEST_RETRY_SECONDS + self._silence_seconds:
            # Nobody has asked for it meanwhile.
            since_seconds = now
        wanted.busy_seconds = since_seconds, now
        last_seconds = now - VAIN_SILENCES * self._silence_seconds
        is_vain = server.busy_since_seconds <= last_seconds
        is_final = not is_vain and since_seconds <= last_seconds
        changed = {"is_busy": not (is_vain or is_final), "is_final": is_final, "is_of_server": not is_final}
        return msgspec.structs.replace(outcome, **changed)

    def fails_it_alone(self, wanted: Wanted, outcome: Outcome) -> bool:
        """Notes a failure that seems to be of the server. Returns whether it is of the prompt: the server has served
        others that it was asked for after a question of this one that it has failed."""
        if not outcome.is_of_server or outcome.is_busy:
            return False
        is_alone = 0 < wanted.failed_seconds <= wanted.tried[-1].served_seconds
        if is_alone or not wanted.failed_seconds:
            wanted.failed_seconds = wanted.asked_seconds
        return is_alone

    def failed(self, server: Server, failure: Outcome) -> None:
        """A server has not answered with KV. That says nothing of its engine: an API server refuses without it."""
        now = self.clock.now_seconds()
        if failure.is_final:
            server.num_refused, server.refused_seconds = server.num_refused + 1, now
            if server.num_refused == FAILURES_IN_A_ROW:
                logger.warning("Prefill server %s refuses prompts, and is asked last: %s", server, failure.reason)
            return
        server.engine = None
        if now < server.rests_until_seconds or (server in self._failed and not failure.is_of_server):
            # Those that were asked together fail together; and all do if decode's own host was suspended.
            return
        self._failed.add(server)
        server.num_failures += 1
        if failure.is_of_server and not failure.is_busy:
            server.num_outages, server.last_engine = server.num_outages + 1, None
        # Others may be behind the same URL: that is seen now and then.
        is_own = failure.is_own and not server.has_others
        if not (failure.is_of_server or is_own) and server.num_failures < FAILURES_IN_A_ROW:
            return
        pause_seconds = min(SHORTEST_PAUSE_SECONDS * 2.0 ** min(server.num_failures - 1, 10), LONGEST_PAUSE_SECONDS)
        pause_seconds = max(failure.retry_after_seconds, pause_seconds * self.random.uniform(0.5, 1))
        # A server whose KV never comes costs a prompt a whole timeout, and its blocks for longer.
        pause_seconds = LONGEST_PAUSE_SECONDS if is_own or failure.is_late else pause_seconds
        if server.failure is None:
            level = logging.INFO if is_own else logging.WARNING
            logger.log(level, "Prefill server %s is not asked for %.1f s: %s", server, pause_seconds, failure.reason)
        server.failure, server.rests_until_seconds = failure, now + pause_seconds

    @property
    def silent_at_seconds(self) -> float | None:
        """When the next server has been silent for too long; None if none owes an answer."""
        owing = (max(one.last_sign_seconds, one.checked_seconds) for one in self._owing)
        first_seconds = min(owing, default=None)
        return None if first_seconds is None else first_seconds + self._silence_seconds

    def take_silent(self) -> list[Server]:
        """Returns servers that owe answers, and have been silent since they answered or were checked last."""
        now = self.clock.now_seconds()
        until_seconds = now - self._silence_seconds
        found = [one for one in self._owing if max(one.last_sign_seconds, one.checked_seconds) <= until_seconds]
        for one in found:
            one.checked_seconds = now
        return found

    def has_failed(self, server: Server, *, is_well: bool) -> bool:
        """A server was checked. Returns whether the answers that it owes are not waited for any longer."""
        silent_seconds = self.clock.now_seconds() - server.last_sign_seconds
        return silent_seconds >= self._silence_seconds * (VAIN_SILENCES if is_well else 1)

    @property
    def _owing(self) -> list[Server]:
        return [one for one in (*self.all, *self._leaving) if one.asked]

    def _find(self, hashes: Sequence[bytes]) -> tuple[Server | None, int]:
        """Returns the server that was asked for most of a prompt, and for how many of its tokens."""
        for place in range(len(hashes) // STRIDE * STRIDE - 1, 0, -STRIDE):
            server, num_outages = self._known.get(hashes[place], (None, 0))
            if server is not None and server.num_outages == num_outages:
                return server, (place + 1) * self._block_tokens
        return None, 0


def _is_reached(server: Server) -> bool:
    return server.failure is None or server.is_busy
