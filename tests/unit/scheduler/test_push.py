# SPDX-License-Identifier: Apache-2.0
"""scheduler/push.py: what the workers are told of each request, and that every block is given back exactly once."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.idle import SHORTEST_IDLE_STEP_SECONDS
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.scheduler.lease import Renewals
from kvcached_nixl.scheduler.push import Progress, PushScheduler, pace, start
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill, transfer_of
from kvcached_nixl.wire.push_step import BlockIds, Computed, PushStep, Unusable, Wanted, quiet_id

BLOCK_SIZE = 4
LEASE = 30.0
TOKENS = 10
BLOCKS = ([7, 3, 9],)
HOST, PORT = "10.0.0.1", 5600
EMPTY = PushStep(HOST, PORT)
COORDINATES = {"remote_engine_id": "p", "remote_host": "10.0.0.2", "remote_port": 5601, "tp_size": 2}
PREFILL = RemotePrefill("p", "10.0.0.2", 5601, 2)


@dataclass
class Asked:
    """vLLM's request, as far as a push asks it."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = TOKENS


def of_prefill(name: str = "p1", **params: Any) -> Asked:
    return Asked(name, {"do_remote_decode": True, "transfer_id": "t", **params})


def of_decode(name: str = "d1", **params: Any) -> Asked:
    return Asked(name, {"do_remote_prefill": True, "transfer_id": "t", **COORDINATES, **params})


def scheduler_of_engine(tp_size: int = 2) -> PushScheduler:
    return PushScheduler(
        engine_id=EngineId("e"),
        host=HOST,
        port=PORT,
        tp_size=tp_size,
        block_size=BLOCK_SIZE,
        renewals=Renewals(ManualClock(), lease_seconds=LEASE),
    )


@pytest.fixture
def push() -> PushScheduler:
    made = scheduler_of_engine()
    made._numbers = itertools.count()
    return made


def step(**fields: Any) -> PushStep:
    return PushStep(HOST, PORT, **fields)


def computed(block_ids: BlockIds, ready_tokens: int) -> Computed:
    return Computed(PrefillRequestId("p1"), "transfer:t", block_ids, ready_tokens)


def started(push: PushScheduler, request: Asked, num_computed: int = TOKENS) -> Asked:
    """A request of prefill of which so many tokens are computed, and the workers know it."""
    push.allocated(request, BLOCKS, 0)
    push.scheduled([Progress(request.request_id, BLOCKS, True, num_computed)])
    push.take_step()
    return request


def waiting(push: PushScheduler) -> Asked:
    """A request of decode that waits for prefill, and the workers know it."""
    request = of_decode()
    push.allocated(request, BLOCKS, TOKENS)
    push.take_step()
    return request


# ------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("params", "num_computed", "expected"),
    [
        ({"do_remote_prefill": True}, 0, (TOKENS, True)),
        ({"do_remote_prefill": True}, 8, (2, True)),
        ({"do_remote_prefill": True}, TOKENS, (0, False)),
        ({"do_remote_prefill": False}, 0, (0, False)),
        ({"do_remote_decode": True}, 0, (0, False)),
        ({}, 0, (0, False)),
        (None, 0, (0, False)),
    ],
    ids=str,
)
def test_decode_waits_for_the_tokens_it_lacks_and_nobody_else_does(
    push: PushScheduler, params: dict[str, Any] | None, num_computed: int, expected: tuple[int, bool]
) -> None:
    """Asked twice, because blocks may not be had the first time."""
    request = Asked("r", params)
    assert push.matched(request, num_computed) == push.matched(request, num_computed) == expected


def test_a_request_of_decode_registers_all_its_blocks(push: PushScheduler) -> None:
    """Once: after a preemption vLLM allocates again, and decode computes by itself."""
    request = of_decode()
    push.allocated(request, BLOCKS, TOKENS)
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert push.pending
    wanted = Wanted(DecodeRequestId("d1"), "transfer:t", PREFILL, 0, TOKENS, BLOCKS)
    assert push.take_step() == step(wanted=[wanted])
    push.allocated(request, BLOCKS, TOKENS)
    assert push.take_step() == EMPTY


def test_blocks_of_the_prefix_cache_are_not_written(push: PushScheduler) -> None:
    """They may be another request's too."""
    push.allocated(of_decode(), ([7, 3, 9], [1, 2, 5]), TOKENS - 2 * BLOCK_SIZE)
    (wanted,) = push.take_step().wanted
    assert (wanted.first_token, wanted.end_token, wanted.block_ids) == (8, TOKENS, ([9], [5]))


@pytest.mark.parametrize(
    ("params", "num_external", "word", "blocks"),
    [
        ({"remote_host": None}, TOKENS, "remote_host", [7, 3, 9]),
        ({"remote_port": "5601"}, 6, "remote_port", [3, 9]),
        ({"transfer_id": ""}, TOKENS, "transfer_id", [7, 3, 9]),
        ({}, 5, "inside a block", [3, 9]),
    ],
    ids=["no host", "port", "transfer", "inside a block"],
)
def test_blocks_that_nobody_can_fill_are_told_with_the_reason(
    push: PushScheduler, params: dict[str, Any], num_external: int, word: str, blocks: list[int]
) -> None:
    """vLLM has them and waits, so the workers report them as not loaded: all but those of the prefix cache."""
    request = of_decode(**params)
    push.allocated(request, BLOCKS, num_external)
    (unusable,) = push._step.unusable
    assert word in unusable.reason
    assert push.take_step() == step(unusable=[Unusable(DecodeRequestId("d1"), unusable.reason, (blocks,))])
    assert push.pending
    assert push.ended(None, {"d1"}) == []
    assert not push.pending


def test_unusable_parameters_of_a_request_that_needs_nothing_do_not_matter(push: PushScheduler) -> None:
    request = of_decode(remote_host=None)
    push.allocated(request, BLOCKS, 0)
    assert push.take_step() == EMPTY
    assert not push.pending
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False


def test_prefill_is_told_when_nothing_is_needed(push: PushScheduler) -> None:
    """Every block was in the prefix cache; nobody waits for an answer."""
    push.allocated(of_decode(), BLOCKS, 0)
    assert push.take_step() == step(unneeded=[("transfer:t", PREFILL)])
    assert not push.pending


def test_prefill_is_told_when_the_request_was_aborted_before_it_had_blocks(push: PushScheduler) -> None:
    """It would keep its own until its lease ends. Told once, and nothing is kept here."""
    request = of_decode()
    assert push.finished(request, False, ()) == (False, None)
    assert push.finished(request, False, ()) == (False, None)
    assert push.take_step() == step(unneeded=[("transfer:t", PREFILL)])
    assert not push.pending


def test_a_request_aborted_while_it_waits_is_withdrawn_and_waited_for(push: PushScheduler) -> None:
    """vLLM keeps the blocks of a request that waits by itself, until the workers name it."""
    request = waiting(push)
    assert push.finished(request, False, BLOCKS) == (False, None)
    assert push.take_step() == step(withdrawn={"d1": "the request is gone"})
    assert push.pending
    push.ended(None, {"d1"})
    assert not push.pending
    assert push.finished(request, True, BLOCKS) == (False, None)
    assert push.take_step() == EMPTY


# ------------------------------------------------------------------------------------------------------------ prefill


def test_each_step_tells_the_tokens_that_it_computes(push: PushScheduler) -> None:
    """Further blocks are added to the earlier ones; at the prompt's end it stops, although vLLM goes on."""
    push.allocated(of_prefill(), ([7], [1]), 0)
    assert push.take_step() == EMPTY
    told: list[PushStep] = []
    for blocks, tokens in [
        (([7], [1]), 3),
        ((), 4),
        (([3], [2]), 7),
        (([9, 4], [5, 6]), 13),
        (([8], [8]), 17),
    ]:
        push.scheduled([Progress("p1", blocks, not told, tokens)])
        told.append(push.take_step())
    assert [one.computed for one in told] == [
        [computed(([7], [1]), 3)],
        [computed(([7], [1]), 4)],
        [computed(([7, 3], [1, 2]), 7)],
        [computed(([7, 3, 9, 4], [1, 2, 5, 6]), TOKENS)],
        [],
    ]


def test_requests_of_others_are_not_told(push: PushScheduler) -> None:
    """Without parameters, of decode, or never heard of."""
    for request in (Asked("plain", None), Asked("other", {"key": 1})):
        push.allocated(request, BLOCKS, 0)
        assert push.finished(request, True, BLOCKS) == (False, None)
    waiting(push)
    push.scheduled(Progress(name, BLOCKS, True, 4) for name in ("plain", "other", "d1", "unknown"))
    assert push.take_step() == step(is_idle=False)


def test_a_request_that_is_allocated_again_goes_on_where_it_was(push: PushScheduler) -> None:
    """vLLM says so each time that it takes a request from its queue."""
    request = started(push, of_prefill(), 4)
    push.allocated(request, BLOCKS, 0)
    assert push.is_sending("p1")
    push.scheduled([Progress("p1", ([4],), False, 8)])
    assert push.take_step().computed == [computed(([7, 3, 9, 4],), 8)]


def test_a_preempted_request_starts_over_in_other_blocks_and_the_old_ones_are_held(push: PushScheduler) -> None:
    """Also one whose prompt was computed. What is held is opaque."""
    request = started(push, of_prefill(), TOKENS)
    old = object()
    assert push.is_sending("p1")
    push.preempted("p1", old)
    assert not push.is_sending("p1"), "it has no blocks to lose"
    assert push.pending
    assert push.take_step() == step(preempted=[("p1", 0)])
    push.allocated(request, ([5],), 0)
    push.scheduled([Progress("p1", ([5],), True, 4)])
    push.preempted("p1", [5])
    assert push.take_step() == step(
        preempted=[("p1", 1)],
        computed=[computed(([5],), 4)],
        is_idle=False,
    )
    push.scheduled([Progress("p1", ([6, 2],), False, 8)])
    assert push.take_step().computed == [computed(([6, 2],), 8)]
    sent = {quiet_id(1), quiet_id(0), "p9"}
    assert sorted(push.ended(sent, set()), key=str) == sorted([old, [5]], key=str)
    assert sent == {"p9"}, "vLLM knows no other ids than its own"
    assert not push.pending


def test_blocks_that_replace_others_are_not_added_to_them(push: PushScheduler) -> None:
    """vLLM says which of the two it means; nothing else is taken for it."""
    started(push, of_prefill(), 4)
    push.scheduled([Progress("p1", ([5, 6],), True, 8)])
    assert push.take_step().computed == [computed(([5, 6],), 8)]


def test_only_a_request_with_blocks_that_were_told_is_sending(push: PushScheduler) -> None:
    push.allocated(of_prefill(), BLOCKS, 0)
    assert not push.is_sending("p1")
    assert not push.is_sending("p2")
    push.scheduled([Progress("p1", BLOCKS, True, 4)])
    assert push.is_sending("p1")


def test_a_hold_is_freed_when_it_is_named_and_no_other(push: PushScheduler) -> None:
    """The report of a step names what has ended since the last; it may have nothing at all."""
    for name in ("p1", "p2"):
        started(push, of_prefill(name, transfer_id=name))
        push.preempted(name, name)
    assert push.ended(None, None) == []
    assert push.ended(set(), set()) == []
    sent = {quiet_id(1)}
    assert push.ended(sent, None) == ["p2"]
    assert sent == set()
    assert push.pending
    assert push.ended({quiet_id(0)}, None) == ["p1"]
    assert not push.pending


def test_holds_of_other_connectors_are_left_to_them(push: PushScheduler) -> None:
    """An engine may have several that push, and vLLM reports to all of them in one set."""
    others = scheduler_of_engine()
    for one, name in ((push, "p1"), (others, "p2")):
        started(one, of_prefill(name, transfer_id=name))
        one.preempted(name, name)
    ((_, hold),) = others.take_step().preempted
    sent = {quiet_id(0), quiet_id(hold)}
    assert push.ended(sent, None) == ["p1"]
    assert others.ended(sent, None) == ["p2"]
    assert sent == set()


def test_a_whole_request_is_kept_and_decode_is_told_where_it_is(push: PushScheduler) -> None:
    """While prefill computes, nothing is owed: vLLM steps anyway."""
    request = started(push, of_prefill())
    assert not push.pending
    keep, params = push.finished(request, True, BLOCKS)
    assert keep
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "transfer_mode": "push",
        "remote_request_id": "p1",
        "remote_block_ids": [[7, 3, 9]],
        "remote_engine_id": "e",
        "remote_host": HOST,
        "remote_port": PORT,
        "tp_size": 2,
    }
    assert push.take_step() == step(finished=["p1"])
    assert push.pending
    sent = {"p1"}
    assert push.ended(sent, None) == []
    assert sent == {"p1"}, "vLLM frees it"
    assert not push.pending


def test_a_request_that_has_ended_is_forgotten_when_the_workers_are_done(push: PushScheduler) -> None:
    request = started(push, of_prefill())
    push.finished(request, True, BLOCKS)
    push.ended({"p1"}, None)
    assert not push.is_sending("p1")
    assert len(push._sending) == 0


def test_an_aborted_request_is_stopped_and_kept_until_it_is(push: PushScheduler) -> None:
    request = started(push, of_prefill(), 4)
    assert push.finished(request, False, BLOCKS) == (True, None)
    assert push.take_step() == step(stopped={"p1": "prefill's request was aborted"})
    assert push.pending
    push.ended({"p1"}, None)
    assert not push.pending


def test_a_request_that_ends_in_the_queue_is_refused(push: PushScheduler) -> None:
    """It had no blocks; decode, which may have registered, is told at once instead of after its timeout."""
    assert push.finished(of_prefill(), False, ()) == (False, None)
    assert push.take_step() == step(refused={"transfer:t": "prefill's request ended before it was computed"})
    assert not push.pending


def test_a_request_of_prefill_whose_name_cannot_be_used_is_computed_and_not_offered(
    push: PushScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at either end names the request and the parameter; vLLM frees its blocks as ever."""
    request = of_prefill(transfer_id=7)
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        push.allocated(request, BLOCKS, 0)
        push.scheduled([Progress("p1", BLOCKS, True, 4)])
        assert not push.is_sending("p1")
        assert push.finished(request, True, BLOCKS) == (False, None)
    assert push.take_step() == step(is_idle=False)
    assert len(caplog.messages) == 2
    assert all("p1" in message and "transfer_id=7" in message for message in caplog.messages)


def test_a_step_is_handed_out_once_and_does_not_change_afterwards(push: PushScheduler) -> None:
    """It waits in the executor's queue while the next one is built."""
    push.allocated(of_prefill(), ([7],), 0)
    push.scheduled([Progress("p1", ([7],), True, 4)])
    first = push.take_step()
    push.scheduled([Progress("p1", ([3],), False, 8)])
    assert first == step(computed=[computed(([7],), 4)], is_idle=False)
    push.take_step()
    assert push.take_step() == EMPTY


# -------------------------------------------------------------------------------------------------------------- start


@dataclass
class Stock:
    """vLLM's NIXL scheduler, as ``compat.connector.SchedulerView`` shows it."""

    extra_config: Mapping[str, Any]
    num_kv_cache_groups: int = 1
    engine_id: str = "e"
    host: str = HOST
    port: int = PORT
    tp_size: int = 2
    block_size: int = BLOCK_SIZE


def test_an_engine_that_pulls_has_no_push() -> None:
    """Whatever its model is."""
    assert start(Stock({})) is None
    assert start(Stock({"transfer_mode": "pull"}, num_kv_cache_groups=2)) is None


def test_an_engine_that_pushes_knows_itself() -> None:
    made = start(Stock({"transfer_mode": "push"}))
    assert made is not None
    made.allocated(of_decode(), BLOCKS, TOKENS - BLOCK_SIZE)
    told = made.take_step()
    assert (told.host, told.port, told.wanted[0].block_ids) == (HOST, PORT, ([3, 9],))
    _, params = made.finished(started(made, of_prefill()), True, BLOCKS)
    assert params is not None
    assert params.items() >= {"remote_engine_id": "e", "remote_host": HOST, "remote_port": PORT, "tp_size": 2}.items()


@pytest.mark.parametrize("groups", [0, 2])
def test_a_model_of_several_groups_is_not_pushed(groups: int) -> None:
    with pytest.raises(SettingsError) as refusal:
        start(Stock({"transfer_mode": "push"}, num_kv_cache_groups=groups))
    assert f"{groups} KV-cache groups" in refusal.value.found
    assert '"transfer_mode": "pull"' in refusal.value.remedy


def test_an_idle_engine_leaves_the_interpreter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pace()
    assert slept == [SHORTEST_IDLE_STEP_SECONDS] and 0 < SHORTEST_IDLE_STEP_SECONDS <= 0.01


# ----------------------------------------------------------------------------------------------- anything, in any order


@dataclass
class Sending:
    """A request of prefill that vLLM has, and its blocks."""

    request: Asked
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Engine(RuleBasedStateMachine):
    """vLLM's scheduler around a push, and workers that answer in their own time.

    A block is in one place: free, with a request, or in a hold. The workers may touch those of which they were told
    until they let go; none of these may be free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.push = scheduler_of_engine(tp_size=1)
        self.push._numbers = itertools.count()
        self.number = 0
        self.free = set(range(40))
        self.prefill: dict[str, Sending] = {}
        self.decode: dict[str, tuple[Asked, list[int]]] = {}
        self.ended: dict[str, list[int]] = {}
        """Requests that ended and whose blocks vLLM keeps, because it was told to or because they wait."""
        self.holds: dict[int, list[int]] = {}
        self.named: set[int] = set()
        # The workers' side.
        self.touched: dict[str, set[int]] = {}
        self.owed_sent: set[str] = set()
        self.owed_received: set[str] = set()

    def name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(min(count, len(self.free)))]

    def give(self, blocks: list[int]) -> None:
        assert self.free.isdisjoint(blocks), "given back twice"
        self.free |= set(blocks)

    # ---- requests of prefill

    @rule(tokens=st.integers(1, 18), usable=st.booleans(), starts=st.booleans())
    def prefill_arrives(self, tokens: int, usable: bool, starts: bool) -> None:
        """Taken from the queue at once, or aborted in it."""
        name = self.name()
        request = Asked(name, {"do_remote_decode": True, "transfer_id": f"t-{name}" if usable else ""}, tokens)
        if not starts:
            assert self.push.finished(request, False, ()) == (False, None)
        elif len(self.free) > 10:
            self.prefill[name] = Sending(request)
            self.compute(name, True, tokens)

    def compute(self, name: str, is_new: bool, tokens: int) -> None:
        sending = self.prefill[name]
        computed = sending.computed + tokens
        further = self.take(-(-computed // BLOCK_SIZE) - len(sending.blocks))
        sending.blocks, sending.computed = [*sending.blocks, *further], computed
        if is_new:
            self.push.allocated(sending.request, (list(sending.blocks),), 0)
        ids: BlockIds = (list(sending.blocks) if is_new else further,) if is_new or further else ()
        self.push.scheduled([Progress(name, ids, is_new, computed)])

    @precondition(lambda self: self.prefill and len(self.free) > 10)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def prefill_computes(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefill)))
        self.compute(name, not self.prefill[name].blocks, tokens)

    @precondition(lambda self: self.prefill)
    @rule(data=st.data())
    def prefill_is_preempted(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefill)))
        sending = self.prefill[name]
        blocks, sending.blocks, sending.computed = sending.blocks, [], 0
        if self.push.is_sending(name):
            self.holds[len(self.named)] = blocks
            self.named.add(len(self.named))
            self.push.preempted(name, blocks)
        else:
            self.give(blocks)

    @precondition(lambda self: self.prefill)
    @rule(data=st.data())
    def prefill_ends(self, data: st.DataObject) -> None:
        """Whole if its prompt is computed, aborted otherwise."""
        name = data.draw(st.sampled_from(sorted(self.prefill)))
        sending = self.prefill.pop(name)
        is_whole = sending.computed >= sending.request.num_prompt_tokens
        keep, params = self.push.finished(sending.request, is_whole, (list(sending.blocks),))
        assert sending.request.kv_transfer_params is not None
        is_offered = bool(sending.request.kv_transfer_params["transfer_id"])
        assert keep == is_offered
        assert (params is not None) == (is_offered and is_whole)
        if params is not None:
            assert transfer_of(params, "anything") == transfer_of(sending.request.kv_transfer_params, name)
        if keep:
            self.ended[name] = sending.blocks
        else:
            self.give(sending.blocks)

    # ---- requests of decode

    @precondition(lambda self: len(self.free) > 10)
    @rule(tokens=st.integers(1, 18), cached=st.integers(0, 18), usable=st.booleans(), starts=st.booleans())
    def decode_arrives(self, tokens: int, cached: int, usable: bool, starts: bool) -> None:
        """Given blocks at once, or aborted in the queue. ``cached`` tokens may end inside a block."""
        name = self.name()
        params = {"do_remote_prefill": True, "transfer_id": f"t-{name}", **(COORDINATES if usable else {})}
        request = Asked(name, params, tokens)
        if not starts:
            assert self.push.finished(request, False, ()) == (False, None)
            return
        missing, is_waiting = self.push.matched(request, min(cached, tokens))
        assert is_waiting == (missing > 0)
        blocks = self.take(-(-tokens // BLOCK_SIZE))
        self.push.allocated(request, (list(blocks),), missing)
        if is_waiting:
            self.decode[name] = request, blocks
        else:
            assert self.push.finished(request, True, (list(blocks),)) == (False, None)
            self.give(blocks)

    @precondition(lambda self: self.decode)
    @rule(data=st.data())
    def decode_is_aborted(self, data: st.DataObject) -> None:
        """vLLM keeps the blocks of a request that waits."""
        name = data.draw(st.sampled_from(sorted(self.decode)))
        request, blocks = self.decode.pop(name)
        assert self.push.finished(request, False, (list(blocks),)) == (False, None)
        self.ended[name] = blocks

    # ---- the workers

    @rule()
    def a_step(self) -> None:
        """The workers take in what they are told; what they now owe comes later."""
        told = self.push.take_step()
        # In the order in which a worker takes them in: a request is heard of before it ends.
        for one in told.computed:
            self.touched.setdefault(one.request_id, set()).update(*one.block_ids)
        for wanted in told.wanted:
            self.touched[wanted.request_id] = set().union(*wanted.block_ids)
            self.owed_received.add(wanted.request_id)
        self.owed_received |= {unusable.request_id for unusable in told.unusable}
        self.owed_sent |= {quiet_id(hold) for _, hold in told.preempted}
        self.owed_sent |= {*told.finished, *told.stopped}

    @precondition(lambda self: self.owed_sent or self.owed_received)
    @rule(data=st.data())
    def workers_answer(self, data: st.DataObject) -> None:
        sent = data.draw(st.sets(st.sampled_from(sorted(self.owed_sent)))) if self.owed_sent else set()
        received = data.draw(st.sets(st.sampled_from(sorted(self.owed_received)))) if self.owed_received else set()
        self.answer(sent, received)

    def answer(self, sent: set[str], received: set[str]) -> None:
        self.owed_sent -= sent
        self.owed_received -= received
        quiet = {number for number in self.holds if quiet_id(number) in sent}
        left = set(sent)
        freed = self.push.ended(left or None, received or None)
        assert left == {name for name in sent if name.startswith("r")}
        assert sorted(freed) == sorted(self.holds[number] for number in quiet)
        for number in quiet:
            self.let_go(self.holds.pop(number))
        for name in left:
            self.let_go(self.ended.pop(name))
        for name in received:
            # vLLM goes on with it, or frees it if it has ended.
            blocks = self.decode.pop(name)[1] if name in self.decode else self.ended.pop(name)
            self.let_go(blocks)

    def let_go(self, blocks: list[int]) -> None:
        for touched in self.touched.values():
            touched.difference_update(blocks)
        self.give(blocks)

    @invariant()
    def nothing_that_is_touched_is_free(self) -> None:
        assert all(self.free.isdisjoint(touched) for touched in self.touched.values())

    @invariant()
    def it_is_pending_while_something_is_owed(self) -> None:
        owed = bool(self.holds or self.ended or self.decode)
        assert self.push.pending == owed

    def teardown(self) -> None:
        for name in sorted(self.prefill):
            sending = self.prefill.pop(name)
            keep, _ = self.push.finished(sending.request, False, (list(sending.blocks),))
            if keep:
                self.ended[name] = sending.blocks
            else:
                self.give(sending.blocks)
        self.a_step()
        self.answer(set(self.owed_sent), set(self.owed_received))
        assert not self.push.pending
        assert len(self.free) == 40
        assert not (self.push._sending or self.push._held or self.push._receiving)
        assert self.push.take_step() == EMPTY


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
