# SPDX-License-Identifier: Apache-2.0
"""Our metrics beside vLLM's. Workers send what happens with a step's output to the API server, which exports it. The
side channel says what an engine is and could take now, also of an idle one, which takes no step.

Two classes are subclasses of vLLM's (``NixlKVConnectorStats``, ``NixlPromMetrics``). They are created once per process,
when vLLM can be imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec

from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import STATS_MODULE
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Kind
from kvcached_nixl.wire.headroom import read_headroom
from kvcached_nixl.wire.timeline import Lasted, Reported, State

_PREFIX = "kvcached_nixl:"
_FAILURES, _QUARANTINED = "kvcached_nixl_failures", "kvcached_nixl_quarantined_blocks"
_REVOKED = "kvcached_nixl_revoked_offers"
_MOVED, _SLABS = "kvcached_nixl_moved_bytes", "kvcached_nixl_slabs"
_TIMELINES, _LASTED = "kvcached_nixl_timelines", "kvcached_nixl_state_seconds"
_OURS = (_FAILURES, _QUARANTINED, _REVOKED, _MOVED, _SLABS, _TIMELINES, _LASTED)
"""Lists in vLLM's statistics, which are joined over ranks and steps."""
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds: from a READ within a host to the default of ``handover_timeout``."""
_KINDS = ("compatibility_id", "checkpoint_id", "weights_id")
"""In the order of `Kind`."""
_USES = ("parked", "sending", "receiving")
_IDENTIFIES = (
    "Identifies the {}. Engines hand over to each other if compatibility_id is equal, and checkpoint_id or weights_id "
    "is equal and not 0."
)
GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "quarantined_blocks": "Blocks that are held because a peer may still have transfers in flight.",
        "free_tokens": "Tokens of KV that the engine could take now: of its pool, and of the device's memory.",
        "used_tokens": "Tokens of KV in blocks that requests have, or that are kept or held for peers.",
        "queued_tokens": "Tokens of the prompts of requests that have no blocks yet.",
        "kept_offers": "Requests of prefill whose KV is kept until decode has fetched it.",
        "kept_tokens": "Tokens of KV of kept offers; part of used_tokens.",
        "free_bytes": "Memory of the device that kvcached could map now.",
        "mapped_bytes": "Memory of the device that kvcached has mapped for KV, with its reserve.",
        "waiting_fetches": "Requests of decode whose KV has not arrived.",
        "oldest_fetch_seconds": "How long the first request that has blocks has waited for its KV; 0 without one.",
        "oldest_offer_seconds": "Since prefill has kept the oldest offer; 0 if it keeps none.",
        "held_requests": "Requests of decode that no prefill server is asked for yet.",
        "asked_requests": "Requests of decode that wait for the answer of a prefill server.",
        "promised_blocks": "Blocks that decode counts on for requests which it has asked for, and which have none yet.",
        "slab_bytes": "Memory of a rank's slab, through which KV is staged.",
        "slab_slots": "Slots of a rank's slab.",
        "slab_used_slots": "Slots of a rank's slab that are taken, by use.",
        "slab_waiting": "Hand-overs of a rank that wait for slots now.",
        "compatibility_id": _IDENTIFIES.format("versions, configuration and layout"),
        "checkpoint_id": _IDENTIFIES.format("files that the weights were loaded from; 0 if not known"),
        "weights_id": _IDENTIFIES.format("weights in memory; 0 if not known"),
    }
)
"""Name -> help text. As for the counters, those of `Headroom` have the names of its fields."""
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "handover_failures": "Hand-overs that brought no KV, by cause; their requests failed or were recomputed.",
        "revoked_offers": "Offers that prefill has taken back before decode had fetched them, by cause.",
        "moved_bytes": "KV that this engine's transfers have moved, by transfer mode and memory path.",
        "map_bytes": "Memory of the device that kvcached has mapped for KV since the start, at least.",
        "unmap_bytes": "Memory of the device that kvcached has given back since the start, at least.",
        "questions": "Questions to prefill servers that have ended, by outcome.",
        "computed_prompts": "Prompts that decode computes itself, by reason.",
        "slab_waits": "How often a hand-over of a rank has begun to wait for slots.",
    }
)
_LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "slab_bytes": ("rank",),
        "slab_slots": ("rank",),
        "slab_used_slots": ("rank", "use"),
        "slab_waiting": ("rank",),
        "handover_failures": ("cause",),
        "revoked_offers": ("cause",),
        "moved_bytes": ("direction", "path"),
        "questions": ("outcome",),
        "computed_prompts": ("reason",),
        "slab_waits": ("rank",),
    }
)
"""Of those that have some beside vLLM's."""


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
    """Remove the timelines of ranks from an engine's stats (``KVConnectorOutput.kv_connector_stats``)."""
    return [line for one in _all_data_of(account) for line in one.pop(_TIMELINES, ())]


def add_lasted(account: Any, lasted: Iterable[Lasted]) -> None:
    """Add times in states to the engine's stats that `take_timelines` has found timelines in."""
    found = next((one for one in _all_data_of(account) if _LASTED in one), None)
    if found is not None:
        found[_LASTED] += map(list, lasted)


def _all_data_of(account: Any) -> list[dict[str, Any]]:
    # Any connector's stats come by here, in the engine's loop: nothing is imported to tell whose they are. Those of a
    # ``MultiConnector`` have some for each of its connectors.
    data = optional(account, "data")
    found = [data, *(optional(one, "data") for one in data.values())] if isinstance(data, dict) else []
    return [one for one in found if isinstance(one, dict)]


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


@functools.cache
def _prom_class() -> Any:
    from prometheus_client import REGISTRY

    stock = private(importlib.import_module(STATS_MODULE), "NixlPromMetrics")

    class HandOverPromMetrics(stock):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
            # vLLM makes its logger anew when it scales, and removes its own metrics only.
            for collector in list(REGISTRY._collector_to_names):
                if any(name.startswith(_PREFIX) for name in REGISTRY._collector_to_names[collector]):
                    REGISTRY.unregister(collector)
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            self.of_engines = EngineMetrics(self, labelnames, per_engine_labelvalues)

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            super().observe(transfer_stats_data, engine_idx)
            self.of_engines.observe(transfer_stats_data, engine_idx)

    return HandOverPromMetrics


def _made(table: Mapping[str, str], make: Any, labelnames: Any, **options: str) -> dict[str, Any]:
    return {
        name: make(name=_PREFIX + name, documentation=text, labelnames=[*labelnames, *_LABELS.get(name, ())], **options)
        for name, text in table.items()
    }


class EngineMetrics:
    """All of ours in an API server, made with the classes of vLLM's exporter.

    Attributes:
        counts_engines: whether totals of the engines are counted here. In one process only: the counters of several API
            servers are added up.
    """

    def __init__(self, exporter: Any, labelnames: Any, labelvalues: Any) -> None:
        self._labelvalues = labelvalues
        self._gauges = _made(GAUGES, exporter._gauge_cls, labelnames, multiprocess_mode="mostrecent")
        self._counters = _made(COUNTERS, exporter._counter_cls, labelnames)
        self._states = exporter._histogram_cls(
            name=f"{_PREFIX}handover_state_seconds",
            documentation="How long hand-overs were in each state. The states of one side add up to the whole.",
            buckets=list(_BUCKETS),
            labelnames=[*labelnames, "direction", "state"],
        )
        self._totals: dict[tuple[Any, ...], int] = {}
        self.counts_engines = True
        for engine_idx in labelvalues:
            self._set("quarantined_blocks", engine_idx, 0)
            # From 0 on: Prometheus sees no rise where a counter appears with its first count.
            self._count_causes(engine_idx, FailureCause, RevocationCause, by=0)

    def say_headroom(self, engine_idx: int, headroom: bytes) -> None:
        """What an engine could take now. Called on a thread of its own, every two seconds."""
        try:
            said = read_headroom(headroom)
        except Malformed:
            return
        figures = msgspec.structs.asdict(said)
        del figures["asking"]
        for name, number in figures.items():
            if name in self._counters:
                self._count_rise(name, engine_idx, number)
            else:
                self._set(name, engine_idx, number)
        if said.asking is not None:
            self._set("held_requests", engine_idx, said.asking.held)
            self._set("asked_requests", engine_idx, said.asking.asked)
            self._set("promised_blocks", engine_idx, said.asking.promised_blocks)
            for outcome, total in said.asking.ended.items():
                self._count_rise("questions", engine_idx, total, outcome.value)
            for reason, total in said.asking.computed.items():
                self._count_rise("computed_prompts", engine_idx, total, reason.value)

    def say_kind(self, engine_idx: int, answers: list[tuple[str, bytes]]) -> None:
        """An engine's side channel gives other answers than before. Called on a thread of its own."""
        try:
            kind = Kind.of(answers)
        except Malformed:
            # Another program answers there; the engine has refused to start then.
            return
        for name, value in zip(_KINDS, kind, strict=True):
            self._set(name, engine_idx, value)

    def observe(self, data: Mapping[str, Any], engine_idx: int) -> None:
        failures, quarantined, revoked, moved, slabs, lasted = (
            data.get(name, ()) for name in (_FAILURES, _QUARANTINED, _REVOKED, _MOVED, _SLABS, _LASTED)
        )
        self._count_causes(engine_idx, failures, revoked)
        for state, is_push, seconds in lasted:
            labels = "push" if is_push else "pull", State(state).label
            self._states.labels(*self._labelvalues[engine_idx], *labels).observe(seconds)
        for blocks in quarantined[-1:]:
            self._set("quarantined_blocks", engine_idx, blocks)
        for *route, num_bytes in moved:
            self._count("moved_bytes", engine_idx, num_bytes, *route)
        for rank, num_bytes, num_slots, *used, waiting, waits in slabs:
            self._set("slab_bytes", engine_idx, num_bytes, str(rank))
            self._set("slab_slots", engine_idx, num_slots, str(rank))
            for use, value in zip(_USES, used, strict=True):
                self._set("slab_used_slots", engine_idx, value, str(rank), use)
            self._set("slab_waiting", engine_idx, waiting, str(rank))
            self._count("slab_waits", engine_idx, waits, str(rank))

    def _count_causes(self, engine_idx: int, failures: Iterable[int], revoked: Iterable[int], by: int = 1) -> None:
        for cause in failures:
            self._count("handover_failures", engine_idx, by, FailureCause(cause).label)
        for cause in revoked:
            self._count("revoked_offers", engine_idx, by, RevocationCause(cause).label)

    def _set(self, name: str, engine_idx: int, value: float, *labels: str) -> None:
        self._gauges[name].labels(*self._labelvalues[engine_idx], *labels).set(value)

    def _count(self, name: str, engine_idx: int, number: int, *labels: str) -> None:
        self._counters[name].labels(*self._labelvalues[engine_idx], *labels).inc(number)

    def _count_rise(self, name: str, engine_idx: int, total: int, *labels: str) -> None:
        """Count what has been added to an engine's own total since the last call."""
        if not self.counts_engines:
            return
        key = name, engine_idx, *labels
        before = self._totals.get(key, 0)
        # Less than before: another engine answers there, which counts from 0.
        self._count(name, engine_idx, total - before if total >= before else total, *labels)
        self._totals[key] = total
