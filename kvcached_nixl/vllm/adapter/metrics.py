# SPDX-License-Identifier: Apache-2.0
"""Our metrics beside vLLM's. Workers send them with a step's output to the API server, which exports them.

    kvcached_nixl:handover_failures_total{cause}   hand-overs that brought no KV
    kvcached_nixl:revoked_offers_total{cause}      offers that prefill has taken back
    kvcached_nixl:handover_state_seconds{direction, state}
                                                   how long hand-overs were in each state (`wire.timeline`)
    kvcached_nixl:quarantined_blocks               blocks held for transfers that may still be in flight
    kvcached_nixl:compatibility_id, checkpoint_id, weights_id
                                                   what this engine's handshake compares (`wire.kind`)

`adapter.memory_metrics` has those of memory. Both classes are subclasses of vLLM's (``NixlKVConnectorStats``,
``NixlPromMetrics``). They are created once per process, when vLLM can be imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import STATS_MODULE
from kvcached_nixl.vllm.adapter.memory_metrics import HeadroomMetrics, MovedBytes, SlabMetrics
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.kind import Kind
from kvcached_nixl.wire.timeline import Lasted, Reported, State

_FAILURES, _QUARANTINED = "kvcached_nixl_failures", "kvcached_nixl_quarantined_blocks"
_REASONS, _REVOKED = "kvcached_nixl_failure_reasons", "kvcached_nixl_revoked_offers"
_MOVED, _SLABS = "kvcached_nixl_moved_bytes", "kvcached_nixl_slabs"
_TIMELINES, _LASTED = "kvcached_nixl_timelines", "kvcached_nixl_state_seconds"
_OURS = (_FAILURES, _QUARANTINED, _REASONS, _REVOKED, _MOVED, _SLABS, _TIMELINES, _LASTED)
"""Lists in vLLM's statistics, which are joined over ranks and steps."""
MAX_REASON = 1000
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds: from a READ within a host to the default of ``handover_timeout``."""
_KINDS = (  # in the order of `Kind`
    ("kvcached_nixl:compatibility_id", "versions, configuration and layout"),
    ("kvcached_nixl:checkpoint_id", "files that the weights were loaded from; 0 if not known"),
    ("kvcached_nixl:weights_id", "weights in memory; 0 if not known"),
)


def stats(data: dict[str, Any] | None = None) -> Any:
    """An empty stats object, or one with the data that another process sent."""
    kind = _stats_class()
    return kind() if data is None else kind(data=data)


def prom_metrics(*args: Any) -> Any:
    """The Prometheus exporter; takes the arguments of vLLM's."""
    return _prom_class()(*args)


def record(account: Any, counted: Any) -> None:
    """Add a worker's counts (``worker.facade.WorkerCounters``) to ``account``, a stats object."""
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
    account.data[_REASONS] += [[attempt, reason[:MAX_REASON]] for attempt, reason in counted.reasons]
    account.data[_TIMELINES] += counted.timelines
    account.data[_LASTED] += map(list, counted.lasted)
    if counted.quarantined_blocks is not None:
        account.data[_QUARANTINED].append(counted.quarantined_blocks)
    if counted.moved_bytes is not None:
        account.data[_MOVED].append([*counted.route, counted.moved_bytes])
    if counted.slab is not None:
        rank, use = counted.slab
        account.data[_SLABS].append([rank, *use, counted.slab_waits])


def take_reasons(account: Any) -> dict[int, str]:
    """Remove the reasons of failed attempts from an engine's stats and return them, for its log instead of its metrics.

    Args:
        account: ``KVConnectorOutput.kv_connector_stats``; a ``MultiConnector`` has one for each of its connectors.
    """
    found: dict[int, str] = {}
    data = _data_of(account)
    for one in (data, *map(_data_of, data.values())):
        for attempt, reason in one.pop(_REASONS, ()):
            found.setdefault(attempt, reason)
    return found


def take_timelines(account: Any) -> list[Reported]:
    """Remove the timelines of ranks from an engine's stats and return them. Args as in `take_reasons`."""
    data = _data_of(account)
    return [line for one in (data, *map(_data_of, data.values())) for line in one.pop(_TIMELINES, ())]


def add_lasted(account: Any, lasted: Iterable[Lasted]) -> None:
    """Add times in states to the engine's stats that `take_timelines` has found timelines in."""
    data = _data_of(account)
    found = next((one for one in (data, *map(_data_of, data.values())) if _LASTED in one), None)
    if found is not None:
        found[_LASTED] += map(list, lasted)


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


def _count(counter: Any, labelvalues: Any, causes: Any, counted: Iterable[int]) -> None:
    for cause in counted:
        counter.labels(*labelvalues, causes(cause).label).inc()


def _count_from_0(counter: Any, labelvalues: Any, causes: Iterable[Any]) -> None:
    for cause in causes:
        counter.labels(*labelvalues, cause.label).inc(0)


def _kind_gauges(gauge_class: Any, labelnames: Any) -> list[Any]:
    return [
        gauge_class(
            name=name,
            documentation=f"Identifies the {what}. Engines hand over to each other if compatibility_id is equal, and "
            "checkpoint_id or weights_id is equal and not 0.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        for name, what in _KINDS
    ]


@functools.cache
def _prom_class() -> Any:
    stock = private(importlib.import_module(STATS_MODULE), "NixlPromMetrics")

    class HandOverPromMetrics(stock):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
            _unregister()
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            self._labelvalues = per_engine_labelvalues
            self._failures = self._counter_cls(
                name="kvcached_nixl:handover_failures",
                documentation="Hand-overs that brought no KV, by cause; their requests failed or were recomputed.",
                labelnames=[*labelnames, "cause"],
            )
            self._revoked = self._counter_cls(
                name="kvcached_nixl:revoked_offers",
                documentation="Offers that prefill has taken back before decode had fetched them, by cause.",
                labelnames=[*labelnames, "cause"],
            )
            self._quarantined = self._gauge_cls(
                name="kvcached_nixl:quarantined_blocks",
                documentation="Blocks that are held because a peer may still have transfers in flight.",
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
            for values in per_engine_labelvalues.values():
                self._quarantined.labels(*values).set(0)
                # From 0 on: Prometheus sees no rise where a counter appears with its first count.
                _count_from_0(self._failures, values, FailureCause)
                _count_from_0(self._revoked, values, RevocationCause)
            self._states = self._histogram_cls(
                name="kvcached_nixl:handover_state_seconds",
                documentation="How long hand-overs were in each state. The states of one side add up to the whole.",
                buckets=list(_BUCKETS),
                labelnames=[*labelnames, "direction", "state"],
            )
            self._kinds = _kind_gauges(self._gauge_cls, labelnames)
            self._headroom = HeadroomMetrics(self, labelnames)
            self._moved, self._slabs = MovedBytes(self, labelnames), SlabMetrics(self, labelnames)
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
            self._moved.observe(values, transfer_stats_data.get(_MOVED, ()))
            self._slabs.observe(values, transfer_stats_data.get(_SLABS, ()))

    return HandOverPromMetrics
