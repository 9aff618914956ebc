# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.engine_loop`: an engine that only waits rests, and one survives a cache that it cannot clear."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter import queues
from kvcached_nixl.vllm.adapter.attributes import attach
from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED
from kvcached_nixl.vllm.patches import engine_loop
from kvcached_nixl.vllm.patches.engine_loop import rest, tell_who_waits
from kvcached_nixl.vllm.patches.step_output import note_step
from kvcached_nixl.wire.step import Report, Reports

LONGEST_SECONDS = 5.0
OURS = "WAITING_FOR_REMOTE_KVS"


@pytest.fixture(autouse=True)
def an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "installed_has", lambda change: False)


class Queue:
    """vLLM's input queue: a `queue.Queue`, as far as it is looked at. A wait ends at once and is noted."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.waited: list[float] = []
        self.not_empty = self

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, seconds: float) -> None:
        # To the millisecond: what the clock has moved on since the deadline was set does not count.
        self.waited.append(round(seconds, 3))

    def _qsize(self) -> int:
        return len(self.items)


class Blocks:
    """vLLM's pool; ``free``: how many blocks are, one look after the other."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)

    def get_num_free_blocks(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]


def side(waiting: int = 1, *, pending: bool = False, due_in_seconds: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        fetching=SimpleNamespace(attempts=SimpleNamespace(waiting=range(waiting))),
        pending=pending,
        due_in_seconds=due_in_seconds,
        watches_memory=False,
        relieve=lambda: False,
        holds_back=lambda request_id: request_id.startswith("held"),
    )


def core(*statuses: str, ours: SimpleNamespace | None = None, blocks: Blocks | None = None, **changed: Any) -> Any:
    """After a step that has changed nothing, with these requests in its queues."""
    requests = [
        SimpleNamespace(status=SimpleNamespace(name=name.partition(" ")[2] or name), request_id=name)
        for name in statuses
    ]
    connector = SimpleNamespace()
    attach(connector, side(statuses.count(OURS)) if ours is None else ours)
    scheduler = SimpleNamespace(
        connector=connector,
        waiting=requests[::2],
        skipped_waiting=requests[1::2],
        pause_state=0,
        finished_req_ids=set(),
        deferred_frees=[],
        kv_cache_manager=SimpleNamespace(block_pool=blocks or Blocks(7)),
    )
    vars(scheduler).update({name: changed.pop(name) for name in list(changed) if name in SCHEDULERS})
    note_step(scheduler, *step())
    fields: dict[str, Any] = {
        "input_queue": Queue(),
        "batch_queue": None,
        "engines_running": False,
        "has_work": lambda: True,
        "scheduler": scheduler,
    }
    return SimpleNamespace(**fields | changed)


SCHEDULERS = ("pause_state", "finished_req_ids", "deferred_frees")


def step(tokens: int = 0, *, ended: bool = False, told: bool = False, **reported: Any) -> tuple[Any, Reports, Any]:
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens, finished_req_ids={"a"} if ended else set(), preempted_req_ids=None
    )
    reports = Reports(**{"sent": set(), "received": set(), "invalid": set()} | reported)
    return output, reports, {0: SimpleNamespace(outputs=["token"] if told else [])}


def rested(one: Any) -> list[float]:
    rest(one, LONGEST_SECONDS)
    waited: list[float] = one.input_queue.waited
    return waited


REPORTED = SimpleNamespace(kvcached_nixl_report=Report({(1, 0)}))
NO_REPORTS: dict[str, Any] = {
    "finished_sending": None,
    "finished_recving": None,
    "invalid_block_ids": set(),
    "kv_connector_stats": None,
    "kv_connector_worker_meta": None,
}


def batch(
    tokens: int = 0,
    reported: dict[str, Any] | None = NO_REPORTS,
    *,
    raises: Exception | None = None,
    has_output: bool = True,
) -> tuple[Future[Any], SimpleNamespace, Future[Any]]:
    """What asynchronous scheduling has queued: a batch of so many tokens, and what its worker has answered."""
    future: Future[Any] = Future()
    if raises is not None:
        future.set_exception(raises)
    else:
        told = None if reported is None else SimpleNamespace(**{**NO_REPORTS, **reported})
        future.set_result(SimpleNamespace(kv_connector_output=told) if has_output else None)
    return future, SimpleNamespace(total_num_scheduled_tokens=tokens), future


@pytest.mark.parametrize(
    "one",
    [
        core(OURS),
        core(),
        core(OURS, OURS),
        core("WAITING", OURS, pause_state=2),
        core("held WAITING", OURS),
        core(OURS, batch_queue=[]),
        core(OURS, batch_queue=[batch()]),
        core(OURS, batch_queue=[batch(), batch(reported=None)]),
    ],
    ids=["waits", "keeps", "two", "paused", "held back", "no batch", "an idle batch", "two idle batches"],
)
def test_an_engine_that_only_waits_rests(one: Any) -> None:
    """It would step a thousand times a second, and each step go on to the API server."""
    assert rested(one) == [LONGEST_SECONDS]


def test_an_engine_that_is_full_rests_until_blocks_are_free_elsewhere() -> None:
    """Kvcached's memory is other engines', too, and nobody says when it is given back."""
    look = engine_loop._LOOK_SECONDS
    assert rested(core("WAITING", OURS, blocks=Blocks(7, 7, 7, 8))) == [look] * 3
    assert rested(core("PREEMPTED", blocks=Blocks(7))) == [look] * round(LONGEST_SECONDS / look)
    assert rested(core("WAITING", ours=side(due_in_seconds=look), blocks=Blocks(7))) == [look]


def test_below_several_connectors_it_rests_for_a_moment() -> None:
    """What others have ended is found in steps; what they load is waited for as vLLM does."""
    for statuses, expected in (((OURS,), [engine_loop._SHARED_SECONDS]), ((OURS, OURS), [])):
        one = core(*statuses, ours=side(1))
        other = SimpleNamespace(has_pending_push_work=lambda: False)
        one.scheduler.connector = SimpleNamespace(
            has_pending_push_work=other.has_pending_push_work, _connectors=[other, one.scheduler.connector]
        )
        assert rested(one) == expected
        other.has_pending_push_work = lambda: True
        assert rested(one) == expected, "not once more"


@pytest.mark.parametrize(
    "one",
    [
        core(has_work=lambda: False),
        core(OURS, ours=side(pending=True)),
        core(OURS, ours=side(0)),
        core(OURS, "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
        core(OURS, batch_queue=[batch(tokens=1)]),
        core(OURS, batch_queue=[batch(), batch(reported={"finished_sending": {"a"}})]),
        core(OURS, batch_queue=[batch(reported={"finished_recving": {"a"}})]),
        core(OURS, batch_queue=[batch(reported={"invalid_block_ids": {-2}})]),
        core(OURS, batch_queue=[batch(reported={"kv_connector_worker_meta": REPORTED})]),
        core(OURS, batch_queue=[batch(has_output=False)]),
        core(OURS, finished_req_ids={"a"}),
        core(OURS, deferred_frees=[1]),
        core(OURS, engines_running=True),
    ],
    ids=[
        "idle",
        "news",
        "another connector's",
        "a grammar",
        "a batch",
        "sent",
        "received",
        "failed",
        "ended on a rank",
        "no output",
        "an end to tell",
        "blocks that a step still writes",
        "lockstep",
    ],
)
def test_an_engine_that_has_something_to_do_does_not(one: Any) -> None:
    """No rest where ranks step together; an engine without requests waits as vLLM does."""
    assert rested(one) == []


@pytest.mark.parametrize(
    "moved",
    [
        step(1),
        step(ended=True),
        step(told=True),
        step(sent={"a"}),
        step(received={"a"}),
        step(invalid={-1}),
        # Prompts may begin now; blocks are free.
        step(report=Report(claimed={1})),
        step(report=Report(idle={(1, 0)})),
    ],
    ids=["computed", "ended", "told", "sent", "received", "failed", "claimed", "idle"],
)
def test_after_a_step_that_has_changed_something_there_is_another_one(moved: tuple[Any, Reports, Any]) -> None:
    one = core(OURS)
    note_step(one.scheduler, *moved)
    assert rested(one) == []
    note_step(one.scheduler, *step())
    assert rested(one) == [LONGEST_SECONDS]


@pytest.mark.parametrize(("due", "waited"), [(None, 5.0), (0.04, 0.04), (300.0, 5.0)])
def test_it_rests_no_longer_than_until_something_is_due(due: float | None, waited: float) -> None:
    """A hand-over that never comes ends by the clock, and nobody wakes the engine for it."""
    assert rested(core(OURS, ours=side(due_in_seconds=due))) == [waited]


def test_what_a_worker_has_raised_ends_the_engine() -> None:
    """As it would in the next step."""
    with pytest.raises(OSError, match="a worker"):
        rested(core(OURS, batch_queue=[batch(raises=OSError("a worker"))]))


def test_an_engine_without_ours_is_left_alone() -> None:
    for connector in (None, SimpleNamespace(), SimpleNamespace(_connectors=[])):
        one = core(OURS)
        one.scheduler.connector = connector
        assert rested(one) == []


def test_what_has_come_already_is_not_waited_for() -> None:
    one = core(OURS)
    one.input_queue.items.append("a request")
    assert rested(one) == []


@pytest.fixture(autouse=True)
def an_old_vllm_of_pausing(monkeypatch: pytest.MonkeyPatch) -> None:
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
