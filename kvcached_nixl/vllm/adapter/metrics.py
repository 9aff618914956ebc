# SPDX-License-Identifier: Apache-2.0
"""Our metrics beside vLLM's. Workers send them with a step's output to the API server, which exports them; what an
engine's side channel says (`HeadroomMetrics`, `say_kind`) is there of an idle engine, too.

Two classes are subclasses of vLLM's (``NixlKVConnectorStats``, ``NixlPromMetrics``). They are created once per process,
when vLLM can be imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import STATS_MODULE
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Kind
from kvcached_nixl.wire.headroom import AskingFigures, read_headroom
from kvcached_nixl.wire.timeline import Lasted, Reported, State

_FAILURES, _QUARANTINED = "kvcached_nixl_failures", "kvcached_nixl_quarantined_blocks"
_REVOKED = "kvcached_nixl_revoked_offers"
_MOVED, _SLABS = "kvcached_nixl_moved_bytes", "kvcached_nixl_slabs"
_TIMELINES, _LASTED = "kvcached_nixl_timelines", "kvcached_nixl_state_seconds"
_OURS = (_FAILURES, _QUARANTINED, _REVOKED, _MOVED, _SLABS, _TIMELINES, _LASTED)
"""Lists in vLLM's statistics, which are joined over ranks and steps."""
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds: from a READ within a host to the default of ``handover_timeout``."""
_KINDS = (  # in the order of `Kind`
    ("kvcached_nixl:compatibility_id", "versions, configuration and layout"),
    ("kvcached_nixl:checkpoint_id", "files that the weights were loaded from; 0 if not known"),
    ("kvcached_nixl:weights_id", "weights in memory; 0 if not known"),
)
_KIND = (
    "Identifies the {}. Engines hand over to each other if compatibility_id is equal, and checkpoint_id or weights_id "
    "is equal and not 0."
)


def stats(data: dict[str, Any] | None = None) -> Any:
    """An empty stats object, or one with the data that another process sent."""
    kind = _stats_class()
    return kind() if data is None else kind(data=data)


def prom_metrics(*args: Any) -> Any:
    """The Prometheus exporter; takes the arguments of vLLM's."""
    return _prom_class()(*args)


def record(account: Any, counted: Any) -> None:
    """Add a worker's counts (``worker.outcomes.WorkerCounters``) to ``account``, a stats object."""
    for num_bytes, descriptors, seconds in counted.moved:
        account.record_transfer(
            SimpleNamespace(xferDuration=seconds * 1e6, postDuration=0, totalBytes=num_bytes, descCount=descriptors)
        )
    for cause, count in counted.failures.items():
        for _ in range(count):
            account.record_failed_transfer()
            account.data[_FAILURES].append(int(cause))
    for _ in range(counted.expired):
        account.record_kv_expired_req()
    account.data[_REVOKED] += counted.revoked.elements()
    account.data[_TIMELINES] += counted.timelines
    account.data[_LASTED] += map(list, counted.lasted)
    if counted.quarantined_blocks is not None:
        account.data[_QUARANTINED].append(counted.quarantined_blocks)
    if counted.moved_bytes is not None:
        account.data[_MOVED].append([*counted.route, counted.moved_bytes])
    if counted.slab is not None:
        rank, use = counted.slab
        account.data[_SLABS].append([rank, *use, counted.slab_waits])


def take_timelines(account: Any) -> list[Reported]:
    """Remove the timelines of ranks from an engine's stats and return them.

    Args:
        account: ``KVConnectorOutput.kv_connector_stats``; a ``MultiConnector`` has one for each of its connectors.
    """
    return [line for one in _all_data_of(account) for line in one.pop(_TIMELINES, ())]


def add_lasted(account: Any, lasted: Iterable[Lasted]) -> None:
    """Add times in states to the engine's stats that `take_timelines` has found timelines in."""
    found = next((one for one in _all_data_of(account) if _LASTED in one), None)
    if found is not None:
        found[_LASTED] += map(list, lasted)


def _all_data_of(account: Any) -> list[dict[str, Any]]:
    data = _data_of(account)
    return [data, *map(_data_of, data.values())]


def _data_of(account: Any) -> dict[str, Any]:
    # Any connector's stats come by here, in the engine's loop: nothing is imported to tell whose they are.
    data = optional(account, "data")
    return data if isinstance(data, dict) else {}


def _unregister() -> None:
    """Remove our metrics of before: vLLM makes its logger anew when it scales, and removes its own metrics only."""
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        if any(name.startswith("kvcached_nixl:") for name in REGISTRY._collector_to_names[collector]):
            REGISTRY.unregister(collector)


@functools.cache
def _stats_class() -> Any:
    stock = private(importlib.import_module(STATS_MODULE), "NixlKVConnectorStats")

    class HandOverStats(stock):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> tuple[Any, ...]:
            # A worker sends it to its engine, where this class is a different object.
            return stats, (self.data,)

        def reset(self) -> None:
            super().reset()
            self.data.update({name: [] for name in _OURS})

        def is_empty(self) -> bool:
            return bool(super().is_empty() and not any(map(self.data.get, _OURS)))

    return HandOverStats


@dataclass(frozen=True)
class _Maker:
    """Makes metrics with the classes of vLLM's exporter."""

    exporter: Any
    labelnames: Any

    def gauge(self, name: str, text: str, *labels: str) -> Any:
        return self.exporter._gauge_cls(
            name=name,
            documentation=text,
            multiprocess_mode="mostrecent",
            labelnames=[*self.labelnames, *labels],
        )

    def counter(self, name: str, text: str, *labels: str) -> Any:
        return self.exporter._counter_cls(name=name, documentation=text, labelnames=[*self.labelnames, *labels])


def _count(counter: Any, labelvalues: Any, causes: Any, counted: Iterable[int], by: int = 1) -> None:
    for cause in counted:
        counter.labels(*labelvalues, causes(cause).label).inc(by)


def _count_bytes(counter: Any, labelvalues: Any, moved: Iterable[tuple[str, str, int]]) -> None:
    for direction, path, num_bytes in moved:
        counter.labels(*labelvalues, direction, path).inc(num_bytes)


@functools.cache
def _prom_class() -> Any:
    stock = private(importlib.import_module(STATS_MODULE), "NixlPromMetrics")

    class HandOverPromMetrics(stock):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
            _unregister()
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            self._labelvalues = per_engine_labelvalues
            make = _Maker(self, labelnames)
            self._failures = make.counter(
                "kvcached_nixl:handover_failures",
                "Hand-overs that brought no KV, by cause; their requests failed or were recomputed.",
                "cause",
            )
            self._revoked = make.counter(
                "kvcached_nixl:revoked_offers",
                "Offers that prefill has taken back before decode had fetched them, by cause.",
                "cause",
            )
            self._quarantined = make.gauge(
                "kvcached_nixl:quarantined_blocks",
                "Blocks that are held because a peer may still have transfers in flight.",
            )
            for values in per_engine_labelvalues.values():
                self._quarantined.labels(*values).set(0)
                # From 0 on: Prometheus sees no rise where a counter appears with its first count.
                _count(self._failures, values, FailureCause, FailureCause, by=0)
                _count(self._revoked, values, RevocationCause, RevocationCause, by=0)
            self._states = self._histogram_cls(
                name="kvcached_nixl:handover_state_seconds",
                documentation="How long hand-overs were in each state. The states of one side add up to the whole.",
                buckets=list(_BUCKETS),
                labelnames=[*labelnames, "direction", "state"],
            )
            self._kinds = [make.gauge(name, _KIND.format(what)) for name, what in _KINDS]
            self._moved = make.counter(
                "kvcached_nixl:moved_bytes",
                "KV that this engine's transfers have moved, by transfer mode and memory path.",
                "direction",
                "path",
            )
            self._headroom, self._slabs = HeadroomMetrics(make), SlabMetrics(make)
            self.counts_engines = True

        def say_headroom(self, engine_idx: int, headroom: bytes) -> None:
            """What an engine could take now. Called on a thread of its own, every two seconds."""
            self._headroom.set(engine_idx, self._labelvalues[engine_idx], headroom, counts=self.counts_engines)

        def say_kind(self, engine_idx: int, answers: list[tuple[str, bytes]]) -> None:
            """An engine's side channel gives other answers than before. Called on a thread of its own."""
            try:
                kind = Kind.of(answers)
            except Malformed:
                # Another program answers there; the engine has refused to start then.
                return
            for gauge, value in zip(self._kinds, kind, strict=True):
                gauge.labels(*self._labelvalues[engine_idx]).set(value)

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            super().observe(transfer_stats_data, engine_idx)
            values = self._labelvalues[engine_idx]
            _count(self._failures, values, FailureCause, transfer_stats_data.get(_FAILURES, ()))
            _count(self._revoked, values, RevocationCause, transfer_stats_data.get(_REVOKED, ()))
            for state, is_push, seconds in transfer_stats_data.get(_LASTED, ()):
                direction = "push" if is_push else "pull"
                self._states.labels(*values, direction, State(state).label).observe(seconds)
            for blocks in transfer_stats_data.get(_QUARANTINED, ())[-1:]:
                self._quarantined.labels(*values).set(blocks)
            _count_bytes(self._moved, values, transfer_stats_data.get(_MOVED, ()))
            self._slabs.observe(values, transfer_stats_data.get(_SLABS, ()))

    return HandOverPromMetrics


# -------------------------------------------------------------------------------------------------------------- memory

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
    """What an engine's side channel says. Set on a thread of its own."""

    def __init__(self, make: _Maker) -> None:
        self._gauges = {name: make.gauge(name, text) for name, text in _GAUGES}
        self._counters = {name: make.counter(name, text) for name, text in _TOTALS}
        self._asking = [(field, make.gauge(name, text)) for name, field, text in _ASKING]
        self._asked = [(field, make.counter(name, text, label)) for name, field, label, text in _ASKED]
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


class SlabMetrics:
    """The slab of each rank, from a list of [rank, bytes, slots, parked, sending, receiving, waiting, waits]."""

    def __init__(self, make: _Maker) -> None:
        self._gauges = [make.gauge(name, text, "rank") for name, text in _SLAB]
        self._used = make.gauge(
            "kvcached_nixl:slab_used_slots", "Slots of a rank's slab that are taken, by use.", "rank", "use"
        )
        self._waits = make.counter(
            "kvcached_nixl:slab_waits", "How often a hand-over of a rank has begun to wait for slots.", "rank"
        )

    def observe(self, labelvalues: Any, slabs: Iterable[list[int]]) -> None:
        for rank, num_bytes, num_slots, *used, waiting, waits in slabs:
            for gauge, value in zip(self._gauges, (num_bytes, num_slots, waiting), strict=True):
                gauge.labels(*labelvalues, str(rank)).set(value)
            for use, value in zip(_USES, used, strict=True):
                self._used.labels(*labelvalues, str(rank), use).set(value)
            self._waits.labels(*labelvalues, str(rank)).inc(waits)
