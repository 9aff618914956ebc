# SPDX-License-Identifier: Apache-2.0
"""vllm/adapter/queues.py with the queues of the installed vLLM: the order is that in which vLLM looks at requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from vllm import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvcached_nixl.vllm.adapter.attributes import optional
from kvcached_nixl.vllm.adapter.queues import bring_forward, queued

SELECT = optional(Scheduler, "_select_waiting_queue_for_scheduling")
"""Up to 0.30 vLLM has a queue of requests that it skipped; later one of those that hold KV."""
FIRST = "kv_holding_waiting" if SELECT is None else "skipped_waiting"


def scheduler(policy: SchedulingPolicy, first: Sequence[tuple[str, int]], waiting: Sequence[tuple[str, int]]) -> Any:
    """Queues of names, each with its priority; a smaller one comes first."""
    queues = {FIRST: create_request_queue(policy), "waiting": create_request_queue(policy)}
    for queue, requests in zip(queues.values(), (first, waiting), strict=True):
        for at, (name, priority) in enumerate(requests):
            sampling = SamplingParams(max_tokens=1)
            queue.add_request(Request(name, [3, 4], sampling, None, arrival_time=float(at), priority=priority))
    return SimpleNamespace(policy=policy, **queues)


def looked_at(found: Any) -> list[str]:
    """The names in the order in which vLLM takes them from its queues. They are empty afterwards."""
    names = []
    while True:
        queue = found.kv_holding_waiting or found.waiting if SELECT is None else SELECT(found)
        if not queue:
            return names
        names.append(queue.pop_request().request_id)


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_the_order_is_vllms(policy: SchedulingPolicy) -> None:
    found = scheduler(policy, [("a", 2), ("b", 0), ("c", 4)], [("d", 3), ("e", 1), ("f", 5)])
    names = [request.request_id for request in queued(found)]
    assert names == looked_at(found) and len(names) == 6


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_who_has_its_kv_is_looked_at_first(policy: SchedulingPolicy) -> None:
    """Whatever its priority. Later versions do so by themselves."""
    found = scheduler(policy, [("a", 1), ("b", 2), ("c", 3)], [("d", 0)])
    bring_forward(found, {"c", "e"})
    first = ["c", "a", "b", "d"] if policy is SchedulingPolicy.FCFS else ["c", "d", "a", "b"]
    names = [request.request_id for request in queued(found)]
    assert names == looked_at(found)
    assert names == first or SELECT is None


@pytest.mark.skipif(SELECT is None, reason="this vLLM has a queue of those that hold KV")
@pytest.mark.parametrize("turn", ["runs", "lacks blocks", "has no KV"])
def test_a_priority_is_another_one_until_its_turn_only(turn: str) -> None:
    found = scheduler(SchedulingPolicy.PRIORITY, [("a", 1), ("b", 2)], [("c", 0)])
    (one,) = (request for request in found.skipped_waiting if request.request_id == "b")
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
