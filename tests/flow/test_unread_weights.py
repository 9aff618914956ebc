# SPDX-License-Identifier: Apache-2.0
"""Weights have changed, and the look at them fails: a worker lacks memory for it, on a device that others share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.flow_pair import DIRECTIONS, PULL, Pair, is_computed, is_right, kind

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


def core_of(engine: Any) -> Any:
    """What vLLM's ``EngineCore`` is to the patches, of an engine whose workers lack memory."""
    connector = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=lambda _: engine.introduce())
    attach(connector, engine.handover)
    return SimpleNamespace(scheduler=SimpleNamespace(connector=connector), model_executor=Executor(engine))


def change(core: Any, changed: Weights, method: str) -> None:
    """A trainer's call puts these weights in place; the engine looks at them before its next step."""
    core.model_executor.engine.weights = changed
    weights.identify_again(core, method)
    weights.identify_if_due(core)


@DIRECTIONS
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
def test_no_kv_is_handed_over_until_they_are_read(
    mode: TransferMode, is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(mode, None, kind(caches_prefixes=False))
    pair.acquaint()
    engine = pair.decode if is_decode else pair.prefill
    before, core = engine.weights, core_of(engine)
    change(core, OTHER, "finish_weight_update")
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


@pytest.mark.parametrize("is_short", [True, False], ids=["unread", "read"])
@pytest.mark.parametrize("is_offered", [True, False], ids=["offered", "cached"])
def test_kv_of_weights_that_were_not_read_is_not_taken_for_that_of_the_next_ones(
    is_short: bool, is_offered: bool
) -> None:
    """Which were put in place by a call of a trainer's own. Engines check which weights have made the KV they use."""
    pair = Pair(PULL, None, kind(caches_prefixes=not is_offered, recomputes=True))
    pair.acquaint()
    engine = pair.prefill if is_offered else pair.decode
    before, core = engine.weights, core_of(engine)
    core.model_executor.is_short = is_short
    change(core, OTHER, "update_my_way")
    pair.settle()
    params = pair.offered() if is_offered else None
    if not is_offered:
        assert is_computed(pair.hand_over())
    core.model_executor.is_short = False
    change(core, before, "update_my_way")
    found = pair.ask_decode(params)
    pair.settle()
    assert is_computed(found)
