# SPDX-License-Identifier: Apache-2.0
"""Computes an arm's medians over its rounds. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.shared_device.clients import Outcome
from experiments.shared_device.figures import Figures, figures_of
from experiments.shared_device.measure import Ran

__all__ = ["Medians", "by_arm", "medians_of", "peaks"]


@dataclass(frozen=True)
class Medians:
    """Medians over the rounds of an arm that were run; with one round, its figures.

    Attributes:
        figures: times in seconds; None where no round has any.
        wasted_share: of prefilled tokens; None where nothing was prefilled.
        peak_bytes: of the device that were in use at once; None where it is split.
    """

    figures: Figures
    wasted_share: float | None
    revoked: float
    preempted: float
    peak_bytes: float | None


def by_arm(runs: Iterable[Ran]) -> dict[str, list[Ran]]:
    """Return the rounds of each arm, in the order of the arms."""
    found: dict[str, list[Ran]] = {}
    for ran in runs:
        found.setdefault(ran.arm, []).append(ran)
    return found


def medians_of(rounds: Sequence[Ran]) -> Medians | None:
    """Return the medians of an arm's rounds; None if none was run."""
    ended = [ran for ran in rounds if not ran.not_run]
    if not ended:
        return None
    each = [figures_of(ran.received, ran.load_seconds) for ran in ended]
    return Medians(
        figures=Figures(
            goodput=statistics.median(one.goodput for one in each),
            first_p50=_median(one.first_p50 for one in each),
            first_p99=_median(one.first_p99 for one in each),
            token_p50=_median(one.token_p50 for one in each),
            token_p99=_median(one.token_p99 for one in each),
            outcomes={kind.value: statistics.median(one.outcomes[kind.value] for one in each) for kind in Outcome},
        ),
        wasted_share=_median(ran.counts.wasted_share for ran in ended),
        revoked=statistics.median(ran.counts.revoked for ran in ended),
        preempted=statistics.median(ran.counts.preempted for ran in ended),
        peak_bytes=_median(peaks(ran)[0] if ran.samples else None for ran in ended),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def peaks(*rounds: Ran) -> tuple[int, dict[str, int]]:
    """Return the most bytes of the device that were in use at once in any round, and the most of each model."""
    samples = [one for ran in rounds for one in ran.samples]
    models = dict.fromkeys(name.partition(",")[0] for one in samples for name in one.used_bytes)
    total = max((one.total_bytes for one in samples), default=0)
    return total, {model: max(_of_model(one.used_bytes.items(), model) for one in samples) for model in models}


def _of_model(used: Iterable[tuple[str, int]], model: str) -> int:
    return sum(count for name, count in used if name.startswith(f"{model},"))
