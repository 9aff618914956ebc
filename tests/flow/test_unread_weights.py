# SPDX-License-Identifier: Apache-2.0
"""Weights have changed, and the look at them fails: a worker lacks memory for it, on a device that others share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.flow_pair import DIRECTIONS, Pair, is_computed, is_right, kind

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.vllm.adapter.attributes import attach
from kvcached_nixl.vllm.patches import weights
from kvcached_nixl.wire.handshake import Tensors, Weights

OTHER = Weights(Tensors("1" * 32, "8" * 32), files="9" * 32)


class Executor:
    """Of ``engine``: its workers lack memory for a look as long as ``is_short``."""

    is_sleeping = False

    def __init__(self, engine: Any) -> None:
        self.engine, self.is_short = engine, True

    def collective_rpc(self, *arguments: Any, **named: Any) -> list[Any]:
        if self.is_short:
            return ["torch.OutOfMemoryError"]
        for worker in self.engine.workers:
            worker.side.identify(self.engine.weights)
        return [{0: 0}]


@DIRECTIONS
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
def test_no_kv_is_handed_over_until_they_are_read(
    mode: TransferMode, is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(mode, None, kind(caches_prefixes=False))
    pair.acquaint()
    engine = pair.decode if is_decode else pair.prefill
    before = engine.weights
    connector = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=lambda _: engine.introduce())
    attach(connector, engine.handover)
    core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector), model_executor=Executor(engine))
    engine.weights = OTHER
    weights.identify_again(core, "finish_weight_update")
    weights.identify_if_due(core)
    pair.settle()
    assert is_computed(pair.hand_over())
    # Back to those of the other side.
    engine.weights = before
    weights.identify_again(core, "finish_weight_update")
    core.model_executor.is_short = False
    weights.identify_if_due(core)
    assert is_computed(pair.hand_over()), "not before it is time to look again"
    monkeypatch.setattr(weights, "time", SimpleNamespace(monotonic=lambda: float("inf")))
    weights.identify_if_due(core)
    pair.settle()
    assert is_right(pair.hand_over())
