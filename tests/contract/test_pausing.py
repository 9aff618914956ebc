# SPDX-License-Identifier: Apache-2.0
"""A pause during which the prefix cache cannot be cleared, through vLLM's own loop and its answer to the caller."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.patches import applied
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.patches import engine_loop, patches_in


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    with applied(patches_in(engine_loop)) as registry:
        yield registry


def clear(*_: Any) -> None:
    raise RuntimeError("Failed to reset KV cache")


def paused_engine() -> tuple[Any, Future[None]]:
    """An engine with work that is paused, and whose cache cannot be cleared when it is idle; and vLLM's answer."""
    engine = object.__new__(EngineCoreProc)
    vars(engine).update(
        scheduler=SimpleNamespace(connector=None, set_pause_state=lambda state: None, pause_state=0),
        model_executor=SimpleNamespace(collective_rpc=lambda name: None),
        _idle_state_callbacks=[],
        process_input_queue_block=True,
        has_work=lambda: True,
        _reset_caches=clear,
    )
    return engine, engine.pause_scheduler("wait")


def notify(engine: Any) -> None:
    """What vLLM's loop calls when the engine is idle."""
    engine._notify_idle_state_callbacks()


def test_whoever_paused_an_engine_gets_an_error_and_the_engine_lives() -> None:
    """It calls back when it is idle; its answer to a call waits for that."""
    engine, future = paused_engine()
    answered, output = list[UtilityOutput](), UtilityOutput(7)
    EngineCoreProc._invoke_utility_method("pause_scheduler", lambda: future, output, answered.append)
    assert not answered
    notify(engine)
    assert answered == [output] and "Failed to reset KV cache" in (output.failure_message or "")


@dataclass
class Side:
    """What this package is in an engine."""

    due_in_seconds: float | None = None
    quiet_in_seconds: float = 0.0
    watches_memory: bool = False
    told: list[str] = field(default_factory=list)

    @property
    def revocations(self) -> Side:
        return self

    def paused(self, *, grace_seconds: float, clears: bool) -> None:
        self.told.append("paused")

    def resumed(self) -> None:
        self.told.append("resumed")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    found = Side()
    for name in ("bound_sides", "sides"):
        monkeypatch.setattr(engine_loop, name, lambda _: [found])
    return found


@pytest.mark.parametrize("mode", ["typo", ""])
def test_a_pause_that_vllm_refuses_closes_nothing(mode: str, side: Side) -> None:
    """/sleep hands on any mode. Else an engine that serves would take back all that it offers, until it is resumed."""
    engine = object.__new__(EngineCoreProc)
    engine.scheduler = SimpleNamespace(connector=None, pause_state=PauseState.UNPAUSED)
    with pytest.raises(ValueError, match="mode"):
        engine.pause_scheduler(mode)
    assert side.told == ["paused", "resumed"]
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    with pytest.raises(ValueError, match="mode"):
        engine.pause_scheduler(mode)
    assert side.told[2:] == ["paused"], "it was paused before"


def test_an_engine_that_is_paused_looks_at_what_is_due(side: Side) -> None:
    """vLLM waits for whatever enters it, without an end: hand-overs that wait would have no deadline."""
    engine = object.__new__(EngineCoreProc)
    engine.scheduler = SimpleNamespace(connector=None)
    engine._idle_state_callbacks, engine.input_queue = [], queue.Queue[Any]()
    engine.process_input_queue_block = True
    notify(engine)
    assert engine.input_queue.empty()
    side.due_in_seconds = 0.05
    notify(engine)
    assert engine.input_queue.get_nowait()[0] is EngineCoreRequestType.WAKEUP
    engine.process_input_queue_block = False
    notify(engine)
    assert engine.input_queue.empty(), "elastic expert parallelism: ranks come or go meanwhile"
    engine.process_input_queue_block = True
    side.due_in_seconds = 3600.0
    engine.input_queue.put("a request")
    notify(engine)
    assert engine.input_queue.get_nowait() == "a request" and engine.input_queue.empty()


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_engine_that_ends_at_once_ends_its_requests_with_an_error(
    is_ours: bool, side: Side, patched: Registry
) -> None:
    """A signal to all processes reaches it before its API server knows. Some endpoints do not tell "abort"."""
    engine = object.__new__(EngineCoreProc)
    left = [SimpleNamespace(request_id=one, client_index=0) for one in ("first", "second")]

    def finish_requests(_: None, status: RequestStatus) -> list[Any]:
        ended = [*left]
        left.clear()
        return ended

    engine.vllm_config = SimpleNamespace(shutdown_timeout=0)
    engine.shutdown_state = EngineShutdownState.REQUESTED
    engine.output_queue = queue.Queue[Any]()
    engine.has_work = lambda: False
    engine.scheduler = SimpleNamespace(
        connector=None, finish_requests=finish_requests, get_num_unfinished_requests=lambda: len(left)
    )
    if not is_ours:
        patched.uninstall()
    assert getattr(engine, engine_loop.handle_shutdown.attribute)() is False and not left
    sent = [one for _, outputs in engine.output_queue.queue for one in outputs.outputs]
    assert {one.request_id for one in sent} == {"first", "second"}
    assert {one.finish_reason for one in sent} == {FinishReason.ERROR if is_ours else FinishReason.ABORT}
    assert side.told == (["paused"] if is_ours else [])
