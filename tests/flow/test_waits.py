# SPDX-License-Identifier: Apache-2.0
"""How long requests wait: as long as vLLM's own where something goes on, and not for ever where nothing does (R4)."""

from __future__ import annotations

import pytest
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Request, Status
from support.flow_pair import BLOCKS_EACH, DIRECTIONS, PROMPT, PULL, PUSH, Pair, is_right, kind, prompt

from kvcached_nixl.scheduler.giving_way import VAIN_TIMEOUTS
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.worker.prefill.registry import SPARED_SECONDS
from kvcached_nixl.worker.prefill.writer import PROBE_SECONDS
from kvcached_nixl.worker.transfer_thread import STANDING_SECONDS

ALLOCATION_SECONDS = 20.0
LONG = 10 * TIMEOUT_SECONDS


def small(mode: TransferMode, **more: object) -> Pair:
    """A pair whose decode has blocks for two prompts."""
    room = {"num_blocks": 1 + 2 * (BLOCKS_EACH + 1), "caches_prefixes": False, **more}
    decode = kind(**{"allocation_seconds": ALLOCATION_SECONDS, **room})
    pair = Pair(mode, kind(num_blocks=200, caches_prefixes=False), decode)
    pair.acquaint()
    return pair


def serve(pair: Pair, *found: Request) -> None:
    pair.settle()
    for one in found:
        assert is_right(one)
    assert not pair.causes()


# ------------------------------------------------------------------------------------------------ queued on decode


def test_what_was_asked_for_at_once_queues_as_long_on_both_sides() -> None:
    """Prefill begins few prompts that decode has not registered for, and waits for decode that wants them."""
    pair = Pair(
        PUSH,
        kind(num_blocks=64, caches_prefixes=False, most_unclaimed_tokens=2 * len(PROMPT), allocation_seconds=20.0),
        kind(num_blocks=1 + 2 * (BLOCKS_EACH + 1), caches_prefixes=False, allocation_seconds=20.0),
    )
    pair.acquaint()
    asked = []
    for number in range(8):
        params = pair.meet(transfer_id=f"t{number}")
        found = pair.ask_decode(params, prompt(number))
        asked.append((pair.ask_prefill(prompt(number), transfer_id=f"t{number}"), found))
        if number in (0, 2):
            # From the first one prefill knows that its router asks both at once.
            pair.pass_time(2.0)
            pair.decode.admits = False
    pair.pass_time(LONG)
    assert [bool(upstream.num_computed) for upstream, _ in asked] == [True] * 3 + [False] * 5
    assert not pair.causes() and not pair.prefill.is_moving, "it rests"
    pair.decode.admits = True
    pair.pass_time(30.0)
    serve(pair, *(found for _, found in asked))


def test_an_engine_that_takes_no_steps_any_more_keeps_prefills_memory_for_a_while_only() -> None:
    """It is paused, or hangs; its workers would renew its leases for ever."""
    pair = small(PULL)
    upstream = pair.ask_prefill()
    pair.settle()
    pair.decode.admits = False
    found = pair.ask_decode(upstream.answer)
    pair.settle()
    step, pair.decode.step = pair.decode.step, lambda: False  # type: ignore[method-assign,assignment]
    pair.pass_time(STANDING_SECONDS - 5)
    assert upstream.request_id in pair.prefill.requests
    pair.pass_time(LEASE_SECONDS + 10)
    assert not pair.prefill.requests
    pair.decode.step, pair.decode.admits = step, True  # type: ignore[method-assign]
    pair.settle()
    assert found.status is Status.STOPPED and not found.num_external and pair.causes() == {"lease": 1}


# -------------------------------------------------------------------------------------------- queued on prefill (push)


def registered(pair: Pair, count: int = 2) -> list[tuple[Request, Request]]:
    """Requests of decode that have their blocks, before prefill has begun any of them."""
    pair.prefill.admits = False
    asked = []
    for seed in range(count):
        upstream = pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}")
        asked.append((upstream, pair.ask_decode(pair.meet(transfer_id=f"t{seed}"), prompt(seed))))
    pair.settle()
    assert all(found.status is Status.REMOTE for _, found in asked)
    return asked


def test_decode_does_not_wait_for_a_prefill_that_stands_still() -> None:
    """Its engine takes no steps, though its workers answer."""
    pair = small(PUSH, recomputes=False)
    asked = registered(pair)
    pair.pass_time(LONG)
    step, pair.prefill.step = pair.prefill.step, lambda: False  # type: ignore[method-assign,assignment]
    pair.pass_time(STANDING_SECONDS - 5)
    assert all(found.status is Status.REMOTE for _, found in asked)
    pair.pass_time(TIMEOUT_SECONDS + 10)
    assert all(found.status is Status.ERROR for _, found in asked)
    assert pair.causes() == {"deadline": 2}
    pair.prefill.step, pair.prefill.admits = step, True  # type: ignore[method-assign]
    pair.settle()


def test_decode_does_not_wait_for_a_prefill_that_is_paused() -> None:
    """It takes steps all the same: to ask whether decode has registered for a prompt that has not begun."""
    pair = Pair(
        PUSH,
        kind(num_blocks=64, caches_prefixes=False, most_unclaimed_tokens=len(PROMPT), allocation_seconds=20.0),
        kind(caches_prefixes=False, recomputes=False),
    )
    pair.acquaint()
    pair.ask_decode(pair.meet(transfer_id="at once"), prompt(8))
    pair.ask_prefill(prompt(8), transfer_id="at once")
    pair.ask_prefill(prompt(7), transfer_id="left waiting")
    pair.pass_time(2.0)
    unclaimed = pair.ask_prefill(prompt(6), transfer_id="unclaimed")
    pair.settle()
    ((upstream, found),) = registered(pair, 1)
    assert unclaimed.status is upstream.status is Status.WAITING
    pair.prefill.admits, pair.prefill.is_paused = True, True
    pair.prefill.handover.revocations.paused(grace_seconds=0.0, clears=False)
    pair.pass_time(STANDING_SECONDS - 5)
    assert found.status is Status.REMOTE
    pair.pass_time(TIMEOUT_SECONDS + 10)
    assert found.status is Status.ERROR and pair.causes() == {"deadline": 1}
    pair.prefill.is_paused = False
    pair.prefill.handover.revocations.resumed()
    pair.settle()
    assert unclaimed.status is upstream.status is Status.STOPPED


def test_a_decode_that_is_paused_keeps_prefills_memory_for_a_while_only() -> None:
    """It takes steps all the same: prefill says again and again that it goes on with another request."""
    pair = small(PUSH)
    upstream = pair.ask_prefill(prompt(5))
    pair.settle()
    ((_, waiting),) = registered(pair, 1)
    pair.decode.admits = False
    found = pair.ask_decode(upstream.answer, prompt(5))
    pair.settle()
    pair.decode.is_paused = True
    pair.decode.handover.revocations.paused(grace_seconds=0.0, clears=False)
    pair.pass_time(STANDING_SECONDS - 5)
    assert upstream.request_id in pair.prefill.requests
    pair.pass_time(LEASE_SECONDS + 10)
    assert upstream.request_id not in pair.prefill.requests
    pair.decode.is_paused, pair.decode.admits, pair.prefill.admits = False, True, True
    pair.decode.handover.revocations.resumed()
    pair.settle()
    assert (found.num_external, waiting.num_external) == (0, len(PROMPT)) and pair.causes() == {"lease": 1}


def test_decode_does_not_wait_for_a_request_that_prefill_has_never_heard_of() -> None:
    pair = small(PUSH, recomputes=False)
    found = pair.ask_decode(pair.meet(transfer_id="t"))
    pair.pass_time(TIMEOUT_SECONDS - 5)
    assert found.status is Status.REMOTE
    pair.pass_time(10)
    assert found.status is Status.ERROR and pair.causes() == {"deadline": 1}


def test_a_heartbeat_of_somebody_else_moves_no_deadline() -> None:
    pair = small(PUSH, recomputes=False)
    found = pair.ask_decode(pair.meet(transfer_id="t"))
    pair.settle()
    attempt = list(pair.decode.attempts)[-1]
    for _ in range(8):
        pair.pass_time(TIMEOUT_SECONDS / 8)
        pair.decode.workers[0].receiver.renew("another agent", [str(attempt), "9" * 4000, "x", "-1", ""])
    pair.pass_time(5.0)
    assert found.status is Status.ERROR


# ------------------------------------------------------------------------------- what no limit leaves room for (R4)


@DIRECTIONS
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
def test_what_never_fits_ends_in_words(mode: TransferMode, side: str, is_local: bool) -> None:
    """With nothing kept and nothing in quarantine. What fits is served then, and what has come behind it has its own
    time."""
    room = kind(num_blocks=32, caches_prefixes=False, allocation_seconds=ALLOCATION_SECONDS)
    pair = Pair(mode, room, room)
    pair.acquaint()
    engine = getattr(pair, side)
    upstream = None if is_local or side == "prefill" else pair.ask_prefill(prompt(1))
    pair.settle()
    engine.pool.limit_blocks = BLOCKS_EACH - 1
    engine.pool.apply_limit()
    if upstream is not None:
        found = pair.ask_decode(upstream.answer, upstream.prompt)
    else:
        found = pair.ask_prefill(prompt(1), params=None if is_local else {"do_remote_decode": True}, engine=engine)
    fits = pair.ask_decode(None, prompt(2)[:6], engine=engine)
    pair.pass_time(ALLOCATION_SECONDS - 5)
    late = pair.ask_decode(None, prompt(3), engine=engine)
    assert found.status is Status.WAITING
    pair.pass_time(10)
    assert found.status is Status.ERROR and fits.status is Status.STOPPED and late.status is Status.WAITING
    assert pair.causes(engine) == {"no_blocks": 1}
    engine.pool.limit_blocks = 32
    pair.pass_time(5)
    assert late.status is Status.STOPPED


@pytest.mark.parametrize(
    ("is_in_order", "num_copies", "seconds"), [(True, 1, 10), (False, 1, 10), (False, 2, 10 + SPARED_SECONDS)]
)
def test_prompts_that_arrive_in_another_order_on_the_two_sides_do_not_wait_for_each_other(
    is_in_order: bool, num_copies: int, seconds: float
) -> None:
    """Prefill keeps what decode has no room for, and has no room for what decode has given its own to. Decode
    registers with one copy of a KV head."""
    room = {"num_blocks": 1 + BLOCKS_EACH + 2, "caches_prefixes": False, "total_heads": 1}
    pair = Pair(PUSH, kind(**room, tp_size=num_copies), kind(**room))
    pair.acquaint()
    found = []
    for seed, upstream in ((1, 1), (2, 2)) if is_in_order else ((1, 2), (2, 1)):
        found.append(pair.ask_decode(pair.meet(transfer_id=f"t{seed}"), prompt(seed)))
        pair.settle()
        pair.ask_prefill(prompt(upstream), transfer_id=f"t{upstream}")
        pair.settle()
    for _ in range(int(seconds)):
        pair.pass_time(1.0)
    assert is_right(found[0]) and found[1].status is Status.STOPPED
    assert is_right(found[1]) == is_in_order, "prefill has taken it back"


def test_two_prefills_and_two_decodes_do_not_wait_for_each_other_in_a_ring() -> None:
    """Each decode waits for what one prefill keeps, and has given its room to a prompt that the other one has no room
    for."""
    room = {"num_blocks": 1 + BLOCKS_EACH + 2, "caches_prefixes": False}
    pair = Pair(PUSH, kind(**room), kind(**room))
    prefills = pair.prefill, pair.cluster.engine("prefill 2", kind(**room))
    decodes = pair.decode, pair.cluster.engine("decode 2", kind(**room))

    def ask(prefill: int, decode: int, seed: int) -> Request:
        own = prefills[prefill].own
        meet = pair.meet(transfer_id=f"t{seed}", remote_engine_id=own.engine_id, remote_host=own.host)
        return pair.ask_decode(meet, prompt(seed), engine=decodes[decode])

    for seed, (prefill, decode) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1)), start=10):
        pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}", engine=prefills[prefill])
        ask(prefill, decode, seed)
        pair.settle()
    found = [ask(1, 0, 1), ask(0, 1, 2)]
    pair.settle()
    for seed, prefill in ((3, 0), (4, 1)):
        pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}", engine=prefills[prefill])
    pair.settle()
    found += [ask(0, 0, 3), ask(1, 1, 4)]
    for seed, prefill in ((2, 0), (1, 1)):
        pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}", engine=prefills[prefill])
    for _ in range(int(SPARED_SECONDS) + 10):
        pair.pass_time(1.0)
    assert all(one.status is Status.STOPPED for one in found)
    assert [is_right(one) for one in found] == [True, True, False, False], "prefill has taken the others back"


@pytest.mark.parametrize("what", ["another decode registers", "its heartbeat came before the offer"])
def test_what_decode_waits_for_is_kept_where_nobody_waits_for_each_other(what: str) -> None:
    """Decode is full for longer than `give_way_after`, and prefill has no room for the next prompt."""
    room = {"num_blocks": 1 + BLOCKS_EACH + 2, "caches_prefixes": False}
    pair = Pair(PUSH, kind(**room), kind(caches_prefixes=False, recomputes=False))
    other = pair.cluster.engine("another", kind(caches_prefixes=False, recomputes=False))
    pair.acquaint()
    pair.decode.pool.limit_blocks = BLOCKS_EACH - 1
    pair.decode.pool.apply_limit()
    found = [pair.ask_decode(pair.meet(transfer_id="t1"), prompt(1))]
    pair.settle()
    pair.ask_prefill(prompt(1), transfer_id="t1")
    if is_other := what.startswith("another"):
        pair.pass_time(6.0)
        found.append(pair.ask_decode(pair.meet(transfer_id="t2"), prompt(2), engine=other))
    pair.settle()
    pair.ask_prefill(prompt(2), transfer_id="t2")
    pair.settle()
    for _ in range(12):
        pair.pass_time(1.0)
    pair.decode.pool.limit_blocks = 64
    pair.decode.pool.apply_limit()
    if not is_other:
        found.append(pair.ask_decode(pair.meet(transfer_id="t2"), prompt(2)))
    for _ in range(12):
        pair.pass_time(1.0)
    serve(pair, *found)


# ------------------------------------------------------------------------------------------------------- by priority


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
@pytest.mark.parametrize("has_small", [False, True], ids=["alone", "small ones run"])
def test_two_engines_that_prefill_for_each_other_do_not_wait_for_each_other(recomputes: bool, has_small: bool) -> None:
    """Both are full of what waits for KV of the other one, whose prompts have no room to begin."""
    room = {"num_blocks": 1 + BLOCKS_EACH + 2, "caches_prefixes": False, "recomputes": recomputes}
    room |= {"allocation_seconds": ALLOCATION_SECONDS, "goes_by_priority": True}
    pair = Pair(PUSH, kind(**room), kind(**room))
    pair.acquaint()
    one, two = pair.prefill, pair.decode
    found = []
    for engine, other, seed in ((one, two, 1), (two, one, 2)):
        own = other.own
        meet = {"remote_engine_id": own.engine_id, "remote_host": own.host, "remote_port": own.port}
        params = {"do_remote_prefill": True, "tp_size": own.tp_size, "transfer_id": f"t{seed}", **meet}
        found.append(pair.ask_decode(params, prompt(seed), engine=engine))
    pair.round(8)
    found += [pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}", engine=to) for to, seed in ((two, 1), (one, 2))]
    for _ in range(6):
        pair.pass_time(TIMEOUT_SECONDS / 2)
        small = [pair.ask_decode(None, (1, 2, 3), engine=engine, priority=-1) for engine in (one, two) if has_small]
        pair.settle()
        assert all(one.status is Status.STOPPED for one in small)
    assert all(one.status.is_finished for one in found)


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_a_prefill_that_goes_on_for_ever_does_not_keep_blocks_that_others_need(recomputes: bool) -> None:
    """It says so, and computes nothing. Each time the hand-over that came last ends."""
    pair = small(PUSH, recomputes=recomputes)
    (_, first), (_, last) = registered(pair)
    pair.pass_time(LONG)
    needing = pair.ask_decode(None, prompt(5))
    pair.pass_time(VAIN_TIMEOUTS * TIMEOUT_SECONDS - 5)
    assert needing.status is Status.WAITING and last.status is Status.REMOTE
    pair.pass_time(10)
    assert needing.status is Status.STOPPED and pair.causes() == {"deadline": 1}
    assert (first.status, last.status) == (Status.REMOTE, Status.STOPPED if recomputes else Status.ERROR)
    pair.prefill.admits = True
    pair.settle()
    assert first.num_external == len(PROMPT)


@pytest.mark.parametrize("is_offered", [True, False], ids=["offered", "its own"])
@pytest.mark.parametrize(("mode", "slots"), [(PUSH, (0, 0)), (PULL, (16, 4))], ids=["push", "staged pull"])
def test_what_fits_only_into_blocks_that_a_still_decode_is_sent_has_an_end(
    mode: TransferMode, slots: tuple[int, int], is_offered: bool
) -> None:
    """Decode stands still in the middle of a WRITE, whose blocks stay prefill's until it goes on."""
    pair = Pair(mode, kind(num_blocks=21, caches_prefixes=False), kind(slots=slots))
    pair.acquaint()
    upstream = pair.ask_prefill(tuple(range(1000, 1048)))
    pair.settle()
    pair.ask_decode(upstream.answer, upstream.prompt)
    pair.until_posted()
    pair.cluster.vanish(pair.decode)
    own = tuple(range(2000, 2040))
    found = pair.ask_prefill(own) if is_offered else pair.prefill.add(Request("plain", own, None))
    pair.pass_time(TIMEOUT_SECONDS)
    assert found.status is Status.WAITING
    pair.pass_time(TIMEOUT_SECONDS + PROBE_SECONDS + LEASE_SECONDS)
    assert found.status is Status.ERROR and pair.causes(pair.prefill) == {"quarantine": 1}
    pair.cluster.come_back(pair.decode)
    pair.pass_time(TIMEOUT_SECONDS)
    assert len(pair.prefill.pool.free) == 20


@DIRECTIONS
def test_memory_that_comes_back_slowly_is_waited_for(mode: TransferMode) -> None:
    """kvcached's limit rises by a block in 7.5 seconds, and a request needs five."""
    pair = Pair(mode, None, kind(num_blocks=32, caches_prefixes=False, allocation_seconds=20.0, recomputes=False))
    pair.acquaint()
    upstream = pair.ask_prefill(prompt(1))
    pair.settle()
    pool = pair.decode.pool
    pool.limit_blocks = 2
    pool.apply_limit()
    found = pair.ask_decode(upstream.answer, upstream.prompt)
    for _ in range(6):
        pair.pass_time(7.5)
        pool.limit_blocks += 1
        pool.apply_limit()
    pair.pass_time(10)
    assert found.status is Status.STOPPED and found.num_external


# --------------------------------------------------- those that have their KV, and wait for more blocks than are left

NUM_TOKENS, FETCHED_BLOCKS = 25, 6
"""Decode of a model with sliding windows fetches 24 tokens, and needs another block to compute the last one."""


@DIRECTIONS
@pytest.mark.parametrize("recomputes", [True, False])
def test_two_requests_do_not_wait_for_each_others_blocks(mode: TransferMode, recomputes: bool) -> None:
    """Each was admitted with room for all of its prompt. Then kvcached's limit falls while their KV travels."""
    room = 2 * (FETCHED_BLOCKS + 1)
    decode = kind(num_blocks=1 + room, drops_blocks=True, caches_prefixes=False, recomputes=recomputes)
    pair = Pair(mode, kind(drops_blocks=True), decode)
    prompts = [tuple(range(first, first + NUM_TOKENS)) for first in (0, 20)]
    answers = [pair.offered(prompt) for prompt in prompts]
    found = [pair.ask_decode(*one, max_tokens=1) for one in zip(answers, prompts, strict=True)]
    for one in found:
        pair.until(one, Status.REMOTE)
    pair.decode.pool.limit_blocks = 2 * FETCHED_BLOCKS
    pair.decode.pool.apply_limit()
    pair.settle()
    assert all(one.num_computed == NUM_TOKENS - 1 for one in found), "their KV has come"
    pair.pass_time(TIMEOUT_SECONDS + LEASE_SECONDS)
    assert all(one.status.is_finished for one in found), "one of them ends, and the other one has its blocks"
    assert Status.STOPPED in {one.status for one in found}


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_request_that_was_passed_over_does_not_wait_for_blocks_of_one_behind_it(num_steps: int) -> None:
    """vLLM turns the order of those that it passes over around in each step, and tries none behind one without blocks:
    here a request that decode did not start while a neighbour waited for memory."""
    pair = Pair(PUSH, None, kind(num_blocks=8, caches_prefixes=False))
    pair.acquaint()
    has_blocks = pair.ask_decode(pair.meet(transfer_id="first"), tuple(range(15)), max_tokens=1)
    pair.until(has_blocks, Status.REMOTE)
    pair.decode.pool.neighbour_leaves_blocks = 0
    pair.cluster.pass_time(0.5, 0.25)
    passed_over = pair.ask_decode(pair.meet(transfer_id="second"), tuple(range(20, 35)), max_tokens=1)
    pair.settle()
    assert passed_over in pair.decode.skipped and has_blocks in pair.decode.skipped
    pair.decode.pool.neighbour_leaves_blocks = None
    for _ in range(num_steps):
        pair.decode.step()
    pair.cluster.pass_time(4.0, 0.25)
    for name, one in (("first", has_blocks), ("second", passed_over)):
        pair.ask_prefill(one.prompt, transfer_id=name)
    pair.settle()
    assert has_blocks.status is Status.STOPPED and passed_over.status is Status.STOPPED
    assert not pair.causes()
