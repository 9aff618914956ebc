# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers keep KV in several ways: full attention, sliding windows and states. Random schedules.

Real: vLLM's schedulers, this package, NIXL. The model computes bytes that follow from all tokens so far, and before it
computes a token it looks at everything that the token depends on, wherever it came from: computed here, cached, or
handed over. Faults that are planted have to show.

Blocks that have left a window are freed while prefill still computes, and a state is overwritten by every step. So
prefill tells, per KV-cache group, the first token whose KV it has kept, and decode takes what its next token needs.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.groups_node import GroupsNode, runs_rightly
from support.nodes import DECODE_FILLING, DECODE_ID, PREFILL_FILLING, PREFILL_ID, RESERVED, SEND, nodes, prompt
from support.planting import Faults, nothing
from support.waiting import until
from vllm.v1.request import Request, RequestStatus

from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.vllm.adapter import nixl_worker
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has
from kvcached_nixl.vllm.patches import arrival
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import BlockRange, Keeps, KVGroup
from kvcached_nixl.worker.geometry.descriptors import Route
from kvcached_nixl.worker.transfer import topology

BLOCK, WINDOW = 16, 48
WIDE = -WINDOW
"""A window of as many tokens, in blocks of twice as many tokens of half as many heads, as in Gemma 4."""
GEOMETRY = dataclasses.replace(RESERVED, block_size=BLOCK, num_blocks=50, reserved_blocks=53, num_pools=2, groups=3)
needs_states = pytest.mark.skipif(not installed_has(HITS_DIVERGE), reason="this vLLM cannot load states")
WITH_WINDOWS = {
    "a full one and a window": (None, WINDOW),
    "a window alone": (WINDOW,),
    "a full one and a window of wide blocks": (None, WIDE),
}
WITH_STATES = {
    "a state first": ("align", None, WINDOW),
    "a state last": (None, WINDOW, "align"),
    "a state without prefix caching": (None, "none", WINDOW),
}
ORDERS: dict[str, tuple[int | str | None, ...]] = {**WITH_WINDOWS, **WITH_STATES}
REQUESTS, TURNS = 10, 160
DEFECTS = {FailureCause.DEFECT, FailureCause.PROTOCOL, FailureCause.RANGE, FailureCause.CHECKSUM, FailureCause.REFUSED}
"""No hand-over fails for these, whatever happens to its request: decode would recompute, and be right all the same."""


class WrongBytes(Exception):
    """A token was about to be computed from bytes that are not what it depends on."""


class Node(GroupsNode):
    """Looks before it computes."""

    def compute_tokens(self, request: Request, blocks: list[list[int]], begin: int, count: int) -> None:
        token_ids = list(request.all_token_ids[:begin])
        for group in self.with_kv:
            window = self.windows[group]
            first = 0 if window is None else max(0, begin - int(window) + 1)
            for position, cell, expected in self.places(token_ids, first, blocks, group):
                if cell is None or not torch.equal(cell, expected):
                    found = "let go of" if cell is None else "wrong"
                    raise WrongBytes(
                        f"{request.request_id} at {begin}: group {group}, token {position} {found}; {blocks}"
                    )
        for group in self.with_states:
            if not self.has_state(group, blocks, token_ids):
                raise WrongBytes(f"{request.request_id} at {begin}: the state of group {group}")
        super().compute_tokens(request, blocks, begin, count)


@dataclasses.dataclass
class Schedule:
    """One random schedule, drawn from a seed."""

    make: Callable[..., Node]
    seed: int
    order: tuple[int | str | None, ...]
    verify_fraction: float = 1.0
    split: int = 1
    num_drafts: int = 0
    started: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        dice = self.dice
        self.mode = dice.choice(["pull", "push"])
        order = tuple(WINDOW if kind == WIDE else kind for kind in self.order)
        split = self.split
        geometry = dataclasses.replace(
            GEOMETRY,
            groups=len(order),
            states=tuple(place for place, kind in enumerate(order) if isinstance(kind, str)),
            wide=tuple(place for place, kind in enumerate(self.order) if kind == WIDE),
            block_size=BLOCK // split,
            split=split,
            num_blocks=GEOMETRY.num_blocks * split,
            reserved_blocks=GEOMETRY.reserved_blocks * split,
        )

        def engine(filling: int) -> Node:
            return self.make(
                filling,
                dataclasses.replace(geometry, contiguous=dice.random() < 0.5),
                windows=order,
                policy="recompute",
                prefix_caching="none" not in order,
                tokens_a_step=dice.choice([None, 24, 40, 64]),
                transfer_mode=self.mode,
                memory_path=dice.choice(["direct", "direct", "host"]),
                verify_fraction=self.verify_fraction,
                num_drafts=self.num_drafts,
            )

        self.prefill, self.decode = engine(PREFILL_FILLING), engine(DECODE_FILLING)
        self.waiting: dict[str, tuple[int, int, int]] = {}

    def run(self) -> None:
        left = REQUESTS
        for _ in range(TURNS):
            kind = self.dice.choice(["start", "prefill", "prefill", "decode", "decode", "decode", "trouble"])
            if kind == "start" and left:
                left -= 1
                self._start(REQUESTS - left)
            elif kind == "trouble":
                self._trouble()
            else:
                (self.prefill if kind == "prefill" else self.decode).step()
            self._follow()
        self.decode.step_until(self._is_over, self.prefill)
        self.prefill.rest(self.decode)

    def _start(self, number: int) -> None:
        # Few beginnings, so that prefixes are found in the caches; and lengths around the window.
        around = WINDOW + self.dice.randint(-1, BLOCK + 1)
        family, num_tokens = self.dice.randrange(3), self.dice.choice([self.dice.randint(3, 150), around])
        name = f"cmpl-{number}-0"
        prefill_id, decode_id = f"{name}-aaaaaaaa", f"{name}-dddddddd"
        shape = family * 40, num_tokens, self.dice.randint(1, 20)
        if self.dice.random() < 0.3 and self._is_cached(decode_id, shape):
            return
        params: dict[str, Any] = {**SEND, "transfer_id": name}
        if self.mode == "push" and self.dice.random() < 0.5:
            self._decode(decode_id, {**self.prefill.address(), "transfer_id": name}, shape)
        else:
            self.waiting[prefill_id] = shape
        # One that goes on gives back what its window has left: that is not offered.
        self.prefill.add(
            prefill_id, params, self.dice.choice([1, 1, 1, 20]), num_tokens=num_tokens, first_token=shape[0]
        )

    def _is_cached(self, decode_id: str, shape: tuple[int, int, int]) -> bool:
        """Decode fetches what prefill has cached of a prompt, without a step there, and computes the rest."""
        answer = self.prefill.looked_up(prompt(*shape[:2]), BLOCK)
        until(lambda: answer.done() or not self.prefill.step())
        params = answer.result()
        if params.get("do_remote_prefill"):
            self._decode(decode_id, json.loads(json.dumps(params)), shape)
        return "do_remote_prefill" in params

    def _follow(self) -> None:
        """Decode's requests follow prefill's answers."""
        for prefill_id in [one for one in self.waiting if one in self.prefill.ended or not self._lives(prefill_id=one)]:
            shape = self.waiting.pop(prefill_id)
            params = self.prefill.transfer_params.pop(prefill_id, None)
            self._decode(prefill_id.replace("aaaaaaaa", "dddddddd"), params, shape)

    def _lives(self, prefill_id: str) -> bool:
        request = self.prefill.scheduler.requests.get(prefill_id)
        return request is not None and not request.is_finished()

    def _decode(self, decode_id: str, params: Any, shape: tuple[int, int, int]) -> None:
        first_token, num_tokens, max_tokens = shape
        self.decode.add(decode_id, params, max_tokens, num_tokens=num_tokens, first_token=first_token)
        self.started[decode_id] = "length"

    def _trouble(self) -> None:
        node = self.dice.choice([self.prefill, self.decode])
        running = sorted(one.request_id for one in node.scheduler.running)
        living = sorted(one for one, request in node.scheduler.requests.items() if not request.is_finished())
        if running and self.dice.random() < 0.6:
            node.preempt(self.dice.choice(running))
        elif living and self.dice.random() < 0.4:
            name = self.dice.choice(living)
            node.abort(name)
            self.started.pop(name, None)

    def _is_over(self) -> bool:
        self._follow()
        return not self.waiting and set(self.started) <= set(self.decode.ended)


@pytest.fixture
def make(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Node]]:
    # This model computes with the states that vLLM's scheduler names, whatever drafts them.
    unserved = nixl_worker.unserved_states
    served = lambda *found: [one for one in unserved(*found) if "speculative" not in one[0]]  # noqa: E731
    monkeypatch.setattr(nixl_worker, "unserved_states", served)
    with nodes(Node, tmp_path, log) as one:
        yield one


SPLIT = pytest.mark.parametrize("split", [2, pytest.param(4, marks=pytest.mark.long)])
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(one, marks=pytest.mark.long) for one in range(1, 8))])


def is_right(schedule: Schedule) -> None:
    schedule.run()
    assert {one: schedule.decode.ended[one] for one in schedule.started} == schedule.started
    assert not DEFECTS & {FailureCause(one) for one in schedule.decode.account["kvcached_nixl_failures"]}
    assert RequestStatus.FINISHED_ERROR not in {one.status for one in schedule.decode.scheduler.requests.values()}
    assert schedule.decode.received, "nothing was handed over"


@SEEDS
@pytest.mark.parametrize("order", [*WITH_WINDOWS, *(pytest.param(one, marks=needs_states) for one in WITH_STATES)])
def test_every_token_is_computed_from_what_it_depends_on(order: str, seed: int, make: Callable[..., Node]) -> None:
    is_right(Schedule(make, seed, ORDERS[order]))


CACHES = [one for one in WITH_STATES if "without" not in one]


@pytest.mark.parametrize("order", [*WITH_WINDOWS, *(pytest.param(one, marks=needs_states) for one in CACHES)])
def test_what_prefill_has_cached_is_handed_over_without_a_step(order: str, make: Callable[..., Node]) -> None:
    schedule = Schedule(make, 0, ORDERS[order])
    schedule.prefill.add(PREFILL_ID, None, 1, num_tokens=6 * BLOCK + 1)
    schedule.prefill.step_until(lambda: PREFILL_ID in schedule.prefill.ended)
    assert schedule._is_cached(DECODE_ID, (0, 7 * BLOCK + 1, 4))
    schedule.decode.step_until(schedule._is_over, schedule.prefill)
    assert DECODE_ID in schedule.decode.received and not schedule.decode.account["kvcached_nixl_failures"]
    schedule.prefill.rest(schedule.decode)


@needs_states
@SEEDS
@SPLIT
def test_and_where_a_block_is_several_kernel_blocks(split: int, seed: int, make: Callable[..., Node]) -> None:
    """A state lies across all of them, in the cache and in a slab."""
    order = [*WITH_STATES.values()][seed % len(WITH_STATES)]
    is_right(Schedule(make, seed, order, split=split))


@needs_states
@SEEDS
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_and_where_vllm_may_draft(num_drafts: int, seed: int, make: Callable[..., Node]) -> None:
    """A request has blocks for the states behind drafts, too, and no draft is computed with a prompt's last token."""
    order = [*WITH_STATES.values()][seed % len(WITH_STATES)]
    is_right(Schedule(make, seed, order, num_drafts=num_drafts))


@needs_states
@pytest.mark.parametrize("num_tokens", [BLOCK + 1, 4 * BLOCK + 1])
def test_a_state_that_is_taken_away_before_its_request_runs_leaves_nothing(
    num_tokens: int, make: Callable[..., GroupsNode]
) -> None:
    """The weights change while the request has its KV and waits for a free block. vLLM's notes of its blocks have to go
    with them: it would later free the block that has the new state."""
    geometry = dataclasses.replace(GEOMETRY, groups=2, states=(1,))
    prefill, decode = (
        make(filling, geometry, windows=(None, "align"), policy="recompute")
        for filling in (PREFILL_FILLING, DECODE_FILLING)
    )
    params = prefill.prefilled(num_tokens=num_tokens)
    decode.add(DECODE_ID, params, 2 * BLOCK, num_tokens=num_tokens)
    decode.step_until(lambda: DECODE_ID in decode.received, prefill)
    pool = decode.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    decode.step()
    assert decode.status(DECODE_ID) == RequestStatus.WAITING, "vLLM has noticed the KV, and has no block to go on"
    decode.side_of_engine.revocations.weights_changed()
    pool.free_blocks(others)
    runs_rightly(prefill, decode, num_tokens)
    prefill.rest(decode)


@needs_states
@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("num_drafts", [0, 2, 3])
def test_a_request_that_lacks_the_blocks_of_its_drafts_states_is_seen(
    num_drafts: int, mode: str, make: Callable[..., Node]
) -> None:
    """It would wait for ever: nobody would give way to it, and it would not starve."""
    geometry = dataclasses.replace(GEOMETRY, groups=4, states=(0, 1, 2))
    more = {"prefix_caching": mode == "align", "num_drafts": num_drafts}
    node = make(DECODE_FILLING, geometry, windows=(mode, mode, mode, None), policy="fail", **more)
    pool = node.scheduler.kv_cache_manager.block_pool
    node.add(DECODE_ID, None, 4, num_tokens=40)
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    node.step()
    while node.status(DECODE_ID) == RequestStatus.WAITING:
        assert node.side_of_engine.engine.blocks.starved is not None
        pool.free_blocks([taken.pop()])
        node.step()
    pool.free_blocks(taken)
    node.step_until(lambda: DECODE_ID in node.ended)


@pytest.mark.parametrize(
    ("extra", "ends"), [({"allocation_timeout": 0.2}, "error"), ({"give_way_after": 0.2}, "length")]
)
def test_a_request_that_lacks_only_the_blocks_of_its_first_chunk_is_seen(
    extra: dict[str, float], ends: str, make: Callable[..., Node]
) -> None:
    """vLLM wants a block for each token that it computes at a time, of which a window soon keeps few."""
    geometry = dataclasses.replace(GEOMETRY, groups=2, num_blocks=80, reserved_blocks=90)
    node, num_tokens = make(PREFILL_FILLING, geometry, windows=(None, WINDOW), **extra), 20 * BLOCK
    pool = node.scheduler.kv_cache_manager.block_pool
    if ends == "length":
        node.prefilled("cmpl-o-0-aaaaaaaa", first_token=100, num_tokens=num_tokens)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 30)
    node.add(PREFILL_ID, None, 1, num_tokens=num_tokens)
    node.step_until(lambda: PREFILL_ID in node.ended)
    assert node.ended[PREFILL_ID] == ends
    pool.free_blocks(taken)
    node.rest()


# -------------------------------------------------------------------------------------------------------------- faults

FAULTS = Faults()


@FAULTS.around(KVGroup, "range")
def the_superseded_slot(real: Any, self: KVGroup, blocks: list[int], first_token: int, end_token: int) -> BlockRange:
    """Prefill names the block of an earlier chunk's state."""
    place = (end_token - 1) // self.table_block_size - 1
    if self.keeps is Keeps.STATE and place >= 0 and blocks[place]:
        return BlockRange(end_token - 1, tuple(blocks[place : place + 1]))
    return real(self, blocks, first_token, end_token)  # type: ignore[no-any-return]


@FAULTS.around(KVGroup, "range")
def the_slot_of_a_draft(real: Any, self: KVGroup, blocks: list[int], first_token: int, end_token: int) -> BlockRange:
    """Prefill names the block of the state behind the last draft."""
    if self.keeps is Keeps.STATE and blocks:
        return BlockRange(end_token - 1, tuple(blocks[-1:]))
    return real(self, blocks, first_token, end_token)  # type: ignore[no-any-return]


FAULTS.replace("a_prompts_last_token_has_drafts", arrival, "draft_behind_prompts", nothing)


@FAULTS.around(Route, "__init__")
def the_end_of_a_state_is_not_moved(real: Any, self: Route, local: Any, remote: Any) -> None:
    if local.padded_bytes:
        local, remote = (
            msgspec.structs.replace(one, padded_bytes=0, cell_bytes=one.cell_bytes - 8) for one in (local, remote)
        )
    real(self, local, remote)


@FAULTS.around(topology, "ranges")
def a_state_is_not_moved(real: Any, routes: Any, groups: Any, end_token: int) -> Any:
    kept = [
        (here, there, end_token if len(here.block_ids) <= 1 and first == end_token - 1 else first)
        for here, there, first in groups
    ]
    return real(routes, kept if any(first < end_token for *_, first in kept) else groups, end_token)


@FAULTS.around(topology, "ranges")
def a_cached_prefix_counts_for_the_state(real: Any, routes: Any, groups: Any, end_token: int) -> Any:
    """Decode has some of the prompt, and leaves out the state that is behind the rest."""
    starts = [first for here, _, first in groups if len(here.block_ids) > 1 or first < end_token - 1]
    kept = [
        (here, there, end_token if starts and min(starts) and first == end_token - 1 else first)
        for here, there, first in groups
    ]
    return real(routes, kept, end_token)


@FAULTS.around(FetchRequest, "groups")
def groups_are_mixed_up(real: Any, self: FetchRequest, block_ids: Any, first_token: int) -> Any:
    """The first block of two groups change places where decode is told to put them."""
    found = list(real(self, block_ids, first_token))
    ids = [list(group.block_ids) for group in found[:2]]
    if ids[0] and ids[1]:
        ids[0][-1], ids[1][-1] = ids[1][-1], ids[0][-1]
        found[:2] = (BlockRange(one.first_token, tuple(new)) for one, new in zip(found, ids, strict=False))
    return tuple(found)


def windows_changed(
    found: Any, self: FetchRequest, fewest: int, change: Callable[[BlockRange, int], BlockRange]
) -> Any:
    """Where decode puts the windows that have at least ``fewest`` blocks; ``change`` gets tokens in a block."""
    groups = zip(found, self.engine.groups.all, strict=True)
    return tuple(
        change(one, group.table_block_size) if group.keeps is Keeps.WINDOW and len(one.block_ids) >= fewest else one
        for one, group in groups
    )


@FAULTS.around(FetchRequest, "groups")
def windows_begin_too_late(real: Any, self: FetchRequest, *arguments: Any) -> Any:
    """Decode leaves out the oldest block that the window still reaches."""
    later = lambda one, size: BlockRange(one.first_token + size, one.block_ids[1:])  # noqa: E731
    return windows_changed(real(self, *arguments), self, 3, later)


@FAULTS.around(FetchRequest, "groups")
def a_windows_blocks_are_one_too_old(real: Any, self: FetchRequest, *arguments: Any) -> Any:
    """Each arrives where the one before it belongs."""
    older = lambda one, _: BlockRange(one.first_token, (*one.block_ids[1:], one.block_ids[0]))  # noqa: E731
    return windows_changed(real(self, *arguments), self, 2, older)


@FAULTS.instead(arrival, "align_chunks")
def chunks_end_in_the_middle_of_blocks(scheduler: Any) -> None:
    """And the state of a token there is cached as that of the block's end."""
    scheduler.cache_config.block_size = BLOCK // 2


@needs_states
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, make: Callable[..., Node]) -> None:
    """Verification would notice some of them first, and the request would be computed again: it is off here."""
    for seed in range(40):
        order = [*WITH_STATES.values()][seed % len(WITH_STATES)]
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[fault](patch)
            try:
                Schedule(make, seed, order, verify_fraction=0.0, num_drafts=seed % 2 * 3).run()
            except (WrongBytes, AssertionError):
                return
    pytest.fail("no schedule showed it")
