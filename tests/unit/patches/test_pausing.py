# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.engine_loop`: an engine survives a cache that it cannot clear, and the caller gets an error."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED
from kvcached_nixl.vllm.patches import engine_loop
from kvcached_nixl.vllm.patches.engine_loop import tell_who_waits


@pytest.fixture(autouse=True)
def an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "installed_has", lambda change: False)


def clear(engine: Any, future: Future[None]) -> None:
    """As vLLM's: clears the cache, and then answers waiting callers."""
    if engine.blocks_in_use:
        raise RuntimeError("Failed to reset KV cache")
    future.set_result(None)


def idle(engine: SimpleNamespace) -> None:
    """What vLLM does when an engine is idle, with ours around it."""
    tell_who_waits(engine)
    tell_who_waits(engine)
    callbacks = engine._idle_state_callbacks
    while callbacks:
        callbacks.pop()(engine)


def paused(*callbacks: Any, blocks_in_use: int = 0) -> SimpleNamespace:
    return SimpleNamespace(_idle_state_callbacks=list(callbacks), blocks_in_use=blocks_in_use)


def test_what_nobody_waits_for_ends_the_engine_as_before() -> None:
    def broken(engine: Any) -> None:
        raise OSError("anything")

    with pytest.raises(OSError, match="anything"):
        idle(paused(broken))
    done = Future[None]()
    done.set_result(None)
    with pytest.raises(RuntimeError):
        idle(paused(partial(clear, future=done), blocks_in_use=1))


def test_a_vllm_that_tells_its_callers_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.31 on."""
    monkeypatch.setattr(engine_loop, "installed_has", BEYOND_KVCACHED.__eq__)
    callback = partial(clear, future=Future[None]())
    engine = paused(callback, blocks_in_use=1)
    tell_who_waits(engine)
    assert vars(engine)["_idle_state_callbacks"] == [callback]
