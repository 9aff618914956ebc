# SPDX-License-Identifier: Apache-2.0
"""The load: who asks what, and when. Drawn from a seed before a run, so that every arm gets the same requests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LENGTHS", "MAX_TOKENS", "Arrival", "Swell", "arrivals", "draw_prompts", "merged"]

LENGTHS = (256, 512, 512, 768, 1024, 1536)
"""Of prompts, in tokens: whole blocks, so that the bytes of a hand-over say how many tokens it moved."""
MAX_TOKENS = (32, 64, 96, 128)
"""Of answers."""


@dataclass(frozen=True)
class Arrival:
    """A request that comes whether earlier ones have been answered or not (open loop).

    Attributes:
        at_seconds: after the begin of the load.
        model: name of the model.
        prompt: number of its prompt, among those of the model.
        max_tokens: of its answer.
    """

    at_seconds: float
    model: str
    prompt: int
    max_tokens: int


@dataclass(frozen=True)
class Swell:
    """A rate in requests a second that swells from ``low`` to ``high`` and ebbs, once in each period.

    ``phase``: what part of a period it is ahead; two loads that differ by 0.5 swell at opposite times.
    """

    low: float
    high: float
    period_seconds: float = 18.0
    phase: float = 0.0

    def at(self, seconds: float) -> float:
        """Return the rate at a time; it is lowest at 0 if ``phase`` is 0."""
        turn = math.cos(2 * math.pi * (seconds / self.period_seconds + self.phase))
        return self.low + (self.high - self.low) * (1 - turn) / 2


def arrivals(model: str, swell: Swell, seconds: float, prompts: int, seed: int) -> list[Arrival]:
    """Return a Poisson process with the rate of ``swell``, by thinning.

    Args:
        prompts: how many prompts there are; the lengths of answers are drawn as well.
    """
    draw = random.Random(f"{seed} {model}")
    found, now = [], 0.0
    while (now := now + draw.expovariate(swell.high)) < seconds:
        if draw.random() * swell.high < swell.at(now):
            found.append(Arrival(now, model, draw.randrange(prompts), draw.choice(MAX_TOKENS)))
    return found


def merged(*loads: Sequence[Arrival]) -> list[Arrival]:
    """Return several models' requests in the order of their arrival."""
    return sorted((one for load in loads for one in load), key=lambda one: one.at_seconds)


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of token ids, with all of ``LENGTHS`` as often."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(LENGTHS[number % len(LENGTHS)])] for number in range(count)]
