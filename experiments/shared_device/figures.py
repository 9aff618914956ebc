# SPDX-License-Identifier: Apache-2.0
"""Computes what an operator compares from what clients got. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.measure import Ran

__all__ = ["FIRST_TOKEN_SECONDS", "TOKEN_SECONDS", "Figures", "figures_of", "is_good", "peaks", "percentile"]

FIRST_TOKEN_SECONDS = 5.0
TOKEN_SECONDS = 0.2
"""The latency bound: a request counts if its first token came in time, and its further ones on average."""


@dataclass(frozen=True)
class Figures:
    """What an operator compares. Times in seconds; None where there is nothing to take them from.

    Attributes:
        goodput: right answers within the latency bound, a second of load.
        outcomes: how many requests came to each.
    """

    goodput: float
    first_p50: float | None
    first_p99: float | None
    token_p50: float | None
    token_p99: float | None
    outcomes: Mapping[str, int]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the least value that at least ``share`` of the values do not exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def is_good(one: Received) -> bool:
    """Whether an answer is right and came within the latency bound."""
    if one.outcome is not Outcome.RIGHT or one.first_token_seconds is None:
        return False
    gaps = one.gaps_seconds
    return one.first_token_seconds <= FIRST_TOKEN_SECONDS and (not gaps or sum(gaps) / len(gaps) <= TOKEN_SECONDS)


def figures_of(received: Sequence[Received], load_seconds: float) -> Figures:
    """Return the figures of a run. First tokens of requests that got none do not count; they are in ``outcomes``."""
    firsts = [one.first_token_seconds for one in received if one.first_token_seconds is not None]
    gaps = [gap for one in received for gap in one.gaps_seconds]
    return Figures(
        goodput=sum(map(is_good, received)) / load_seconds,
        first_p50=percentile(firsts, 0.5),
        first_p99=percentile(firsts, 0.99),
        token_p50=percentile(gaps, 0.5),
        token_p99=percentile(gaps, 0.99),
        outcomes={kind.value: sum(one.outcome is kind for one in received) for kind in Outcome},
    )


def peaks(ran: Ran) -> tuple[int, dict[str, int]]:
    """Return the most bytes of the device that were in use at once, and the most of each model."""
    models = dict.fromkeys(name.partition(",")[0] for one in ran.samples for name in one.used_bytes)
    total = max((one.total_bytes for one in ran.samples), default=0)

    def of_model(used: Mapping[str, int], model: str) -> int:
        return sum(count for name, count in used.items() if name.startswith(f"{model},"))

    return total, {model: max(of_model(one.used_bytes, model) for one in ran.samples) for model in models}
