# SPDX-License-Identifier: Apache-2.0
"""A pause whose cache cannot be cleared, through vLLM's own loop and its answer to whoever has called."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core import EngineCoreProc

from kvcached_nixl.compat.versions import reason_to_skip
from kvcached_nixl.patching import Registry
from kvcached_nixl.seams import pausing


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    registry = Registry(reason_to_skip)
    registry.add(pausing.SEAMS)
    registry.complete()
    assert not registry.refusals()
    yield registry
    registry.uninstall()


def clear(engine: Any, future: Future[None]) -> None:
    raise RuntimeError("Failed to reset KV cache")


def idle_engine(future: Future[None]) -> Any:
    engine = object.__new__(EngineCoreProc)
    engine.scheduler = SimpleNamespace(connector=None)
    engine._idle_state_callbacks = [partial(clear, future=future)]
    return engine


def test_whoever_paused_an_engine_gets_an_error_and_the_engine_lives() -> None:
    """It calls back when it is idle; its answer to a call waits for that."""
    future, answered, output = Future[None](), list[UtilityOutput](), UtilityOutput(7)
    EngineCoreProc._invoke_utility_method("pause_scheduler", lambda: future, output, answered.append)
    assert not answered
    idle_engine(future)._notify_idle_state_callbacks()
    assert answered == [output] and "Failed to reset KV cache" in (output.failure_message or "")


def test_without_this_package_the_engine_ends(patched: Registry) -> None:
    """What the case above would not see if vLLM came to say it itself."""
    patched.uninstall()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        idle_engine(Future())._notify_idle_state_callbacks()
