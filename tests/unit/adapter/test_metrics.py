# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.metrics` with stand-ins for vLLM's classes: from a worker to what Prometheus shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.vllm.adapter.locate import STATS_MODULE
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.headroom import AskingFigures, Computed, Ended, Headroom, encode_headroom
from kvcached_nixl.wire.timeline import State
from kvcached_nixl.worker.outcomes import WorkerCounters
from kvcached_nixl.worker.transfer.slab import SlabUse

STOCK = '''
from dataclasses import dataclass, field


@dataclass
class NixlKVConnectorStats:
    """As vLLM's: lists of numbers by name, which processes add up."""

    data: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.data:
            self.reset()

    def reset(self):
        names = "transfer_duration", "bytes_transferred", "num_descriptors", "failed", "expired"
        self.data = {name: [] for name in names}

    def record_transfer(self, res):
        self.data["transfer_duration"].append(res.xferDuration / 1e6)
        self.data["bytes_transferred"].append(res.totalBytes)
        self.data["num_descriptors"].append(res.descCount)

    def record_failed_transfer(self):
        self.data["failed"].append(1)

    def record_kv_expired_req(self):
        self.data["expired"].append(1)

    def is_empty(self):
        return not any(self.data[name] for name in ("transfer_duration", "failed", "expired"))

    def aggregate(self, other):
        if not other.is_empty():
            for name, numbers in other.data.items():
                self.data[name].extend(numbers)
        return self


class Metric:
    made = {}

    def __init__(self, name, documentation, labelnames, multiprocess_mode=None, buckets=None):
        self.labelnames, self.values, self.key = list(labelnames), {}, None
        Metric.made[name] = self

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        self.key = values
        return self

    def inc(self, amount=1):
        self.values[self.key] = self.values.get(self.key, 0) + amount

    def set(self, value):
        self.values[self.key] = value

    def observe(self, value):
        self.values.setdefault(self.key, []).append(value)


class NixlPromMetrics:
    _counter_cls = _gauge_cls = _histogram_cls = Metric

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.observed = []

    def observe(self, transfer_stats_data, engine_idx=0):
        self.observed.append((transfer_stats_data, engine_idx))
'''


def forget_classes() -> None:
    """As in another process, which has not made its classes yet."""
    metrics._stats_class.cache_clear()
    metrics._prom_class.cache_clear()


@pytest.fixture
def stock(make_module: Callable[..., ModuleType]) -> Iterator[ModuleType]:
    forget_classes()
    yield make_module(STATS_MODULE, STOCK)
    forget_classes()


def counted(**fields: Any) -> WorkerCounters:
    made = WorkerCounters()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.usefixtures("stock")
def test_what_a_worker_has_counted_is_in_vllms_account() -> None:
    account = metrics.stats()
    assert account.is_empty()
    metrics.record(account, counted())
    assert account.is_empty()
    made = counted(moved=[(64, 2, 0.5), (8, 1, 0.25)], expired=2, quarantined_blocks=3)
    made.route, made.moved_bytes = ("push", "host"), 72
    made.slab, made.slab_waits = (1, SlabUse(1024, 8, 1, 2, 3, 4)), 5
    made.failures.update({FailureCause.LEASE: 2, FailureCause.DIGEST: 1})
    metrics.record(account, made)
    assert not account.is_empty()
    assert account.data == {
        "transfer_duration": [0.5, 0.25],
        "bytes_transferred": [64, 8],
        "num_descriptors": [2, 1],
        "failed": [1, 1, 1],
        "expired": [1, 1],
        "kvcached_nixl_failures": [FailureCause.LEASE, FailureCause.LEASE, FailureCause.DIGEST],
        "kvcached_nixl_quarantined_blocks": [3],
        "kvcached_nixl_revoked_offers": [],
        "kvcached_nixl_moved_bytes": [["push", "host", 72]],
        "kvcached_nixl_slabs": [[1, 1024, 8, 1, 2, 3, 4, 5]],
        "kvcached_nixl_timelines": [],
        "kvcached_nixl_state_seconds": [],
    }
    assert all(type(cause) is int for cause in account.data["kvcached_nixl_failures"]), "they go through msgpack"


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    "made",
    [
        counted(failures=Counter({FailureCause.LEASE: 1})),
        counted(quarantined_blocks=0),
        counted(moved_bytes=0),
        counted(slab=(0, SlabUse(1024, 8, 0, 0, 0, 0))),
    ],
    ids=["failures", "quarantined_blocks", "moved_bytes", "slab"],
)
def test_each_is_enough_to_be_told(made: WorkerCounters) -> None:
    """Also that nothing is in quarantine or in the slab any more."""
    account = metrics.stats()
    metrics.record(account, made)
    assert not account.is_empty()
    account.reset()
    assert account.is_empty()


def test_the_api_server_shows_failures_by_cause_and_the_last_of_the_blocks(stock: ModuleType) -> None:
    shown = metrics.prom_metrics("config", "types", ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    failures = stock.Metric.made["kvcached_nixl:handover_failures"]
    blocks = stock.Metric.made["kvcached_nixl:quarantined_blocks"]
    assert failures.labelnames == ["model", "engine", "cause"]
    assert blocks.values == {("m", "0"): 0, ("m", "1"): 0}, "there before anything has happened"
    data = {
        "kvcached_nixl_failures": [FailureCause.LEASE, FailureCause.LEASE, 2],
        "kvcached_nixl_quarantined_blocks": [7, 3],
    }
    shown.observe(data, 1)
    assert set(failures.values) == {("m", engine, cause.label) for engine in "01" for cause in FailureCause}, (
        "from 0 on"
    )
    assert {key: value for key, value in failures.values.items() if value} == {
        ("m", "1", "lease"): 2,
        ("m", "1", "digest"): 1,
    }
    assert blocks.values == {("m", "0"): 0, ("m", "1"): 3}
    shown.observe({}, 1)
    shown.observe({"kvcached_nixl_failures": [], "kvcached_nixl_quarantined_blocks": [0]})
    assert blocks.values == {("m", "0"): 0, ("m", "1"): 3}
    assert shown.observed[0] == (data, 1), "vLLM's own are shown as ever"


def test_the_api_server_shows_bytes_by_route_and_each_ranks_slab(stock: ModuleType) -> None:
    """Of gauges the last one, of counters the sum."""
    shown = metrics.prom_metrics("config", "types", ["model", "engine"], {0: ["m", "0"]})
    slabs = [[0, 1024, 8, 1, 2, 3, 4, 5], [1, 1024, 8, 0, 0, 0, 0, 0], [0, 1024, 8, 0, 0, 1, 0, 1]]
    moved = [["pull", "direct", 0], ["pull", "direct", 72], ["push", "host", 8]]
    shown.observe({"kvcached_nixl_slabs": slabs, "kvcached_nixl_moved_bytes": moved})
    made = {name.partition(":")[2]: metric.values for name, metric in stock.Metric.made.items()}
    assert made["moved_bytes"] == {("m", "0", "pull", "direct"): 72, ("m", "0", "push", "host"): 8}
    assert made["slab_bytes"] == {("m", "0", "0"): 1024, ("m", "0", "1"): 1024}
    assert made["slab_slots"] == {("m", "0", "0"): 8, ("m", "0", "1"): 8}
    assert made["slab_waiting"] == {("m", "0", "0"): 0, ("m", "0", "1"): 0}
    assert made["slab_waits"] == {("m", "0", "0"): 6, ("m", "0", "1"): 0}
    assert made["slab_used_slots"] == {
        ("m", "0", rank, use): int((rank, use) == ("0", "receiving"))
        for rank in "01"
        for use in ("parked", "sending", "receiving")
    }


@pytest.mark.parametrize("counts", [True, False])
def test_an_engines_totals_are_shown_as_rises_by_one_process(stock: ModuleType, counts: bool) -> None:
    """Prometheus' library adds up the counters of several API servers, and each of them asks the engine."""
    shown = metrics.prom_metrics("config", "types", ["model", "engine"], {0: ["m", "0"]})
    shown.of_engines.counts_engines = counts
    for mapped, risen, fallen in ((100, 100, 0), (60, 140, 80), (10, 10, 0)):
        shown.of_engines.say_headroom(
            0, encode_headroom(Headroom(1, 2, 3, 4, 5, 6, mapped, risen, fallen, 0, 0.0, 0.0))
        )
    made = {name.partition(":")[2]: metric.values for name, metric in stock.Metric.made.items()}
    assert made["mapped_bytes"] == {("m", "0"): 10}
    assert made["map_bytes"] == ({("m", "0"): 150} if counts else {}), "the last one is another engine"
    assert made["unmap_bytes"] == ({("m", "0"): 80} if counts else {})


@pytest.mark.parametrize("counts", [True, False])
def test_an_engine_that_asks_prefill_says_what_came_of_it(stock: ModuleType, counts: bool) -> None:
    shown = metrics.prom_metrics("config", "types", ["model", "engine"], {0: ["m", "0"]})
    shown.of_engines.counts_engines = counts
    numbers: Any = (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0.0, 0.0)
    shown.of_engines.say_headroom(0, encode_headroom(Headroom(*numbers)))
    made = {name.partition(":")[2]: metric.values for name, metric in stock.Metric.made.items()}
    assert made["held_requests"] == made["questions"] == {}, "it asks nobody"
    figures = AskingFigures(held=3, asked=2, promised_blocks=7)
    for answered in (4, 9):
        figures.ended[Ended.ANSWERED] = answered
        shown.of_engines.say_headroom(0, encode_headroom(Headroom(*numbers, asking=figures)))  # type: ignore[misc]
    at = ("m", "0")
    assert [made[name] for name in ("held_requests", "asked_requests", "promised_blocks")] == [
        {at: 3},
        {at: 2},
        {at: 7},
    ]
    asked = {(*at, one.value): 9 * (one is Ended.ANSWERED) for one in Ended}
    assert made["questions"] == (asked if counts else {}), "each of them from 0 on"
    assert made["computed_prompts"] == ({(*at, one.value): 0 for one in Computed} if counts else {})


def test_the_api_server_shows_how_long_hand_overs_were_in_each_state(stock: ModuleType) -> None:
    shown = metrics.prom_metrics("config", "types", ["model", "engine"], {0: ["m", "0"]})
    states = stock.Metric.made["kvcached_nixl:handover_state_seconds"]
    assert states.labelnames == ["model", "engine", "direction", "state"]
    pull, push = [int(State.DECODE_MOVING), False, 0.5], [int(State.PREFILL_QUEUED), True, 2.0]
    shown.observe({"kvcached_nixl_state_seconds": [pull, push, [*pull[:2], 0.25]]})
    shown.observe({})
    assert states.values == {
        ("m", "0", "pull", "decode_moving"): [0.5, 0.25],
        ("m", "0", "push", "prefill_queued"): [2.0],
    }
