# SPDX-License-Identifier: Apache-2.0
"""`adapter.queues`, `patches.engine_blocks` and `patches.step_output`, with stand-ins for vLLM's objects."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.engine_fakes import TOKENS

from kvcached_nixl.vllm.adapter import attributes, queues
from kvcached_nixl.vllm.adapter.attributes import attach, carry
from kvcached_nixl.vllm.adapter.locate import CONNECTOR_BASE
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks
from kvcached_nixl.vllm.patches.step_output import (
    is_whole,
    reports_of,
    tell_finished,
    tell_reasons,
    with_reports,
)
from kvcached_nixl.wants import Want
from kvcached_nixl.wire.step import Report, Reports


class Pause(IntEnum):
    """vLLM's ``PauseState``."""

    NEW = 1
    PAUSED_ALL = 2


@pytest.fixture(autouse=True)
def an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "installed_has", lambda change: False)


def of_status(*names: str) -> list[SimpleNamespace]:
    """Those whose name begins with "held" are held back by the connector."""
    return [
        SimpleNamespace(
            request_id=("held" if name.startswith("held") else "r") + str(at),
            status=SimpleNamespace(name=name.rpartition(" ")[2]),
        )
        for at, name in enumerate(names)
    ]


def connector() -> SimpleNamespace:
    one = SimpleNamespace()
    attach(one, SimpleNamespace(holds_back=lambda request_id: request_id.startswith("held")))
    return one


def engine(*managers: SimpleNamespace, pool: Any = None, **changed: Any) -> SimpleNamespace:
    """vLLM's scheduler, which runs nothing."""
    coordinator = SimpleNamespace(single_type_managers=managers)
    found = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(
            coordinator=coordinator,
            block_pool=pool or SimpleNamespace(),
            enable_caching=True,
            allocate_slots=lambda request, num_new_tokens: None,
        ),
        vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_consumer=True)),
        max_num_running_reqs=8, pause_state=0, connector=connector(), running=[], waiting=[], skipped_waiting=[],
    )  # fmt: skip
    vars(found).update(changed)
    return found


def elastic(**changed: Any) -> SimpleNamespace:
    """kvcached's manager, which has 4 layers."""
    sizes = {"page_size": 1024, "block_mem_size": 1, "num_layers": 4, "num_kv_buffers": 2}
    return SimpleNamespace(**{"page_allocator": SimpleNamespace(), **sizes, **changed})


@pytest.mark.parametrize(
    ("running", "waiting", "skipped", "expected"),
    [
        ([], ["WAITING", "WAITING"], None, "r0"),
        ([], ["held WAITING", "WAITING"], None, "r1"),
        ([], ["held WAITING"], None, None),
        ([], ["WAITING_FOR_REMOTE_KVS", "PREEMPTED"], None, "r1"),
        ([], [], ["WAITING_FOR_FSM", "WAITING"], "r1"),
        ([], ["WAITING"], ["WAITING_FOR_REMOTE_KVS", "WAITING"], "r1"),
        ([], ["WAITING_FOR_FSM", "WAITING"], ["PREEMPTED"], "r0"),
        ([], ["WAITING_FOR_REMOTE_KVS"], None, None),
        ([], [], None, None),
        (["RUNNING"], ["WAITING"], None, None),
    ],
)
def test_who_is_next_where_nothing_runs(
    running: list[str], waiting: list[str], skipped: list[str] | None, expected: str | None
) -> None:
    """vLLM keeps those that it has passed over in a queue of their own, and begins with that one."""
    scheduler = engine(
        running=of_status(*running), waiting=of_status(*waiting), skipped_waiting=of_status(*(skipped or ()))
    )
    blocks = EngineBlocks(scheduler)
    assert blocks.stalled[:1] == ([expected] if expected else []) and not blocks.is_paused
    scheduler.pause_state = Pause.NEW
    assert blocks.stalled == [] and blocks.is_paused == (not running)


def starved(
    needed: int, free_then: int, free: int, cached: tuple[int, ...] = (), *, is_tried: bool = True, **changed: Any
) -> tuple[str, int] | None:
    """Of an engine whose next request got no blocks while ``free_then`` were free, or was not tried.

    Args:
        cached: how many requests have each block of its prompt that is in the prefix cache.
        changed: what else is so of the request, or of vLLM's scheduler.
    """
    (one,) = of_status("WAITING")
    vars(one).update(num_tokens=17, num_computed_tokens=0, skip_reading_prefix_cache=False, block_hashes=())
    vars(one).update({name: changed.pop(name) for name in list(changed) if name in vars(one)})
    pool = SimpleNamespace(get_num_free_blocks=lambda: free_then)
    scheduler = engine(pool=pool, **{"waiting": [one], **changed})
    hits = [SimpleNamespace(ref_cnt=count, is_null=False) for count in cached]
    vars(scheduler.kv_cache_manager.coordinator).update(
        find_longest_cache_hit=lambda hashes, most: ((hits,), 16),
        get_num_blocks_to_allocate=lambda *_, apply_admission_cap: needed if apply_admission_cap else 0,
    )
    blocks = EngineBlocks(scheduler)
    if is_tried:
        assert scheduler.kv_cache_manager.allocate_slots(one, 16) is None
    pool.get_num_free_blocks = lambda: free
    return blocks.starved


@pytest.mark.parametrize(
    ("counts", "changed", "expected"),
    [
        ((5, 2, 2), {}, 3),
        ((5, 2, 4), {}, 1),
        ((5, 2, 5), {}, None),
        # Those that others use it shares; the last one is taken out of the prefix cache.
        ((5, 0, 0, (1, 2, 0)), {}, 3),
        ((5, 0, 0, (1, 2, 0)), {"skip_reading_prefix_cache": True}, 5),
        # Its KV has come, so those are its own.
        ((1, 0, 0, (1, 1, 1, 1)), {"num_computed_tokens": 16}, 1),
        # vLLM wants more than it counts there.
        ((2, 2, 2), {}, 1),
        ((2, 2, 3), {}, None),
        # It waits for something else.
        ((5, 2, 2), {"is_tried": False}, None),
        ((5, 2, 2), {"status": SimpleNamespace(name="RUNNING")}, None),
        ((5, 2, 2), {"request_id": "held"}, None),
        ((5, 2, 2), {"max_num_running_reqs": 0}, None),
        ((5, 2, 2), {"waiting": []}, None),
        ((5, 2, 2), {"pause_state": Pause.NEW}, None),
    ],
)
def test_only_whom_vllm_has_refused_blocks_is_starved(
    counts: tuple[Any, ...], changed: dict[str, Any], expected: int | None
) -> None:
    """Nobody would end one that is not seen. One that waits for something else may begin at any moment."""
    assert starved(*counts, **changed) == (None if expected is None else ("r0", expected))


@pytest.mark.parametrize(
    ("state", "holds", "runs_held_kv", "expected"),
    [
        (0, "PREEMPTED", True, "r0"),
        (Pause.NEW, "PREEMPTED", True, "r0"),
        (Pause.NEW, "WAITING_FOR_REMOTE_KVS", True, None),
        (Pause.NEW, "PREEMPTED", False, None),
        (Pause.PAUSED_ALL, "PREEMPTED", True, None),
    ],
)
def test_a_pause_may_let_those_run_that_hold_kv(
    state: int, holds: str, runs_held_kv: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From vLLM 0.32 on. The others, of which the second one waits for blocks, it never does."""
    monkeypatch.setattr(queues, "installed_has", lambda change: runs_held_kv)
    scheduler = engine(kv_holding_waiting=of_status(holds), pause_state=state)
    scheduler.waiting = of_status("WAITING_FOR_FSM", "WAITING") if state else []
    assert EngineBlocks(scheduler).stalled[:1] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("status", "num_computed", "expected"),
    [
        ("FINISHED_STOPPED", TOKENS, True),
        ("FINISHED_LENGTH_CAPPED", TOKENS + 5, True),
        ("FINISHED_REPETITION", TOKENS, True),
        ("FINISHED_STOPPED", TOKENS - 1, False),
        ("FINISHED_ABORTED", TOKENS, False),
        ("FINISHED_IGNORED", TOKENS, False),
        ("FINISHED_ERROR", TOKENS, False),
        ("RUNNING", TOKENS, False),
    ],
)
def test_a_request_is_whole_if_it_ended_by_itself_with_its_prompt_computed(
    status: str, num_computed: int, expected: bool
) -> None:
    made = SimpleNamespace(
        status=SimpleNamespace(name=status), num_computed_tokens=num_computed, num_prompt_tokens=TOKENS
    )
    assert is_whole(made) is expected


# --------------------------------------------------------------------------------------------------------------- blocks


def block(name: str, *, is_null: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, is_null=is_null)


def manager(block_size: int = 4, skipped: int = 0, **blocks: list[Any]) -> SimpleNamespace:
    notes = {name: len(blocks[name]) for name in blocks}
    return SimpleNamespace(
        req_to_blocks=dict(blocks),
        num_cached_block=notes,
        free=lambda name: notes.pop(name, None),
        block_size=block_size,
        get_num_skipped_tokens=lambda num_tokens: min(skipped, num_tokens),
    )


def test_the_null_block_is_nobodys() -> None:
    """A window that has moved on holds it many times; if it were freed once, a request could get it."""
    a, null = block("a"), block("0", is_null=True)
    assert EngineBlocks(engine(manager(mine=[null, null, a]))).take("mine") == [a]


@pytest.mark.parametrize("knows_groups", [True, False])
def test_a_connector_is_told_of_an_end_with_every_block(
    make_module: Callable[..., ModuleType], knows_groups: bool
) -> None:
    """A connector of another package, with NIXL's inside it, may know one KV-cache group."""
    base = make_module(CONNECTOR_BASE.module, "class SupportsHMA:\n    pass").SupportsHMA
    told: list[Any] = []

    class Connector(base if knows_groups else object):  # type: ignore[misc]
        def request_finished_all_groups(self, one: Any, block_ids: Any) -> str:
            told.append(("all groups", one, block_ids))
            return "answer"

        def request_finished(self, one: Any, block_ids: Any) -> str:
            told.append(("one group", one, block_ids))
            return "answer"

    manager = SimpleNamespace(get_block_ids=lambda request_id: ([1, 2], [3]) if request_id == "r" else None)
    scheduler = SimpleNamespace(connector=Connector(), kv_cache_manager=manager)
    one = SimpleNamespace(request_id="r")
    assert tell_finished(scheduler, one) == "answer"
    assert told == [("all groups", one, ([1, 2], [3])) if knows_groups else ("one group", one, [1, 2])]


# -------------------------------------------------------------------------------------------------------------- reports


OUTPUTS = """
class KVConnectorOutput:
    def __init__(self):
        self.finished_sending = self.finished_recving = None
        self.invalid_block_ids = set()
        self.kv_connector_stats = self.kv_connector_worker_meta = None
"""


@pytest.fixture
def outputs(make_module: Callable[..., ModuleType]) -> ModuleType:
    return make_module("vllm.v1.outputs", OUTPUTS)


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_what_ranks_have_reported_reaches_the_engine(
    outputs: ModuleType, make_module: Callable[..., ModuleType], is_one_of_several: bool
) -> None:
    """Through pickle, and in a ``MultiConnector`` beside what other connectors report."""
    make_module("vllm.distributed.kv_transfer.kv_connector.v1.base", "class KVConnectorWorkerMetadata: pass")
    attributes._carrier.cache_clear()
    ranks = [pickle.loads(pickle.dumps(carry(Report({(1, rank)})))) for rank in range(2)]
    found = outputs.KVConnectorOutput()
    found.kv_connector_worker_meta = ranks[0].aggregate(ranks[1])
    if is_one_of_several:
        others = SimpleNamespace(metadata=object())
        found.kv_connector_worker_meta = SimpleNamespace(metadata=(others, None, found.kv_connector_worker_meta))
    reports = reports_of(SimpleNamespace(kv_connector_output=found))
    assert reports == Reports(report=Report({(1, 0), (1, 1)}))
    attributes._carrier.cache_clear()


def reported(**statuses: str) -> SimpleNamespace:
    """An engine whose requests have these states."""

    def one(name: str) -> SimpleNamespace:
        return SimpleNamespace(status=SimpleNamespace(name=name), is_finished=lambda: name.startswith("FINISHED"))

    return SimpleNamespace(requests={request_id: one(name) for request_id, name in statuses.items()})


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("FINISHED_ABORTED", ({"a"}, set())),
        ("WAITING_FOR_REMOTE_KVS", (set(), {"a"})),
        ("RUNNING", (set(), set())),
        ("WAITING", (set(), set())),
        ("PREEMPTED", (set(), set())),
    ],
)
def test_of_one_request_vllm_hears_what_its_state_allows(status: str, expected: tuple[set[str], set[str]]) -> None:
    """Several connectors (``MultiConnector``) may name it at once, and again: vllm#46240, vllm#51786."""
    step = SimpleNamespace(kv_connector_output=None)
    told = with_reports(reported(a=status), step, Reports({"a"}, {"a"}, set())).kv_connector_output
    assert (told.finished_sending, told.finished_recving) == expected


# ------------------------------------------------------------------------------------------------------------- failures


def test_what_clients_are_told_goes_with_the_ends_of_their_failed_requests() -> None:
    """With no other output, and not in place of what vLLM says."""

    def output(request_id: str, reason: str | None, stop_reason: Any = None) -> SimpleNamespace:
        finish_reason = None if reason is None else SimpleNamespace(name=reason)
        return SimpleNamespace(request_id=request_id, finish_reason=finish_reason, stop_reason=stop_reason)

    failed, others, fine = output("a", "ERROR"), output("b", "ERROR"), output("a", "STOP")
    said, on_its_way = output("a", "ERROR", "as vLLM says"), output("a", None)
    outputs = {
        0: SimpleNamespace(outputs=[failed, others, said]),
        1: SimpleNamespace(outputs=[fine, on_its_way]),
    }
    tell_reasons(outputs, {"a": "KV hand-over failed: cause=lease"})
    assert failed.stop_reason == "KV hand-over failed: cause=lease" and said.stop_reason == "as vLLM says"
    assert others.stop_reason is fine.stop_reason is on_its_way.stop_reason is None
    tell_reasons(outputs, {})


@pytest.mark.parametrize("has_kvcached", [True, False])
def test_what_is_mapped_counts_pages_in_use_and_in_reserve_in_every_buffer(has_kvcached: bool) -> None:
    """Not what kvcached's own figure says, which leaves the reserve out."""
    pages = SimpleNamespace(get_num_inuse_pages=lambda: 3, get_num_reserved_pages=lambda: 2)
    pool = SimpleNamespace(kv_cache_manager=elastic(page_allocator=pages)) if has_kvcached else None
    assert EngineBlocks(engine(pool=pool)).mapped_bytes() == (5 * 1024 * 8 if has_kvcached else 0)


@pytest.mark.parametrize(("num_alloced", "num_used"), [(1, 0), (4, 1), (0, 0)])
def test_neither_the_null_block_nor_a_cached_one_is_in_use(num_alloced: int, num_used: int) -> None:
    """An idle engine that says otherwise looks as if memory did not come back."""
    pages = SimpleNamespace(get_avail_physical_pages=lambda: 5)
    manager = elastic(page_allocator=pages, _get_num_alloced_blocks=lambda: num_alloced)
    cached = {"_evictable_blocks": {1: 1, 2: 2} if num_alloced > 1 else {}}
    pool = SimpleNamespace(kv_cache_manager=manager, num_gpu_blocks=10, get_num_free_blocks=lambda: 6, **cached)
    usage = EngineBlocks(engine(pool=pool)).usage()
    assert (usage.num_free, usage.num_used, usage.free_bytes) == (6, num_used, 5 * 1024 * 8)


@pytest.mark.parametrize(("target", "asked"), [(0, []), (1 << 21, [0])])
def test_kvcached_looks_at_a_limit_that_was_changed(target: int, asked: list[int]) -> None:
    """By allocating nothing. 0: it was never changed."""
    found: list[int] = []
    manager = elastic(page_allocator=SimpleNamespace(get_resize_target=lambda: target), alloc=found.append)
    for pool in (SimpleNamespace(kv_cache_manager=manager), None):
        EngineBlocks(engine(pool=pool)).apply_limit()
    assert found == asked


@pytest.mark.parametrize(
    ("running", "needs_others", "is_stalled"), [([], False, True), ([], True, False), (["one"], False, False)]
)
def test_only_who_would_run_with_more_memory_is_stalled(
    monkeypatch: pytest.MonkeyPatch, running: list[str], needs_others: bool, is_stalled: bool
) -> None:
    """One that waits for another engine all the same is not worth what others would give up."""
    said: list[Want] = []
    free = {"get_num_free_pages": 100, "get_avail_physical_pages": 1, "get_num_reserved_pages": 1}
    pages = SimpleNamespace(**{name: lambda number=number: number for name, number in free.items()})
    pool = SimpleNamespace(kv_cache_manager=elastic(page_allocator=pages))
    monkeypatch.setattr(EngineBlocks, "starved", ("r1", 3))
    blocks = EngineBlocks(engine(pool=pool, running=running))
    vars(blocks)["_wants"] = SimpleNamespace(say=said.append)
    assert blocks.tell_neighbours(lambda one: needs_others and one == "r1")
    assert said == [Want(24, is_stalled)]
