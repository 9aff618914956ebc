# SPDX-License-Identifier: Apache-2.0
"""Our metrics beside vLLM's. Workers send them with a step's output to the API server, which exports them.

    kvcached_nixl:handover_failures_total{cause}   hand-overs that brought no KV
    kvcached_nixl:revoked_offers_total{cause}      offers that prefill has taken back
    kvcached_nixl:quarantined_blocks               blocks held for transfers that may still be in flight
    kvcached_nixl:free_tokens, used_tokens, queued_tokens, kept_offers, kept_tokens, free_bytes
                                                   what this engine could take now (`wire.headroom`)
    kvcached_nixl:compatibility_id, checkpoint_id, weights_id
                                                   what this engine's handshake compares (`wire.kind`)

Both classes are subclasses of vLLM's (``NixlKVConnectorStats``, ``NixlPromMetrics``). They are created once per
process, when vLLM can be imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvcached_nixl.compat.locate import STATS_MODULES
from kvcached_nixl.compat.private import first_module, optional, private
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.headroom import read_headroom
from kvcached_nixl.wire.kind import Kind

__all__ = ["prom_metrics", "record", "stats", "take_reasons"]

_FAILURES, _QUARANTINED = "kvcached_nixl_failures", "kvcached_nixl_quarantined_blocks"
_REASONS, _REVOKED = "kvcached_nixl_failure_reasons", "kvcached_nixl_revoked_offers"
MAX_REASON = 1000
_HEADROOM = (
    (
        "kvcached_nixl:free_tokens",
        "Tokens of KV that the engine could take now: of its pool, and of the device's memory.",
    ),
    ("kvcached_nixl:used_tokens", "Tokens of KV in blocks that requests have, or that are kept or held for peers."),
    ("kvcached_nixl:queued_tokens", "Tokens of the prompts of requests that have no blocks yet."),
    ("kvcached_nixl:kept_offers", "Requests of prefill whose KV is kept until decode has fetched it."),
    ("kvcached_nixl:kept_tokens", "Tokens of KV of kept offers; part of used_tokens."),
    ("kvcached_nixl:free_bytes", "Memory of the device that kvcached could map now."),
)
"""Gauge and help text of each field of `Headroom`."""
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
    if counted.quarantined_blocks is not None:
        account.data[_QUARANTINED].append(counted.quarantined_blocks)


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
    stock = private(first_module(STATS_MODULES), "NixlKVConnectorStats")

    class HandOverStats(stock):  # type: ignore[misc, valid-type]
        def __reduce__(self) -> tuple[Any, ...]:
            # A worker sends it to its engine, where this class is a different object.
            return stats, (self.data,)

        def reset(self) -> None:
            super().reset()
            self.data[_FAILURES] = []
            self.data[_QUARANTINED] = []
            self.data[_REASONS] = []
            self.data[_REVOKED] = []

        def is_empty(self) -> bool:
            ours = (_FAILURES, _QUARANTINED, _REASONS, _REVOKED)
            return bool(super().is_empty() and not any(self.data.get(key) for key in ours))

    return HandOverStats


def _count(counter: Any, labelvalues: Any, causes: Any, counted: Iterable[int]) -> None:
    for cause in counted:
        counter.labels(*labelvalues, causes(cause).label).inc()


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


class _HeadroomGauges:
    def __init__(self, gauge_class: Any, labelnames: Any) -> None:
        self._gauges = {
            name: gauge_class(name=name, documentation=text, multiprocess_mode="mostrecent", labelnames=labelnames)
            for name, text in _HEADROOM
        }

    def set(self, labelvalues: Any, headroom: bytes) -> None:
        try:
            said = read_headroom(headroom)
        except Malformed:
            return
        for name, gauge in self._gauges.items():
            gauge.labels(*labelvalues).set(getattr(said, name.partition(":")[2]))


@functools.cache
def _prom_class() -> Any:
    stock = private(first_module(STATS_MODULES), "NixlPromMetrics")

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
            self._kinds = _kind_gauges(self._gauge_cls, labelnames)
            self._headroom = _HeadroomGauges(self._gauge_cls, labelnames)

        def say_headroom(self, engine_idx: int, headroom: bytes) -> None:
            """What an engine could take now. Called on a thread of its own, every two seconds."""
            self._headroom.set(self._labelvalues[engine_idx], headroom)

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
            for blocks in transfer_stats_data.get(_QUARANTINED, ())[-1:]:
                self._quarantined.labels(*values).set(blocks)

    return HandOverPromMetrics
