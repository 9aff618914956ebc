# SPDX-License-Identifier: Apache-2.0
"""Whether decode computes the rest of a prompt itself, most of which it has cached: the next turn of a conversation.

Both ways are measured, from the decision to the first token: what is computed here, beside the running streams, and
what is asked for, with prefill's queue and the link. What was measured a minute ago counts half as much. (Dynamo has a
fixed number of tokens for this, ``max_local_prefill_length``.)

Used on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Clock

__all__ = ["BreakEven", "SecondsByTokens"]

HALF_LIFE_SECONDS = 60.0
LEAST_WEIGHT = 0.5
"""Of all measurements. With less, nothing is known."""
FIRST_TOKENS = 256
"""What is computed here before anything is known: a step that reads the weights for running streams has room for it."""
SPREAD_TOKENS = 16.0
"""Measurements of less different prompts say nothing of what a token takes."""


class SecondsByTokens:
    """How long something takes that grows with a number of tokens: least squares, with weights that halve in time."""

    def __init__(self) -> None:
        self._at_seconds = 0.0
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._products = 0.0

    def add(self, num_tokens: float, seconds: float, now_seconds: float) -> None:
        """It has taken so long."""
        self._fade(now_seconds)
        self._weight += 1.0
        self._tokens += num_tokens
        self._seconds += seconds
        self._tokens_squared += num_tokens * num_tokens
        self._products += num_tokens * seconds

    def expected_seconds(self, num_tokens: float, now_seconds: float) -> float | None:
        """How long it is likely to take; None if that is not known."""
        self._fade(now_seconds)
        if self._weight < LEAST_WEIGHT:
            return None
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = max(0.0, self._tokens_squared / self._weight - mean_tokens * mean_tokens)
        covariance = self._products / self._weight - mean_tokens * mean_seconds
        slope = max(0.0, covariance / (variance + SPREAD_TOKENS * SPREAD_TOKENS))
        return max(0.0, mean_seconds + slope * (num_tokens - mean_tokens))

    def _fade(self, now_seconds: float) -> None:
        factor = 0.5 ** ((now_seconds - self._at_seconds) / HALF_LIFE_SECONDS)
        self._at_seconds = now_seconds
        self._weight *= factor
        self._tokens *= factor
        self._seconds *= factor
        self._tokens_squared *= factor
        self._products *= factor


class BreakEven:
    """See the module.

    Args:
        most_tokens: that are computed here of a prompt because it is sooner.
        fixed_tokens: what the operator has set in place of what is measured (``max_local_prefill_tokens``), or None.
    """

    def __init__(self, clock: Clock, most_tokens: int, fixed_tokens: int | None) -> None:
        self._clock = clock
        self._most_tokens = most_tokens
        self._fixed_tokens = fixed_tokens
        self._local, self._asked = SecondsByTokens(), SecondsByTokens()
        # No more than twice as much is tried: what is beyond the measurements is a guess.
        self._proven_tokens = FIRST_TOKENS // 2
        # Requests without a first token: which of the two they are measured for, their tokens, and since when.
        self._begun: dict[str, tuple[SecondsByTokens, int, float]] = {}

    def computes_here(self, num_missing: int, num_cached: int, num_local: int, num_asked: int) -> bool:
        """Whether the rest of a prompt is computed here sooner than prefill would hand it over.

        Args:
            num_missing, num_cached: tokens of the prompt.
            num_local: tokens that are to be computed here before.
            num_asked: tokens that prefill would have to compute, for others before it, too.
        """
        if self._fixed_tokens is not None:
            return num_missing <= self._fixed_tokens
        if num_missing > min(num_cached, self._most_tokens):
            return False
        now = self._clock.now_seconds()
        here = self._local.expected_seconds(num_local + num_missing, now)
        there = self._asked.expected_seconds(num_asked, now)
        if here is None or there is None:
            return num_missing <= FIRST_TOKENS
        return num_missing <= 2 * self._proven_tokens and here <= there

    def asked_seconds(self, num_tokens: int) -> float | None:
        """How long it is likely to take until prefill has handed over so many tokens; None if that is not known."""
        return self._asked.expected_seconds(num_tokens, self._clock.now_seconds())

    def begins_here(self, request_id: str, num_tokens: int) -> None:
        """A request is to be computed here, when so many tokens are."""
        self._begun[request_id] = self._local, num_tokens, self._clock.now_seconds()

    def is_asked_for(self, request_id: str, num_tokens: int) -> None:
        """Prefill is asked for a request, and has to compute so many tokens for it."""
        self._begun[request_id] = self._asked, num_tokens, self._clock.now_seconds()

    @property
    def awaits_tokens(self) -> bool:
        """Whether `answered` would measure anything."""
        return bool(self._begun)

    def answered(self, request_ids: Iterable[str]) -> None:
        """Requests have got a token."""
        now = self._clock.now_seconds()
        for request_id in request_ids:
            begun = self._begun.pop(request_id, None)
            if begun is not None:
                way, num_tokens, since_seconds = begun
                way.add(num_tokens, now - since_seconds, now)
                if way is self._local:
                    self._proven_tokens = max(self._proven_tokens, num_tokens)

    def gone(self, request_id: str) -> None:
        """A request has ended, or is not measured any more."""
        self._begun.pop(request_id, None)
