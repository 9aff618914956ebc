# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine, in vLLM's own classes: what they say, and that vLLM may make its logger anew."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvcached_nixl.ids import EngineId
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.wire.handshake import Answer, Kind, Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.headroom import Headroom, encode_headroom
from kvcached_nixl.wire.planes import GroupMemory, Planes

WEIGHTS = Weights(Tensors("a" * 32, "b" * 32), files="c" * 32)


def made() -> Any:
    unregister_vllm_metrics()
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    return metrics.prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


def answer() -> tuple[str, bytes]:
    groups = (GroupMemory((Planes((0, 4096), 512, 128, 64, 64, 8, 4, 2, first_head=2),), 2),)
    rank = RankHandshake(EngineId("e"), 1, 0, b"", 0, groups, 0, "DRAM", False, WEIGHTS, Process())
    return "tag", msgspec.msgpack.encode(Answer("0" * 16, msgspec.msgpack.encode(rank)))


def said(*names: str) -> list[float | None]:
    return [REGISTRY.get_sample_value(f"kvcached_nixl:{one}", {"model_name": "m", "engine": "0"}) for one in names]


KINDS = ("compatibility_id", "checkpoint_id", "weights_id")


def test_an_engine_says_what_its_handshake_compares() -> None:
    one = made()
    assert said(*KINDS) == [None, None, None]
    one.of_engines.say_kind(0, [answer()])
    assert said(*KINDS) == [*Kind.of([answer()])]
    one.of_engines.say_kind(0, [("tag", b"\xc1")])
    assert said(*KINDS) == [*Kind.of([answer()])]


def test_an_engine_says_what_it_could_take() -> None:
    one = made()
    one.of_engines.say_headroom(0, encode_headroom(Headroom(10, 20, 30, 1, 5, 2**40, 7, 9, 2, 3, 1.5, 0.0)))
    one.of_engines.say_headroom(0, b"\xc1")
    assert said("free_tokens", "used_tokens", "queued_tokens") == [10, 20, 30]
    assert said("kept_offers", "kept_tokens", "free_bytes") == [1, 5, 2**40]


def test_the_logger_may_be_made_anew() -> None:
    """As vLLM does it when data parallelism is scaled; it removes its own metrics only."""
    made().of_engines.say_kind(0, [answer()])
    made()
    assert said(*KINDS) == [None, None, None]


def test_what_the_dashboard_and_the_alerts_ask_vllm_for_is_there() -> None:
    """Prometheus returns nothing for a metric that was renamed, and no alert on it fires."""
    from importlib.util import find_spec

    root = Path(__file__).parents[2] / "docs" / "deploy" / "prometheus"
    asked = {
        re.sub("_bucket$", "", name)
        for file in ("dashboard.json", "alerts.yaml")
        for name in re.findall(r"vllm:[a-z_]+", (root / file).read_text())
    }
    spec = find_spec("vllm")
    assert len(asked) >= 3 and spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    sources = [folder / "v1/metrics/loggers.py", *(folder / "distributed/kv_transfer").rglob("*.py")]
    known = {name for path in sources for name in re.findall(r"\"(vllm:[a-z_]+)\"", path.read_text())}
    assert asked - known == set()
