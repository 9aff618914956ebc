# SPDX-License-Identifier: Apache-2.0
"""vllm/adapter/queues.py with the queues of the installed vLLM: the order is that in which vLLM looks at requests.

And `HoldingQueue` in place of vLLM's own, for requests that wait for prefill's answer.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.v1.core.sched import request_queue
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.queues import HoldingQueue, bring_forward, goes_by_priority, hold, queued

SELECT = optional(Scheduler, "_select_waiting_queue_for_scheduling")
"""Up to 0.30 vLLM has a queue of requests that it skipped; later one of those that hold KV."""
FIRST = "kv_holding_waiting" if SELECT is None else "skipped_waiting"
FCFS, PRIORITY = SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY
Named = Sequence[tuple[str, int]]
policies = pytest.mark.parametrize("policy", SchedulingPolicy)


def scheduler(policy: SchedulingPolicy, first: Named = (), waiting: Named = ()) -> Any:
    """Queues of names, each with its priority; a smaller one comes first."""
    queues = {FIRST: create_request_queue(policy), "waiting": create_request_queue(policy)}
    made = SimpleNamespace(
        policy=policy, running=[], requests={}, deferred_waiting=set(), _inflight_prefills=set(), **queues
    )
    for queue, requests in zip(queues.values(), (first, waiting), strict=True):
        for at, (name, priority) in enumerate(requests):
            queue.add_request(request_of(made, name, float(at), priority))
    return made


def request_of(engine: Any, name: str, at: float, priority: int) -> Request:
    sampling = SamplingParams(max_tokens=1)
    engine.requests[name] = Request(name, [3, 4], sampling, None, arrival_time=at, priority=priority)
    found: Request = engine.requests[name]
    return found


def added(engine: Any, *names: str, held: bool = False, status: RequestStatus = RequestStatus.WAITING) -> None:
    """In the order of arrival; the priority of a name is the reverse of its letter."""
    for name in names:
        request = request_of(engine, name, float(len(engine.requests)), ord("z") - ord(name))
        request.status = status
        (engine.waiting if status is RequestStatus.WAITING else getattr(engine, FIRST)).add_request(request)
        if held:
            hold(engine, request)


def names(engine: Any) -> list[str]:
    return [one.request_id for one in queued(engine)]


@policies
def test_a_queue_that_changes_while_another_thread_looks_is_read_to_its_end(policy: SchedulingPolicy) -> None:
    """As when a peer asks what is cached: it would be told that nothing is."""
    engine = scheduler(policy, [("a", 1), ("b", 1)], [("c", 1), ("d", 1)])
    found = queued(engine)
    seen = [next(found).request_id]
    added(engine, "y", "z")
    added(engine, "x", status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert {"a", "b", "c", "d"} <= {*seen, *(one.request_id for one in found)}


def looked_at(found: Any) -> list[str]:
    """The names in the order in which vLLM takes them from its queues. They are empty afterwards."""
    taken = []
    while True:
        queue = found.kv_holding_waiting or found.waiting if SELECT is None else SELECT(found)
        if not queue:
            return taken
        taken.append(queue.pop_request().request_id)


@policies
def test_the_order_is_vllms(policy: SchedulingPolicy) -> None:
    found = scheduler(policy, [("a", 2), ("b", 0), ("c", 4)], [("d", 3), ("e", 1), ("f", 5)])
    expected = names(found)
    assert expected == looked_at(found) and len(expected) == 6


@policies
def test_who_has_its_kv_is_looked_at_first(policy: SchedulingPolicy) -> None:
    """Whatever its priority. Later versions do so by themselves."""
    found = scheduler(policy, [("a", 1), ("b", 2), ("c", 3)], [("d", 0)])
    bring_forward(found, {"c", "e"})
    expected = names(found)
    assert expected == looked_at(found)
    assert expected == (["c", "a", "b", "d"] if policy is FCFS else ["c", "d", "a", "b"]) or SELECT is None


@pytest.mark.skipif(SELECT is None, reason="this vLLM has a queue of those that hold KV")
@pytest.mark.parametrize("turn", ["runs", "lacks blocks", "has no KV"])
def test_a_priority_is_another_one_until_its_turn_only(turn: str) -> None:
    found = scheduler(PRIORITY, [("a", 1), ("b", 2)], [("c", 0)])
    one = found.requests["b"]
    one.status, one.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, 1
    bring_forward(found, {"b"})
    bring_forward(found, set())
    assert one.priority < 0, "it has had no turn"
    if turn == "runs":
        found.skipped_waiting.remove_request(one)
        one.status = RequestStatus.RUNNING
    else:
        one.status, one.num_computed_tokens = RequestStatus.WAITING, int(turn == "lacks blocks")
    bring_forward(found, set())
    assert one.priority == 2 or turn == "lacks blocks"
    expected = {"runs": ["c", "a"], "lacks blocks": ["b", "c", "a"], "has no KV": ["c", "a", "b"]}
    assert looked_at(found) == expected[turn]


# --------------------------------------------------------------------------------------------------- held requests


def test_it_has_every_method_of_vllms_queue() -> None:
    assert set(vars(request_queue.RequestQueue)["__abstractmethods__"]) <= {
        *vars(HoldingQueue),
        # Passed on as they are, since they ask for nothing that is held.
        *("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests"),
    }


@policies
def test_held_ones_wait_and_are_counted_and_no_step_looks_at_them(policy: SchedulingPolicy) -> None:
    engine = scheduler(policy)
    added(engine, "a", "b", held=True)
    assert not engine.waiting and len(engine.waiting) == 2
    added(engine, "c")
    assert names(engine) == ["c"] and engine.waiting.peek_request().request_id == "c"
    assert Scheduler.get_request_counts(engine) == (0, 3)
    assert goes_by_priority(engine) is (policy is PRIORITY)


@policies
def test_a_released_one_is_where_it_would_have_been_and_held_ones_leave_as_others_do(policy: SchedulingPolicy) -> None:
    engine = scheduler(policy)
    added(engine, "a")
    added(engine, "b", "c", "e", "f", held=True)
    added(engine, "d")
    engine.waiting.remove_requests([engine.requests["e"]])
    engine.waiting.remove_request(engine.requests["f"])
    for name in ("c", "b"):
        assert engine.waiting.release(name) is engine.requests[name]
    assert names(engine) == sorted("abcd", reverse=policy is PRIORITY)
    assert len(engine.waiting) == 4


def test_no_blocks_stay_reserved_for_a_held_one() -> None:
    """vLLM reserves what a request whose KV loads still needs, and would start nothing else that needs it."""
    engine = scheduler(FCFS)
    added(engine, "a")
    reserved = vars(engine)["_inflight_prefills"]
    reserved.add(engine.requests["a"])
    hold(engine, engine.requests["a"])
    assert not reserved


def test_one_whose_grammar_is_compiled_is_held_too() -> None:
    engine = scheduler(FCFS)
    grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    added(engine, "a", held=True, status=grammar if FIRST == "skipped_waiting" else RequestStatus.WAITING)
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
