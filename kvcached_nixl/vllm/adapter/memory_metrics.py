# SPDX-License-Identifier: Apache-2.0
"""Metrics of an engine's memory, and of what is moved from it and to it; `adapter.metrics` has the others.

`HeadroomMetrics` is what an engine's side channel says, in an idle engine, too. `MovedBytes` and `SlabMetrics` come
from the workers with the steps' output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.headroom import AskingFigures, read_headroom

_GAUGES = (
    (
        "kvcached_nixl:free_tokens",
        "Tokens of KV that the engine could take now: of its pool, and of the device's memory.",
    ),
    ("kvcached_nixl:used_tokens", "Tokens of KV in blocks that requests have, or that are kept or held for peers."),
    ("kvcached_nixl:queued_tokens", "Tokens of the prompts of requests that have no blocks yet."),
    ("kvcached_nixl:kept_offers", "Requests of prefill whose KV is kept until decode has fetched it."),
    ("kvcached_nixl:kept_tokens", "Tokens of KV of kept offers; part of used_tokens."),
    ("kvcached_nixl:free_bytes", "Memory of the device that kvcached could map now."),
    ("kvcached_nixl:mapped_bytes", "Memory of the device that kvcached has mapped for KV, with its reserve."),
    ("kvcached_nixl:waiting_fetches", "Requests of decode whose KV has not arrived."),
    (
        "kvcached_nixl:oldest_fetch_seconds",
        "How long the first request that has blocks has waited for its KV; 0 without one.",
    ),
    ("kvcached_nixl:oldest_offer_seconds", "Since prefill has kept the oldest offer; 0 if it keeps none."),
)
"""Gauge and help text of fields of `Headroom`."""
_TOTALS = (
    ("kvcached_nixl:map_bytes", "Memory of the device that kvcached has mapped for KV since the start, at least."),
    ("kvcached_nixl:unmap_bytes", "Memory of the device that kvcached has given back since the start, at least."),
)
"""Counter and help text of fields of `Headroom` that only grow."""
_ASKING = (
    ("kvcached_nixl:held_requests", "held", "Requests of decode that no prefill server is asked for yet."),
    ("kvcached_nixl:asked_requests", "asked", "Requests of decode that wait for the answer of a prefill server."),
    (
        "kvcached_nixl:promised_blocks",
        "promised_blocks",
        "Blocks that decode counts on for requests which it has asked for, and which have none yet.",
    ),
)
"""Gauge, field of `AskingFigures` and help text. Not there where no prefill servers are asked."""
_ASKED = (
    ("kvcached_nixl:questions", "ended", "outcome", "Questions to prefill servers that have ended, by outcome."),
    ("kvcached_nixl:computed_prompts", "computed", "reason", "Prompts that decode computes itself, by reason."),
)
"""Counter, field, label and help text."""
_SLAB = (
    ("kvcached_nixl:slab_bytes", "Memory of a rank's slab, through which KV is staged."),
    ("kvcached_nixl:slab_slots", "Slots of a rank's slab."),
    ("kvcached_nixl:slab_waiting", "Hand-overs of a rank that wait for slots now."),
)
_USES = ("parked", "sending", "receiving")


def _field(name: str) -> str:
    return name.partition(":")[2]


class HeadroomMetrics:
    """What an engine's side channel says. Set on a thread of its own.

    Args:
        metrics: vLLM's exporter, whose classes are used.
    """

    def __init__(self, metrics: Any, labelnames: Any) -> None:
        self._gauges = {
            name: metrics._gauge_cls(
                name=name, documentation=text, multiprocess_mode="mostrecent", labelnames=labelnames
            )
            for name, text in _GAUGES
        }
        self._counters = {
            name: metrics._counter_cls(name=name, documentation=text, labelnames=labelnames) for name, text in _TOTALS
        }
        self._asking = [
            (
                field,
                metrics._gauge_cls(
                    name=name, documentation=text, multiprocess_mode="mostrecent", labelnames=labelnames
                ),
            )
            for name, field, text in _ASKING
        ]
        self._asked = [
            (field, metrics._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label]))
            for name, field, label, text in _ASKED
        ]
        self._counted: dict[tuple[Any, ...], int] = {}

    def set(self, engine_idx: int, labelvalues: Any, headroom: bytes, *, counts: bool) -> None:
        """Show what engine ``engine_idx`` says.

        Args:
            counts: also what has grown since the last call. True in one process only: their counters are added up.
        """
        try:
            said = read_headroom(headroom)
        except Malformed:
            return
        for name, gauge in self._gauges.items():
            gauge.labels(*labelvalues).set(getattr(said, _field(name)))
        for name, counter in self._counters.items() if counts else ():
            self._count(counter.labels(*labelvalues), getattr(said, _field(name)), engine_idx, name)
        if said.asking is not None:
            self._set_asking(engine_idx, labelvalues, said.asking, counts=counts)

    def _set_asking(self, engine_idx: int, labelvalues: Any, said: AskingFigures, *, counts: bool) -> None:
        for field, gauge in self._asking:
            gauge.labels(*labelvalues).set(getattr(said, field))
        for field, counter in self._asked if counts else ():
            for label, total in getattr(said, field).items():
                self._count(counter.labels(*labelvalues, label.value), total, engine_idx, field, label)

    def _count(self, counter: Any, total: int, *key: Any) -> None:
        before = self._counted.get(key, 0)
        # Less than before: another engine answers there, which counts from 0.
        counter.inc(total - before if total >= before else total)
        self._counted[key] = total


class MovedBytes:
    """KV that transfers have moved, from a list of [transfer mode, memory path, bytes]."""

    def __init__(self, metrics: Any, labelnames: Any) -> None:
        self._counter = metrics._counter_cls(
            name="kvcached_nixl:moved_bytes",
            documentation="KV that this engine's transfers have moved, by transfer mode and memory path.",
            labelnames=[*labelnames, "direction", "path"],
        )

    def observe(self, labelvalues: Any, moved: Iterable[tuple[str, str, int]]) -> None:
        for direction, path, num_bytes in moved:
            self._counter.labels(*labelvalues, direction, path).inc(num_bytes)


class SlabMetrics:
    """The slab of each rank, from a list of [rank, bytes, slots, parked, sending, receiving, waiting, waits]."""

    def __init__(self, metrics: Any, labelnames: Any) -> None:
        def gauge(name: str, text: str, *more: str) -> Any:
            names = [*labelnames, "rank", *more]
            return metrics._gauge_cls(name=name, documentation=text, multiprocess_mode="mostrecent", labelnames=names)

        self._gauges = [gauge(*one) for one in _SLAB]
        self._used = gauge("kvcached_nixl:slab_used_slots", "Slots of a rank's slab that are taken, by use.", "use")
        self._waits = metrics._counter_cls(
            name="kvcached_nixl:slab_waits",
            documentation="How often a hand-over of a rank has begun to wait for slots.",
            labelnames=[*labelnames, "rank"],
        )

    def observe(self, labelvalues: Any, slabs: Iterable[list[int]]) -> None:
        for rank, num_bytes, num_slots, *used, waiting, waits in slabs:
            for gauge, value in zip(self._gauges, (num_bytes, num_slots, waiting), strict=True):
                gauge.labels(*labelvalues, str(rank)).set(value)
            for use, value in zip(_USES, used, strict=True):
                self._used.labels(*labelvalues, str(rank), use).set(value)
            self._waits.labels(*labelvalues, str(rank)).inc(waits)
