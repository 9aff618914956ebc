# SPDX-License-Identifier: Apache-2.0
"""What decode computes itself: prompts that no prefill server gives, and the rest of those of which it has most cached,
the next turns of conversations, if that is sooner than to ask for it.

Both ways are measured, from the decision to the first token: what is computed here, beside the running streams, and
what is asked for, with prefill's queue and the link. What was measured a minute ago counts half as much. Used on the
engine's thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kvcached_nixl.deadlines import Clock

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView
    from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks

HALF_LIFE_SECONDS = 60.0
LEAST_WEIGHT = 0.5
"""Of all measurements. With less, nothing is known."""
FIRST_TOKENS = 256
"""What is computed here before anything is known: a step that reads the weights for running streams has room for it."""
PASSING_SECONDS = 10.0
"""After so long, one more begins beside those that vLLM does not start: an adapter has no slot, a grammar compiles."""
SPREAD_TOKENS = 16.0
"""Measurements of less different prompts say nothing of what a token takes."""


class SecondsByTokens:
    """How long something takes that grows with a number of tokens: least squares, with weights that halve in time."""

    def __init__(self) -> None:
        self._at_seconds = 0.0
        # The sums of weights, tokens, seconds, squared tokens, and products of tokens and seconds.
        self._sums = [0.0] * 5

    def add(self, num_tokens: float, seconds: float, now_seconds: float) -> None:
        self._fade(now_seconds)
        measured = 1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds
        self._sums = [before + one for before, one in zip(self._sums, measured, strict=True)]

    def expected_seconds(self, num_tokens: float, now_seconds: float) -> float | None:
        """How long it is likely to take; None if that is not known."""
        self._fade(now_seconds)
        weight, tokens, seconds, tokens_squared, products = self._sums
        if weight < LEAST_WEIGHT:
            return None
        mean_tokens, mean_seconds = tokens / weight, seconds / weight
        variance = max(0.0, tokens_squared / weight - mean_tokens * mean_tokens)
        covariance = products / weight - mean_tokens * mean_seconds
        slope = max(0.0, covariance / (variance + SPREAD_TOKENS * SPREAD_TOKENS))
        return max(0.0, mean_seconds + slope * (num_tokens - mean_tokens))

    def _fade(self, now_seconds: float) -> None:
        factor = 0.5 ** ((now_seconds - self._at_seconds) / HALF_LIFE_SECONDS)
        self._at_seconds = now_seconds
        self._sums = [factor * one for one in self._sums]


class BreakEven:
    """Whether to compute the rest of a prompt here; see the module.

    Args:
        most_tokens: that are computed here of a prompt because it is sooner.
        fixed_tokens: ``max_local_prefill_tokens``, which counts in place of what is measured; None to measure.

    Attributes:
        begun: requests without a first token: which way they are measured for, their tokens, and since when.
    """

    def __init__(self, clock: Clock, most_tokens: int, fixed_tokens: int | None) -> None:
        self.clock = clock
        self._most_tokens = most_tokens
        self._fixed_tokens = fixed_tokens
        self._local, self._asked = SecondsByTokens(), SecondsByTokens()
        # No more than twice as much is tried: what is beyond the measurements is a guess.
        self._proven_tokens = FIRST_TOKENS // 2
        self.begun: dict[str, tuple[SecondsByTokens, int, float]] = {}

    def computes_here(self, num_missing: int, num_cached: int, num_local: int, num_asked: int) -> bool:
        """Whether the rest of a prompt is computed here, behind ``num_local`` tokens, sooner than prefill would hand it
        over, which would have to compute ``num_asked`` tokens, for others before it, too."""
        if self._fixed_tokens is not None:
            return num_missing <= self._fixed_tokens
        if num_missing > min(num_cached, self.longest_tokens):
            return False
        now = self.clock.now_seconds()
        here = self._local.expected_seconds(num_local + num_missing, now)
        there = self._asked.expected_seconds(num_asked, now)
        if here is None or there is None:
            return num_missing <= FIRST_TOKENS
        return here <= there

    @property
    def longest_tokens(self) -> int:
        """No longer rest of a prompt is computed here."""
        return min(self._most_tokens, 2 * self._proven_tokens) if self._fixed_tokens is None else self._fixed_tokens

    def asked_seconds(self, num_tokens: int) -> float | None:
        """How long it is likely to take until prefill has handed over so many tokens; None if that is not known."""
        return self._asked.expected_seconds(num_tokens, self.clock.now_seconds())

    def begins(self, request_id: str, num_tokens: int, *, is_local: bool) -> None:
        """A request is to be computed here, when so many tokens are; or prefill is asked for it, and has to compute so
        many tokens for it."""
        self.begun[request_id] = self._local if is_local else self._asked, num_tokens, self.clock.now_seconds()

    def answered(self, request_ids: Iterable[str]) -> None:
        now = self.clock.now_seconds()
        for request_id in request_ids:
            begun = self.begun.pop(request_id, None)
            if begun is not None:
                way, num_tokens, since_seconds = begun
                way.add(num_tokens, now - since_seconds, now)
                if way is self._local:
                    self._proven_tokens = max(self._proven_tokens, num_tokens)


class LocalPrefills:
    """Prompts that decode computes because no prefill server gives their KV, or because that is sooner.

    Few begin at a time, so that running streams keep their pace: together they have at most ``most_tokens``, which a
    step computes of one of them while others run; one prompt may have more.

    Attributes:
        break_even: whether it is sooner.
        num_tokens: that are to be computed.
    """

    def __init__(self, most_tokens: int, break_even: BreakEven) -> None:
        self.break_even = break_even
        # Kept, because it is read for each of thousands that arrive while no server answers.
        self.num_tokens = 0
        self._begun_seconds = 0.0
        self._most_tokens = most_tokens
        # Requests that wait, with those that have ended meanwhile.
        self._queue: list[tuple[tuple[int, int], str]] = []
        # Requests that wait -> tokens to compute; and those that may begin, with their prompts' tokens.
        self._waiting: dict[str, tuple[int, int]] = {}
        self._begun: dict[str, tuple[int, int]] = {}
        # Those whose beginning has not come yet.
        self._coming: dict[str, tuple[int, int]] = {}

    def add(self, request: RequestView, order: tuple[int, int], num_tokens: int) -> None:
        """So many tokens of a held request are to be computed here. ``order``: its place among all that were held."""
        self.num_tokens += num_tokens
        self.break_even.begins(request.request_id, self.num_tokens, is_local=True)
        self._waiting[request.request_id] = num_tokens, request.num_prompt_tokens
        heapq.heappush(self._queue, (order, request.request_id))

    def is_sooner(self, num_missing: int, num_cached: int, num_asked: int) -> bool:
        """As `BreakEven.computes_here`, behind what is to be computed here before."""
        return self.break_even.computes_here(num_missing, num_cached, self.num_tokens, num_asked)

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many more tokens would not have to wait."""
        return not self.num_tokens or self.num_tokens + num_tokens <= self._most_tokens

    def follows(self, request: RequestView, num_tokens: int) -> None:
        """So many tokens of a request are computed here when what it fetches has come."""
        self.num_tokens += num_tokens
        self._coming[request.request_id] = num_tokens, request.num_prompt_tokens

    def computed(self, request_id: str, num_computed_tokens: int) -> None:
        """A step computes a request up to this token."""
        for of in (self._begun, self._coming):
            if request_id in of and num_computed_tokens >= of[request_id][1]:
                self.num_tokens -= of.pop(request_id)[0]

    def gone(self, request_id: str) -> None:
        self.break_even.begun.pop(request_id, None)
        for of in (self._begun, self._waiting, self._coming):
            self.num_tokens -= of.pop(request_id, (0, 0))[0]

    def turn(self, blocks: EngineBlocks, received: Collection[str]) -> bool:
        """Lets the next ones begin, before each step. Returns whether there are any. Those ``received`` have fetched
        all that they fetch."""
        for request_id in self._coming.keys() & received:
            self._begun[request_id] = self._coming.pop(request_id)
        num_begun, now = len(self._begun), self.break_even.clock.now_seconds()
        while self._queue:
            _, request_id = self._queue[0]
            num_tokens, _ = self._waiting.get(request_id, (0, 0))
            num_begun_tokens = sum(one for one, _ in self._begun.values())
            is_full = bool(self._begun) and num_begun_tokens + num_tokens > self._most_tokens
            if num_tokens and is_full and now < self._begun_seconds + PASSING_SECONDS:
                break
            heapq.heappop(self._queue)
            if num_tokens:
                self._begun[request_id], self._begun_seconds = self._waiting.pop(request_id), now
                blocks.release(request_id, None)
        blocks.limit_chunks(self._most_tokens if self._begun else 0)
        return len(self._begun) > num_begun
