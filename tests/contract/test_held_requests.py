# SPDX-License-Identifier: Apache-2.0
"""`adapter.queues.HoldingQueue` in place of the queue of the installed vLLM."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import vllm
from vllm import SamplingParams
from vllm.v1.core.sched import request_queue
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.queues import HoldingQueue, goes_by_priority, hold, queued

OTHER = (
    "kv_holding_waiting" if optional(Scheduler, "_select_waiting_queue_for_scheduling") is None else "skipped_waiting"
)


def scheduler(policy: SchedulingPolicy) -> Any:
    queues = {OTHER: create_request_queue(policy), "waiting": create_request_queue(policy)}
    return SimpleNamespace(
        policy=policy, running=[], requests={}, deferred_waiting=set(), _inflight_prefills=set(), **queues
    )


def added(engine: Any, *names: str, held: bool = False, status: RequestStatus = RequestStatus.WAITING) -> None:
    """In the order of arrival; the priority of a name is the reverse of its letter."""
    for name in names:
        sampling, at = SamplingParams(max_tokens=1), float(len(engine.requests))
        request = Request(name, [3, 4], sampling, None, arrival_time=at, priority=ord("z") - ord(name))
        request.status = status
        engine.requests[name] = request
        (engine.waiting if status is RequestStatus.WAITING else getattr(engine, OTHER)).add_request(request)
        if held:
            hold(engine, request)


def names(engine: Any) -> list[str]:
    return [one.request_id for one in queued(engine)]


def test_it_has_every_method_of_vllms_queue() -> None:
    assert set(vars(request_queue.RequestQueue)["__abstractmethods__"]) <= {
        *vars(HoldingQueue),
        # Passed on as they are, since they ask for nothing that is held.
        *("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests"),
    }


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_held_ones_wait_and_are_counted_and_no_step_looks_at_them(policy: SchedulingPolicy) -> None:
    engine = scheduler(policy)
    added(engine, "a", "b", held=True)
    assert not engine.waiting and len(engine.waiting) == 2
    added(engine, "c")
    assert names(engine) == ["c"] and engine.waiting.peek_request().request_id == "c"
    assert Scheduler.get_request_counts(engine) == (0, 3)
    assert goes_by_priority(engine) is (policy is SchedulingPolicy.PRIORITY)


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_released_one_is_where_it_would_have_been(policy: SchedulingPolicy) -> None:
    engine = scheduler(policy)
    added(engine, "a")
    added(engine, "b", "c", held=True)
    added(engine, "d")
    for name in ("c", "b"):
        assert engine.waiting.release(name) is engine.requests[name]
    assert names(engine) == sorted("abcd", reverse=policy is SchedulingPolicy.PRIORITY)
    assert len(engine.waiting) == 4


def test_no_blocks_stay_reserved_for_a_held_one() -> None:
    """vLLM reserves what a request whose KV loads still needs, and would start nothing else that needs it."""
    engine = scheduler(SchedulingPolicy.FCFS)
    added(engine, "a")
    reserved = vars(engine)["_inflight_prefills"]
    reserved.add(engine.requests["a"])
    hold(engine, engine.requests["a"])
    assert not reserved


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_held_ones_leave_as_others_do(policy: SchedulingPolicy) -> None:
    engine = scheduler(policy)
    added(engine, "a", "b", held=True)
    added(engine, "c", "d")
    engine.waiting.remove_requests([engine.requests["a"], engine.requests["c"]])
    engine.waiting.remove_request(engine.requests["b"])
    assert names(engine) == ["d"] and len(engine.waiting) == 1


def test_one_whose_grammar_is_compiled_is_held_too() -> None:
    engine = scheduler(SchedulingPolicy.FCFS)
    grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    added(engine, "a", held=True, status=grammar if OTHER == "skipped_waiting" else RequestStatus.WAITING)
    assert names(engine) == [] and Scheduler.get_request_counts(engine) == (0, 1)
    engine.waiting.release("a")
    assert names(engine) == ["a"]


def calling(*called: str) -> set[str]:
    """The functions of vLLM's engine that call a method: ``scheduler.add_request`` is found by its last two names."""
    found = set()
    engine = Path(vllm.__file__).parent / "v1"
    for path in (*(engine / "engine").rglob("*.py"), *(engine / "core").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = (ast.unparse(one.func) for one in ast.walk(function) if isinstance(one, ast.Call))
                if any(f".{one}".endswith(tuple(f".{name}" for name in called)) for one in calls):
                    found.add(f"{path.stem}.{function.name}")
    return found


def test_all_requests_enter_by_one_door() -> None:
    """Whatever endpoint or client they come from: `patches.arrival.add_request` is around it."""
    assert calling("scheduler.add_request") == {"core.add_request"}
    # A session whose turn has ended waits for its next input.
    waits_again = {"scheduler.update_from_output", "scheduler._handle_stopped_request"}
    found = calling("_enqueue_waiting_request", "waiting.add_request") - waits_again
    assert found == {"scheduler.add_request", "scheduler._enqueue_waiting_request"}
