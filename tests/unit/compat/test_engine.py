# SPDX-License-Identifier: Apache-2.0
"""compat/engine.py: vLLM's scheduler read by name, on stand-ins; the real one is met in tests/contract."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.compat.attached import attach_push
from kvcached_nixl.compat.connector import num_kv_cache_groups
from kvcached_nixl.compat.engine import (
    blocks_of,
    give_back,
    halves,
    is_whole,
    scheduled,
    take_blocks,
)
from kvcached_nixl.errors import ContractChanged

PROMPT = 10


def cached(*requests: tuple[str, tuple[list[int], ...] | None, int], resumed: tuple[str, ...] = ()) -> SimpleNamespace:
    """vLLM's ``CachedRequestData``: requests that its workers know, as (id, new blocks, tokens before the step)."""
    return SimpleNamespace(
        req_ids=[name for name, _, _ in requests],
        new_block_ids=[blocks for _, blocks, _ in requests],
        num_computed_tokens=[computed for _, _, computed in requests],
        resumed_req_ids=set(resumed),
    )


def output(new: list[SimpleNamespace], known: SimpleNamespace, tokens: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=known, num_scheduled_tokens=tokens)


def test_every_request_of_a_step_is_there_with_its_tokens_at_the_end() -> None:
    """New ones, those that go on, and those that start over: for these the blocks are not further ones."""
    new = SimpleNamespace(req_id="new", block_ids=([1, 2], [3]), num_computed_tokens=4)
    known = cached(("on", ([5], []), 8), ("full", None, 9), ("again", ([6, 7], [8]), 0), resumed=("again",))
    assert list(scheduled(output([new], known, {"new": 3, "on": 4, "full": 1, "again": 2}))) == [
        ("new", ([1, 2], [3]), True, 7),
        ("on", ([5], []), False, 12),
        ("full", (), False, 10),
        ("again", ([6, 7], [8]), True, 2),
    ]


def test_an_idle_step_has_none() -> None:
    assert list(scheduled(output([], cached(), {}))) == []


def test_lists_that_do_not_belong_together_are_an_error() -> None:
    """Cut to the shortest, a request would be forgotten."""
    known = cached(("a", None, 1), ("b", None, 2))
    known.num_computed_tokens.pop()
    with pytest.raises(ValueError, match="zip"):
        list(scheduled(output([], known, {"a": 1, "b": 1})))


@pytest.mark.parametrize(
    ("status", "computed", "expected"),
    [
        ("FINISHED_STOPPED", PROMPT, True),
        ("FINISHED_LENGTH_CAPPED", PROMPT + 3, True),
        ("FINISHED_REPETITION", PROMPT, True),
        ("FINISHED_STOPPED", PROMPT - 1, False),
        ("FINISHED_ABORTED", PROMPT, False),
        ("FINISHED_ERROR", PROMPT, False),
        ("FINISHED_IGNORED", PROMPT, False),
        ("RUNNING", PROMPT, False),
    ],
)
def test_a_request_is_whole_if_it_ended_by_itself_with_its_prompt_computed(
    status: str, computed: int, expected: bool
) -> None:
    """A preempted request that is ended has computed nothing."""
    request = SimpleNamespace(
        status=SimpleNamespace(name=status), num_computed_tokens=computed, num_prompt_tokens=PROMPT
    )
    assert is_whole(request) is expected


def nixl(push: Any) -> SimpleNamespace:
    """A NIXL connector of the engine core, with our half of a push."""
    half = SimpleNamespace()
    attach_push(half, push)
    return SimpleNamespace(connector_scheduler=half, connector_worker=None)


def engine(connector: Any) -> SimpleNamespace:
    return SimpleNamespace(connector=connector)


def test_the_pushes_of_an_engine_are_those_of_its_connectors_however_deep() -> None:
    """``MultiConnector`` holds others, which may hold others; most of them push nothing."""
    pulls, stock, other = nixl(None), SimpleNamespace(connector_scheduler=SimpleNamespace()), SimpleNamespace()
    assert list(halves(engine(nixl("one")))) == ["one"]
    inner = SimpleNamespace(_connectors=[other, nixl("two")])
    multi = SimpleNamespace(_connectors=[pulls, nixl("one"), stock, inner])
    assert sorted(halves(engine(multi))) == ["one", "two"]


@pytest.mark.parametrize(
    "scheduler",
    [
        SimpleNamespace(),
        engine(None),
        engine(SimpleNamespace()),
        engine(nixl(None)),
        engine(SimpleNamespace(connector_scheduler=None, connector_worker=None)),
        engine(SimpleNamespace(_connectors=[])),
    ],
    ids=["no attribute", "none", "another", "pulls", "halves", "empty"],
)
def test_an_engine_without_a_push_has_none(scheduler: SimpleNamespace) -> None:
    """Also one whose scheduler does not have a connector at all."""
    assert list(halves(scheduler)) == []


class Pool:
    """vLLM's ``BlockPool``, or the one that kvcached puts in its place."""

    def __init__(self) -> None:
        self.freed: list[list[Any]] = []

    def free_blocks(self, blocks: Any) -> None:
        self.freed.append(list(blocks))


def managing(*managers: SimpleNamespace) -> tuple[SimpleNamespace, Pool]:
    pool = Pool()
    coordinator = SimpleNamespace(single_type_managers=managers)
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator, block_pool=pool)), pool


def manager(**blocks: list[str]) -> SimpleNamespace:
    return SimpleNamespace(req_to_blocks=dict(blocks), num_cached_block={name: len(blocks[name]) for name in blocks})


def test_blocks_are_taken_from_a_request_and_given_back_as_vllm_would() -> None:
    """Last first, so that a prefix stays longest; other requests keep theirs, and nothing is freed before."""
    first, second = manager(mine=["a", "b", "c"], other=["d"]), manager(mine=["e", "f"], other=[])
    scheduler, pool = managing(first, second)
    taken = take_blocks(scheduler, "mine")
    assert taken == ["c", "b", "a", "f", "e"]
    assert pool.freed == []
    assert (first.req_to_blocks, second.req_to_blocks) == ({"other": ["d"]}, {"other": []})
    assert (first.num_cached_block, second.num_cached_block) == ({"other": 1}, {"other": 0})
    give_back(scheduler, taken)
    assert pool.freed == [["c", "b", "a", "f", "e"]]


def test_a_request_without_blocks_has_none_to_take() -> None:
    scheduler, _ = managing(manager(other=["d"]))
    assert take_blocks(scheduler, "mine") == []


def test_a_changed_scheduler_is_refused_by_the_name_that_is_gone() -> None:
    """A default in its place would let blocks be reused while they are read."""
    scheduler, _ = managing(SimpleNamespace(num_cached_block={}))
    with pytest.raises(ContractChanged, match="req_to_blocks"):
        take_blocks(scheduler, "mine")
    scheduler, _ = managing(SimpleNamespace(req_to_blocks={}))
    with pytest.raises(ContractChanged, match="num_cached_block"):
        take_blocks(scheduler, "mine")
    for function in (take_blocks, give_back):
        with pytest.raises(ContractChanged, match="kv_cache_manager"):
            function(SimpleNamespace(), [])  # type: ignore[arg-type]
    with pytest.raises(ContractChanged, match="block_pool"):
        give_back(SimpleNamespace(kv_cache_manager=SimpleNamespace()), [])
    with pytest.raises(ContractChanged, match="kv_cache_config"):
        num_kv_cache_groups(SimpleNamespace())


def test_groups_are_counted_and_block_ids_are_those_of_vllm() -> None:
    config = SimpleNamespace(kv_cache_groups=["full", "window"])
    assert num_kv_cache_groups(SimpleNamespace(kv_cache_config=config)) == 2
    assert blocks_of(SimpleNamespace(get_block_ids=lambda: ([1, 2], [3]))) == ([1, 2], [3])
