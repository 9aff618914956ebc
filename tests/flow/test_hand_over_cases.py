# SPDX-License-Identifier: Apache-2.0
"""Whole hand-overs in both directions, with every fault that the network and the engines can have.

Both sides run the package's real scheduler and worker halves over the in-memory transport. Besides its own assertions
every case checks that no engine computes on wrong bytes (`flow_engine`) and that no bytes are written where they must
not be (`flow_cluster`).
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from support.flow_cluster import FORGOTTEN_SECONDS, LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Engine, Kind, Request, Status
from support.flow_memory import Shape
from support.flow_pair import DIRECTIONS, PROMPT, PULL, PUSH, Pair, is_right, kind
from support.flow_schedule import SHAPES, Defects
from support.internals import holds_of, offers_of, parked_of
from support.memory_transport import Posted

from kvcached_nixl.ids import KernelBlock, PrefillRequestId
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.checked import convert
from kvcached_nixl.wire.handshake import Answer, read_answer, read_rank
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import (
    KernelBlockRange,
    Registration,
    Stopped,
    Withdrawal,
    Written,
    decode,
    encode,
    is_heartbeat,
)
from kvcached_nixl.worker.decode.fencing import DEAD_SECONDS, LOOK_SECONDS, UNHEARD_SECONDS
from kvcached_nixl.worker.decode.receiver import REPEAT_SECONDS
from kvcached_nixl.worker.prefill.offers import GRACE_SECONDS
from kvcached_nixl.worker.transfer.peers import HANDSHAKE_TRIES
from kvcached_nixl.worker.transfer.slab import Use
from kvcached_nixl.worker.transfer.staging import Held
from kvcached_nixl.worker.transfer.transfer_queue import Budget

BYTES_PER_TOKEN = 2 * 2 * 8
POLICIES = pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])


@pytest.fixture(params=[PULL, PUSH], ids=["pull", "push"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.fixture
def push() -> Pair:
    return Pair(PUSH)


@pytest.fixture
def pull() -> Pair:
    return Pair(PULL)


def arrives(pair: Pair, found: Request, num_external: int = len(PROMPT)) -> None:
    """The request finishes with so many tokens from prefill. No hand-over fails, and nothing is left behind."""
    pair.settle()
    assert is_right(found, num_external) and not pair.causes()


def registered(pair: Pair, prompt: tuple[int, ...] = PROMPT) -> tuple[Request, list[Posted]]:
    """Returns a request of decode that has registered before prefill wrote, and what it has sent for that."""
    found = pair.ask_decode(pair.meet(), prompt)
    pair.decode.step()
    pair.turn()
    return found, pair.messages(Registration)


def in_flight(pair: Pair, prompt: tuple[int, ...] = PROMPT, **request: Any) -> Request:
    """Returns a request of decode whose KV is in flight: a READ, or prefill's WRITEs."""
    pair.acquaint()
    if pair.cluster.pushes:
        pair.ask_prefill(prompt)
        found = pair.ask_decode(pair.meet(), prompt, **request)
    else:
        found = pair.ask_decode(pair.offered(prompt), prompt, **request)
    pair.until_posted()
    return found


# ------------------------------------------------------------------------------------------------ successful hand-overs


UNEQUAL = (
    (Shape(is_contiguous=True), Shape(block_size=8, ratio=2, is_head_major=True)),
    (Shape(is_contiguous=True, block_size=12), Shape(is_contiguous=True)),
    *(
        (Shape(tp_size=ours, total_heads=heads, **here), Shape(tp_size=theirs, total_heads=heads, **there))
        for (ours, theirs), heads in itertools.product([(1, 4), (4, 1), (2, 4), (4, 2)], (4, 2, 1))
        for here, there in (({}, {"is_contiguous": True, "block_size": 8}), ({"is_head_major": True, "ratio": 2}, {}))
    ),
)
"""More sizes, shares of heads, and arrangements than the random schedules have."""
ALL_SHAPES = pytest.mark.parametrize(
    "shapes", [*SHAPES, *UNEQUAL], ids=lambda shapes: " ".join(_words(one) for one in shapes)
)


@ALL_SHAPES
def test_decode_first(shapes: tuple[Any, Any]) -> None:
    """Each chunk's blocks are written when it has been computed; chunks end inside blocks on both sides."""
    pair = Pair(PUSH, *(Kind(shape=shape, budget=7) for shape in shapes))
    found = pair.ask_decode(pair.meet())
    pair.settle()
    pair.ask_prefill()
    pair.settle()
    assert is_right(found) and not pair.causes()
    pair.nothing_is_left(LEASE_SECONDS + 10)


@ALL_SHAPES
@DIRECTIONS
def test_prefill_first(mode: TransferMode, shapes: tuple[Any, Any]) -> None:
    """For every combination of block sizes and ranks on the two sides."""
    pair = Pair(mode, *(Kind(shape=shape) for shape in shapes))
    for prompt in (PROMPT, PROMPT[:16], PROMPT[:1]):
        found = pair.hand_over(tuple(token + len(prompt) for token in prompt))
        assert is_right(found, len(prompt)) and not pair.prefill.requests
    assert not pair.causes() and not pair.causes(pair.prefill)
    pair.nothing_is_left(LEASE_SECONDS + 10)


@pytest.mark.parametrize("mode", [PULL, PUSH], ids=["pull", "push"])
def test_pipeline_stages_that_lack_a_layer_together_are_refused(mode: TransferMode) -> None:
    """Every byte that they have is right, and nothing would write the other layer."""
    pair = Pair(mode, kind(pp_size=2))
    answers = dict(pair.prefill.answers)
    tag, told = answers[1, 0]
    answer = read_answer(told)
    rank = read_rank(answer.rank)
    planes = msgspec.structs.replace(rank.groups[0].planes[0], keys=(0,))
    rank = msgspec.structs.replace(rank, groups=(msgspec.structs.replace(rank.groups[0], planes=(planes,)),))
    answers[1, 0] = tag, msgspec.msgpack.encode(Answer(answer.incarnation, msgspec.msgpack.encode(rank)))
    pair.prefill.answers = answers
    found = pair.hand_over()
    assert found.status is Status.STOPPED and pair.causes() == {"refused": 1}
    pair.nothing_is_left(LEASE_SECONDS + 10)


def _words(shape: Any) -> str:
    changed = {name: value for name, value in vars(shape).items() if value != getattr(Shape, name)}
    return "-".join(f"{name}{value:d}" for name, value in changed.items()) or "plain"


def test_a_step_s_blocks_travel_while_the_next_computes() -> None:
    """After the last step only the blocks of that step are left to post."""
    pair = Pair(PUSH, kind(budget=8, depth=1))
    pair.acquaint()
    found = pair.ask_decode(pair.meet(), PROMPT[:1] * 32)
    pair.settle()
    upstream = pair.ask_prefill(PROMPT[:1] * 32)
    before = len(pair.prefill.workers[0].agent.posted)
    for step in range(4):
        assert upstream.num_computed == 8 * step
        pair.round()
        pair.settle_wire()
        assert len(pair.prefill.workers[0].agent.posted) - before == step + 1
    pair.settle()
    sizes = [int(one.local[:, 1].sum()) for one in pair.prefill.workers[0].agent.posted[before:]]
    assert sizes == [8 * BYTES_PER_TOKEN] * 4
    assert is_right(found, 32)


def test_a_full_prefix_hit_frees_prefill_at_once(pair: Pair) -> None:
    """No byte moves, and prefill does not wait until its lease ends."""
    pair.ask_decode(None, PROMPT[:17])
    found = pair.ask_decode(pair.offered(PROMPT[:16]), PROMPT[:17])
    pair.settle()
    assert is_right(found, 0) and not pair.causes()
    assert not pair.prefill.requests
    assert not any(worker.agent.posted for engine in pair.cluster.engines for worker in engine.workers)


# ------------------------------------------------------------------------------------------ aborted requests


@pytest.mark.parametrize("chunks", [0, 1])
def test_prefill_that_is_aborted_fails_the_request_and_waits_for_its_writes(chunks: int) -> None:
    """Prefill is aborted before its first step, or between two steps."""
    pair = Pair(PUSH, kind(budget=9, depth=1), kind(recomputes=False))
    pair.acquaint()
    found = pair.ask_decode(pair.meet())
    pair.settle()
    upstream = pair.ask_prefill(max_tokens=9)
    pair.round(chunks)
    pair.prefill.abort(upstream)
    pair.round()
    if chunks:
        assert upstream.request_id in pair.prefill.requests, "a WRITE still reads its blocks"
    pair.settle()
    assert found.status is Status.ERROR and not pair.prefill.requests
    assert pair.causes() == {"stopped": 1}


@POLICIES
def test_decode_that_is_aborted_keeps_blocks_until_nothing_is_in_flight(pair: Pair, recomputes: bool) -> None:
    """vllm#48633, C1: bytes in flight would be written into blocks of another request. Prefill keeps what is being
    read, and then no lease has to expire."""
    pair = Pair(pair.cluster.settings.transfer_mode, None, kind(recomputes=recomputes))
    found = in_flight(pair)
    transfers = pair.transfers
    pair.decode.abort(found)
    pair.round(6)
    assert not pair.decode.requests and pair.decode.handover.engine.holds.num_blocks == 5
    assert pair.decode.quarantined == 5 and pair.prefill.requests
    for posted in transfers:
        pair.wire.deliver(posted)
    # Cancelled transfers are polled from time to time.
    pair.pass_time(1)
    assert not pair.decode.handover.engine.holds.num_blocks and not pair.decode.quarantined
    assert not pair.prefill.requests
    before = len(pair.prefill.workers[0].agent.posted)
    pair.settle()
    assert len(pair.prefill.workers[0].agent.posted) == before, "something is written after the withdrawal"
    pair.nothing_is_left(0)


def test_a_withdrawal_that_overtakes_its_registration_wins(push: Pair) -> None:
    """Prefill ignores the late registration, because its blocks belong to other requests by then."""
    push.acquaint()
    push.ask_prefill()
    push.settle()
    found, (registration,) = registered(push)
    push.decode.abort(found)
    push.decode.step()
    push.turn()
    for message in push.messages(Withdrawal):
        push.wire.deliver(message)
    push.turn()
    (stopped,) = push.messages(Stopped)
    push.wire.deliver(stopped)
    push.turn()
    push.decode.step()
    assert not push.decode.handover.engine.holds.num_blocks
    before = len(push.prefill.workers[0].agent.posted)
    push.wire.deliver(registration)
    push.pass_time(LEASE_SECONDS)
    assert len(push.prefill.workers[0].agent.posted) == before


def test_the_client_hears_at_once_though_blocks_are_held(pair: Pair) -> None:
    """The client gets its error before the blocks are free."""
    pair = Pair(pair.cluster.settings.transfer_mode, None, kind(recomputes=False))
    found = in_flight(pair)
    pair.clock.advance(TIMEOUT_SECONDS)
    pair.until(found, Status.ERROR)
    pair.round(3)
    assert pair.causes() == {"deadline": 1} and pair.decode.quarantined == 5
    pair.pass_time(1)
    assert pair.decode.quarantined == 0


# -------------------------------------------------------------------------------------------------------- preemptions


def preempt(pair: Pair, request: Request) -> None:
    pair.prefill.running.remove(request)
    pair.prefill.preempt(request)


def pushing(**more: Any) -> tuple[Pair, Request, Request]:
    """A push whose prefill, which computes 5 tokens a step, begins when decode has registered; and both requests."""
    pair = Pair(PUSH, kind(budget=5, depth=1, caches_prefixes=False, **more))
    pair.acquaint()
    found = pair.ask_decode(pair.meet())
    pair.settle()
    return pair, found, pair.ask_prefill()


def test_a_preempted_request_keeps_its_old_blocks_while_they_are_read_and_goes_on_in_new_ones() -> None:
    pair, found, upstream = pushing()
    pair.until_posted()
    preempt(pair, upstream)
    pair.round(8)
    assert len(holds_of(pair.prefill.handover)) == 1, "a WRITE reads its old blocks"
    assert upstream.status is Status.STOPPED
    pair.settle()
    assert not holds_of(pair.prefill.handover)
    arrives(pair, found)


# ------------------------------------------------------------------------------------------------------------- leases


def test_blocks_that_decode_never_asks_for_are_free_after_the_lease(pair: Pair) -> None:
    upstream = pair.ask_prefill()
    pair.settle()
    pair.pass_time(LEASE_SECONDS - 1)
    assert upstream.request_id in pair.prefill.requests
    pair.pass_time(2)
    assert not pair.prefill.requests
    found = pair.ask_decode(upstream.answer)
    pair.settle()
    assert found.status is Status.STOPPED and not found.num_external and pair.causes() == {"lease": 1}


def test_a_lease_lasts_while_decode_waits_for_blocks_and_shelters_no_other(pair: Pair) -> None:
    """vllm#38027: a request may wait in decode's queue for longer than a lease."""
    pair = Pair(pair.cluster.settings.transfer_mode, None, kind(num_blocks=7, caches_prefixes=False, budget=4))
    upstream, forgotten = pair.ask_prefill(), pair.ask_prefill(name="cmpl-2-0")
    pair.settle()
    blocker = pair.decode.add(Request("blocker", PROMPT[:20], None, max_tokens=1))
    pair.decode.pool.free.clear()
    pair.decode.step()
    found = pair.ask_decode(upstream.answer)
    for _ in range(5):
        pair.pass_time(LEASE_SECONDS / 3)
    assert found.status is Status.WAITING
    assert upstream.request_id in pair.prefill.requests and forgotten.request_id not in pair.prefill.requests
    pair.decode.abort(blocker)
    pair.decode.pool.free.update(dict.fromkeys(range(1, 7)))
    arrives(pair, found)


def test_a_lease_that_ends_while_its_blocks_are_written_keeps_them_until_that_has_ended(push: Pair) -> None:
    """Decode registered in time; only its heartbeats are lost."""
    found = in_flight(push)
    for _ in range(4):
        push.clock.advance(LEASE_SECONDS / 3)
        for posted in [one for one in push.wire.pending if is_heartbeat(one.notification)]:
            push.wire.drop(posted)
        push.turn()
        push.prefill.step()
    assert push.prefill.requests, "a WRITE reads its blocks"
    push.settle()
    assert is_right(found) and not push.prefill.requests


# ------------------------------------------------------------------------------ peers that die, vanish or restart


@pytest.mark.parametrize("moment", ["asked", "in flight", "arrived"])
def test_prefill_that_dies_fails_the_request_soon(pair: Pair, moment: str) -> None:
    """Bytes that arrived without prefill's final message are not used either."""
    pair.acquaint()
    upstream = pair.ask_prefill()
    if moment == "asked" and pair.cluster.pushes:
        found = pair.ask_decode(pair.meet(transfer_id="another"))
    else:
        pair.settle()
        found = pair.ask_decode(upstream.answer)
    for _ in range(3 * (moment == "asked")):
        pair.decode.step()
        pair.turn()
    if moment != "asked":
        pair.until_posted()
    if moment == "arrived":
        for posted in pair.transfers:
            pair.wire.deliver(posted)
    pair.cluster.kill(pair.prefill)
    pair.pass_time(REPEAT_SECONDS + DEAD_SECONDS + 1)
    assert found.status is Status.STOPPED and not found.num_external
    assert set(pair.causes()) <= {"lost", "unreachable"} and sum(pair.causes().values()) == 1
    pair.nothing_is_left(60)


def test_workers_that_outlive_their_engine_for_a_moment_write_into_blocks_that_are_held(push: Pair) -> None:
    """The side channel is closed, so the client gets its result at once; a WRITE is still in flight."""
    found = in_flight(push)
    (write,) = push.transfers
    push.cluster.stop_listening(push.prefill)
    push.clock.advance(REPEAT_SECONDS)
    push.until(found, Status.STOPPED)
    assert push.causes() == {"lost": 1}
    for _ in range(int(UNHEARD_SECONDS / REPEAT_SECONDS) - 1):
        push.clock.advance(REPEAT_SECONDS)
        push.round(6)
    assert push.decode.quarantined == 5
    push.wire.deliver(write)
    push.cluster.kill(push.prefill)
    push.pass_time(2 * REPEAT_SECONDS)
    assert push.decode.quarantined == 0


def test_workers_whose_engine_was_replaced_write_into_blocks_that_are_held(push: Pair) -> None:
    """Review row A8: the core was killed and restarted, and its workers have not noticed. A WRITE is in flight."""
    found = in_flight(push)
    (write,) = push.transfers
    workers, before = list(push.prefill.workers), push.prefill
    push.cluster.stop_listening(push.prefill)
    push.prefill = push.cluster.engine("p", push.prefill.kind)
    push.clock.advance(LOOK_SECONDS + 1)
    push.until(found, Status.STOPPED)
    assert push.causes() == {"lost": 1}
    # Those workers cannot be asked, so their write gate is closed, and only then are the blocks free.
    assert push.decode.quarantined == 5 or write not in push.wire.pending
    push.round()
    if write in push.wire.pending:
        push.wire.deliver(write)
    push.settle()
    push.pass_time(1)
    assert push.decode.quarantined == 0
    for worker in workers:
        assert worker.agent_name in push.wire.agents, "it lives"
    push.cluster.kill(before)


@pytest.mark.parametrize("end", ["it comes back", "it was started again", "it has ended"])
def test_prefill_whose_host_is_gone_without_a_word(pair: Pair, end: str) -> None:
    """The request fails at its deadline; the blocks are in quarantine, and the engine sleeps."""
    found = in_flight(pair)
    transfers = pair.transfers
    pair.cluster.vanish(pair.prefill)
    pair.pass_time(TIMEOUT_SECONDS - 2)
    assert found.status is Status.REMOTE
    pair.pass_time(4)
    assert found.status is Status.STOPPED and not found.num_external
    assert pair.causes() in ({"deadline": 1}, {"unreachable": 1})
    if pair.cluster.pushes:
        assert pair.decode.quarantined == 5 and not pair.decode.has_requests
        pair.pass_time(UNHEARD_SECONDS - REPEAT_SECONDS - 4)
        assert pair.decode.quarantined == 5
        pair.pass_time(2 * REPEAT_SECONDS + 4)
        assert pair.decode.quarantined == 0, "it is fenced"
    if end == "it comes back":
        pair.cluster.come_back(pair.prefill)
        # The blocks are reused meanwhile; the late WRITEs must not reach them.
        again = pair.ask_decode(None, tuple(range(25, 43)))
        pair.decode.step()
        for posted in transfers:
            if posted in pair.wire.pending:
                pair.wire.deliver(posted)
        pair.settle()
        assert again.status is Status.STOPPED
    elif end == "it was started again":
        pair.prefill = pair.cluster.restart(pair.prefill)
    else:
        pair.cluster.kill(pair.prefill)
    pair.pass_time(REPEAT_SECONDS * 3)
    assert pair.decode.quarantined == 0


@pytest.mark.parametrize("end", ["it comes back", "it is killed", "its host is gone"])
def test_blocks_are_held_while_a_transfer_is_in_flight_to_a_peer_that_stands_still(pair: Pair, end: str) -> None:
    """Whatever was removed by then: NIXL moves the bytes when the peer goes on, and only NIXL knows that it cannot."""
    found = in_flight(pair)
    transfers, pushes = pair.transfers, pair.cluster.pushes
    still = pair.decode if pushes else pair.prefill
    pair.cluster.vanish(still)
    if not pushes:
        pair.decode.abort(found)
    pair.pass_time(FORGOTTEN_SECONDS)
    assert not any(worker.agent.peers for engine in pair.cluster.running for worker in engine.workers)
    assert pair.prefill.requests if pushes else pair.decode.quarantined == 5
    if end == "it comes back":
        pair.cluster.come_back(still)
    elif end == "it is killed":
        pair.cluster.kill(still)
    else:
        for posted in transfers:
            pair.wire.fail(posted)
    pair.pass_time(2 * LEASE_SECONDS)
    assert not (pair.prefill.requests if pushes else pair.decode.quarantined)
    if end != "its host is gone":
        pair.nothing_is_left()


def test_an_idle_decode_whose_host_is_gone_costs_prefill_its_blocks_for_a_while(pair: Pair) -> None:
    pair.acquaint()
    pair.ask_prefill()
    pair.settle()
    pair.cluster.vanish(pair.decode)


def test_a_prefill_that_was_started_again_is_another_one(pair: Pair) -> None:
    """It has the same id and address. What the old one announced is not used, and the new one gets a handshake."""
    pair.acquaint()
    offered = pair.offered()
    pair.prefill = pair.cluster.restart(pair.prefill)
    late = pair.ask_decode(offered)
    pair.settle()
    assert late.status is Status.STOPPED and not late.num_external
    assert set(pair.causes()) <= {"restarted", "lost"}
    # The new request has the same blocks as the old one.
    found = pair.hand_over(tuple(reversed(PROMPT)))
    assert is_right(found) and sum(pair.causes().values()) == 1


# ------------------------------------------------------------------------------------------------------- handshakes


def refuse_answers(pair: Pair, host: str, times: int) -> None:
    """Lets the first ``times`` handshakes with ``host`` time out."""
    for _ in range(200):
        if not times:
            return
        pair.wire.deliver_all()
        for question in list(pair.cluster.questions):
            times -= question.host == host
            pair.cluster.answer(question, late=question.host == host)
        pair.turn()
        for engine in pair.cluster.running:
            engine.step()
    raise AssertionError(f"{host} was not asked so often")


@pytest.mark.parametrize("times", [HANDSHAKE_TRIES - 1, HANDSHAKE_TRIES])
def test_a_prefill_that_does_not_answer_at_once_is_asked_again(pair: Pair, times: int) -> None:
    """Prefill is stopped for a while. If it never answers, the request fails."""
    found = pair.ask_decode(pair.offered())
    refuse_answers(pair, "host-p", times)
    pair.settle()
    if times < HANDSHAKE_TRIES:
        assert is_right(found) and not pair.causes()
    else:
        assert found.status is Status.STOPPED and not found.num_external and pair.causes() == {"unreachable": 1}


def test_a_handshake_that_hangs_holds_up_nobody_else(pair: Pair) -> None:
    hung = pair.cluster.engine("h")
    theirs, ours = pair.ask_prefill(engine=hung), pair.ask_prefill(tuple(reversed(PROMPT)), "cmpl-2-0")
    pair.settle()
    stuck = pair.ask_decode(theirs.answer)
    fine = pair.ask_decode(ours.answer, tuple(reversed(PROMPT)), "cmpl-2-0")
    for _ in range(30):
        pair.wire.deliver_all()
        for question in [one for one in pair.cluster.questions if one.host != "host-h"]:
            pair.cluster.answer(question)
        pair.turn()
        for engine in pair.cluster.running:
            engine.step()
    assert is_right(fine) and stuck.status is Status.REMOTE
    pair.settle()
    assert is_right(stuck) and not pair.causes()


# ----------------------------------------------------------------------------- messages and transfers that go astray


def test_decode_goes_on_when_every_write_has_arrived(push: Pair) -> None:
    """The last WRITE may arrive first."""
    few = Budget(descriptors=1)
    push = Pair(PUSH, kind(transfer_queue=few))
    push.acquaint()
    push.ask_prefill()
    found = push.ask_decode(push.meet())
    *earlier, last = push.until_posted(2)
    push.wire.deliver(last)
    push.round(6)
    assert found.status is Status.REMOTE
    for posted in earlier:
        push.wire.deliver(posted)
    arrives(push, found)


def test_a_registration_that_is_lost_fails_at_the_deadline(push: Pair) -> None:
    push.acquaint()
    push.ask_prefill()
    found, (registration,) = registered(push)
    push.wire.drop(registration)
    push.pass_time(TIMEOUT_SECONDS - 1)
    assert found.status is Status.REMOTE
    push.pass_time(4)
    assert found.status is Status.STOPPED and push.causes() == {"deadline": 1}


def test_a_rank_that_fails_ends_the_attempt_on_all_of_them() -> None:
    """One rank's registration is lost, the other rank's WRITE fails: nothing waits for a message that never comes."""
    pair = Pair(PUSH, None, kind(tp_size=2))
    pair.acquaint()
    pair.ask_prefill()
    found, (lost, _) = registered(pair)
    pair.wire.drop(lost)
    (write,) = pair.until_posted()
    pair.wire.fail(write)
    pair.pass_time(REPEAT_SECONDS + 1)
    assert found.status is Status.STOPPED and pair.causes() == {"lost": 1}
    assert pair.decode.quarantined == 0


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1)], ids=["2 to 2", "1 to 2", "2 to 1"])
def test_a_rank_whose_message_that_it_has_stopped_is_lost_is_asked_again(ranks: tuple[int, int]) -> None:
    """Until it answers, the blocks of all ranks stay held, whatever the other ranks send."""
    pair = Pair(PUSH, kind(tp_size=ranks[0]), kind(tp_size=ranks[1]))
    pair.acquaint()
    found = pair.ask_decode(pair.meet())
    pair.until(found, Status.REMOTE)
    pair.round(3)
    pair.decode.abort(found)
    while not pair.messages(Stopped):
        for posted in pair.messages(Registration, Withdrawal):
            pair.wire.deliver(posted)
        pair.turn()
        pair.decode.step()
    lost = pair.messages(Stopped)[-1]
    pair.wire.drop(lost)
    pair.round(5)
    assert pair.decode.quarantined == 5 and pair.decode.handover.engine.holds.num_blocks == 5
    pair.pass_time(REPEAT_SECONDS + 1)
    assert pair.decode.quarantined == 0


def test_a_transfer_that_has_failed_is_idle_when_its_peer_was_removed(pair: Pair) -> None:
    """nixl#2044: its remaining bytes may arrive until then."""
    found = in_flight(pair)
    (transfer,) = pair.transfers
    pair.wire.fail(transfer, rest=True)
    (rest,) = pair.wire.rests
    for _ in range(8):
        pair.round()
        if pair.wire.rests and not pair.decode.quarantined and found.status is Status.REMOTE:
            continue
        assert not pair.wire.rests, "blocks are given back, and a failed transfer may still write them"
    assert found.status is not Status.REMOTE
    pair.settle()


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_blocks_are_held_for_what_the_host_has_buffered_of_a_write_that_has_failed(
    push: Pair, is_answer_lost: bool
) -> None:
    """Prefill says so over another connection, which may overtake it. Who asks again is told that it has failed."""
    found = in_flight(push)
    push.wire.fail(push.transfers[0])
    if is_answer_lost:
        while not push.messages(Stopped):
            push.turn()
        push.wire.drop(push.messages(Stopped)[0])
        push.decode.abort(found)
    push.pass_time(1.0)
    assert push.causes() == ({} if is_answer_lost else {"lost": 1}) and push.decode.quarantined == 5
    push.pass_time(3 * DEAD_SECONDS)
    assert push.decode.quarantined == 0 and found.status.is_finished


@pytest.mark.parametrize("end", ["nobody listens", "it was started again"])
def test_a_client_hears_at_once_that_the_prefill_whose_kv_is_read_is_gone(pull: Pair, end: str) -> None:
    """Its worker stands still, so NIXL says nothing of the READ, whose blocks stay held."""
    found = in_flight(pull)
    before, own = pull.prefill, pull.prefill.own
    pull.cluster.vanish(before)
    pull.cluster.listening.pop((own.host, own.port))
    if end == "it was started again":
        pull.cluster.alive.remove(before)
        pull.cluster.engine("p", before.kind)
    pull.pass_time(2 * LOOK_SECONDS)
    assert found.status is Status.STOPPED and pull.causes() == {"lost": 1} and pull.decode.quarantined == 5
    pull.cluster.kill(before)


def test_one_clients_end_does_not_free_the_blocks_of_another(pull: Pair) -> None:
    """One client leaves during its READ, decode checks whether prefill lives, and the other client's READ fails, whose
    remaining bytes arrive until its peer is removed."""
    pull.acquaint()
    prompts = (PROMPT, tuple(reversed(PROMPT)))
    answers = [pull.offered(prompt) for prompt in prompts]
    gone, found = (pull.ask_decode(*one) for one in zip(answers, prompts, strict=True))
    pull.until_posted(2)
    pull.decode.abort(gone)
    pull.round(3)
    pull.clock.advance(REPEAT_SECONDS + 1)
    pull.round(3)
    (transfer,) = [one for one in pull.transfers if found in pull.wire.meant[one][0]]
    pull.wire.fail(transfer, 0.3, rest=True)
    pull.round(8)
    for rest in pull.wire.rests:
        # `Cluster.watch` fails if the blocks have another owner by now.
        pull.wire.land(rest)
    pull.pass_time(1.0)
    assert found.status is not Status.REMOTE


@pytest.mark.parametrize("end", ["restarts", "vanishes and comes back"])
def test_a_prefill_of_two_names_that_is_gone_is_gone_by_both(pair: Pair, end: str) -> None:
    """A hand-over is in flight by one name, and prefill's successor answers under the other name."""
    own = pair.prefill.own
    by_alias = {"remote_host": "alias"}
    pair.cluster.listening["alias", own.port] = pair.prefill
    pair.acquaint()
    short = (1, 2, 3, 4, 5, 6)
    other = pair.ask_decode({**pair.offered(short), **by_alias}, short)
    pair.settle()
    assert is_right(other, 6)
    if pair.cluster.pushes:
        found = pair.ask_decode(pair.meet(transfer_id="t", **by_alias))
        pair.round(10)
    else:
        found = pair.ask_decode({**pair.offered(), **by_alias})
        pair.until_posted()
    if end == "restarts":
        successor = pair.cluster.restart(pair.prefill)
    else:
        transfers = [] if pair.cluster.pushes else pair.transfers
        pair.cluster.vanish(pair.prefill)
        pair.pass_time(20)
        for posted in transfers:
            # NIXL finds out that the host is gone.
            pair.wire.fail(posted)
        pair.cluster.listening.pop((own.host, own.port))
        pair.cluster.alive.remove(pair.prefill)
        successor = pair.cluster.engine("p", pair.prefill.kind)
    pair.cluster.listening["alias", own.port] = successor
    pair.pass_time(TIMEOUT_SECONDS + 30)
    assert found.status is Status.STOPPED and not found.num_external
    assert not pair.decode.quarantined and not pair.decode.handover.engine.holds.num_blocks


@pytest.mark.parametrize("is_alone", [False, True])
def test_who_waits_for_blocks_that_are_in_quarantine_is_told_so(is_alone: bool) -> None:
    """A stopped process of this host may write most of decode's pool.

    A request that does not fit in the other blocks fails; requests that fit continue.
    """
    pair = Pair(PUSH, kind(num_blocks=40), kind(num_blocks=20))
    pair.cluster.sharing |= {"host-p", "host-d"}
    large = tuple(range(1, 46))
    found = pair.ask_decode(pair.meet(transfer_id="t"), large)
    pair.round(10)
    pair.cluster.vanish(pair.prefill)
    behind = [] if is_alone else [pair.ask_decode(None, (5, 6, 7)) for _ in range(2)]
    pair.pass_time(TIMEOUT_SECONDS + 10)
    assert found.status is Status.WAITING and pair.decode.quarantined == 12 and pair.causes() == {"deadline": 1}
    pair.pass_time(TIMEOUT_SECONDS + 10)
    assert found.status is Status.ERROR and pair.causes() == {"deadline": 1, "quarantine": 1}
    assert [one.status for one in behind] == [Status.STOPPED] * len(behind)
    plain = pair.ask_decode(None, (5, 6, 7))
    pair.settle()
    assert plain.status is Status.STOPPED and pair.decode.quarantined == 12
    # The kernel reports that a process has ended, and a process that continues answers by itself.
    pair.cluster.kill(pair.prefill)
    pair.pass_time(LOOK_SECONDS + 2 * DEAD_SECONDS + 5)
    assert pair.decode.quarantined == 0


@pytest.mark.parametrize("sharing", [False, True], ids=["another host", "one host"])
def test_one_that_stood_still_changes_no_byte_of_what_others_got_meanwhile(sharing: bool, push: Pair) -> None:
    """R13: a stopped writer is fenced if it can be; else the blocks are held. `Cluster.allow` checks every byte."""
    if sharing:
        push.cluster.sharing |= {"host-p", "host-d"}
    found = in_flight(push)
    (write,) = push.transfers
    push.cluster.vanish(push.prefill)
    push.pass_time(TIMEOUT_SECONDS + UNHEARD_SECONDS + 2 * REPEAT_SECONDS)
    assert found.status is Status.STOPPED and push.decode.quarantined == (5 if sharing else 0)
    again = push.ask_decode(None, tuple(range(25, 43)))
    push.settle()
    assert again.status is Status.STOPPED
    push.cluster.come_back(push.prefill)
    if write in push.wire.pending:
        push.wire.deliver(write)
    push.pass_time(3 * REPEAT_SECONDS)
    assert push.decode.quarantined == 0
    assert is_right(push.hand_over(tuple(reversed(PROMPT))))


def test_a_transfer_that_cannot_be_posted_fails_the_request(pair: Pair) -> None:
    """vllm#50754: prefill tells decode, which would otherwise wait."""
    pair.acquaint()
    mover = pair.prefill if pair.cluster.pushes else pair.decode
    mover.workers[0].agent.refuse_posts = True
    found = pair.hand_over()
    assert found.status is Status.STOPPED and pair.causes() == {"lost": 1}
    mover.workers[0].agent.refuse_posts = False
    assert is_right(pair.hand_over(tuple(reversed(PROMPT))))


def stranger(pair: Pair, to: Engine, *notifications: bytes) -> None:
    """An agent that is no party to any hand-over sends these to an engine."""
    agent, worker = pair.cluster.engine("s").workers[0].agent, to.workers[0]
    agent.add_peer(worker.agent.metadata())
    for notification in notifications:
        agent.send(worker.agent_name, notification)
    agent.remove_peer(worker.agent_name)


def test_another_agent_cannot_withdraw(push: Pair) -> None:
    """Only the rank that registered may withdraw."""
    push.acquaint()
    found, (posted,) = registered(push)
    registration = decode(posted.notification)
    assert isinstance(registration, Registration)
    push.settle()
    stranger(push, push.prefill, encode(Withdrawal(registration.attempt, registration.decode)))
    push.settle()
    assert found.status is Status.REMOTE
    push.ask_prefill()
    push.settle()
    assert is_right(found) and not push.causes()


def test_what_another_agent_says_is_not_believed(push: Pair) -> None:
    """Decode ignores `Written` and `Stopped` messages of other agents."""
    push.acquaint()
    earlier = set(push.decode.attempts)
    found = push.ask_decode(push.meet())
    push.settle()
    (attempt,) = push.decode.attempts.keys() - earlier
    upstream = push.ask_prefill(name="cmpl-2-0")
    while upstream.answer is None:
        push.prefill.step()
    made = convert({**upstream.answer["kvcached_nixl"], "groups": []}, Manifest)
    said = Written(attempt, 0, 0, made), Stopped(attempt, 0, 9, "so what", False), Stopped(attempt, 5, 9, "?", False)
    stranger(push, push.decode, *map(encode, said))
    push.settle()
    assert found.status is Status.REMOTE and push.dropped()["not a contributor"] == 3
    push.ask_prefill()
    push.settle()
    assert is_right(found)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ({"digest": "0" * 32}, "digest"),
        ({"num_tokens": 1}, "digest"),
        ({"incarnation": "0" * 16}, "restarted"),
        ({"request_id": "another"}, "protocol"),
    ],
)
def test_what_prefill_says_that_it_has_written_is_compared(push: Pair, what: dict[str, Any], cause: str) -> None:
    """Bytes that have arrived are not used unless the manifest in `Written` matches what decode requested."""
    push.acquaint()
    found = push.ask_decode(push.offered())
    (write,) = push.until_posted()
    said = decode(write.notification)
    assert isinstance(said, Written) and said.manifest is not None
    write.notification = encode(
        Written(said.attempt, said.tp_rank, said.index, msgspec.structs.replace(said.manifest, **what))
    )
    push.settle()
    assert found.status is Status.STOPPED and not found.num_external and push.causes() == {cause: 1}


def test_rubbish_costs_nothing(pair: Pair) -> None:
    pair.acquaint()
    rubbish = (b"", b"KVNX6:", b"KVNX6:" + b"\x91" * 2000, b"HB:\xff", b"req:1", b"\xff" * 100)
    stranger(pair, pair.prefill, *rubbish)
    with Defects() as defects:
        pair.settle()
    assert not defects.found and pair.dropped()["malformed"] == 5
    assert is_right(pair.hand_over())


# --------------------------------------------------------------------- parameters that others have changed


def changed(params: dict[str, Any], **what: Any) -> dict[str, Any]:
    return {**params, **what}


def manifest(params: dict[str, Any], **what: Any) -> dict[str, Any]:
    return {**params, "kvcached_nixl": {**params["kvcached_nixl"], **what}}


def other_blocks(params: dict[str, Any]) -> dict[str, Any]:
    (group,) = params["kvcached_nixl"]["groups"]
    return manifest(params, groups=[{**group, "block_ids": list(reversed(group["block_ids"]))}])


WRONG: dict[str, tuple[Any, set[str]]] = {
    "no manifest": (lambda p: changed(p, kvcached_nixl=None), {"no_manifest"}),
    "both roles": (lambda p: changed(p, do_remote_decode=True), {"parameters"}),
    "role only": (lambda p: {"do_remote_prefill": True}, {"parameters"}),
    "role that is no boolean": (lambda p: changed(p, do_remote_prefill=1), {"parameters"}),
    "no port": (lambda p: changed(p, remote_port=None), {"parameters"}),
    "port of a million": (lambda p: changed(p, remote_port=10**6), {"parameters"}),
    "tp_size of a billion": (lambda p: changed(p, tp_size=10**9), {"parameters"}),
    "tp_size that is a lie": (lambda p: changed(p, tp_size=2), {"refused", "unreachable"}),
    "tp_size that does not divide": (lambda p: changed(p, tp_size=3), {"refused", "unreachable"}),
    "another engine's id": (lambda p: changed(p, remote_engine_id="q"), {"unreachable"}),
    "a host that is decode's": (lambda p: changed(p, remote_host="host-d"), {"unreachable"}),
    "a host that nobody has": (lambda p: changed(p, remote_host="nowhere"), {"unreachable"}),
    "another protocol": (lambda p: manifest(p, protocol=3), {"parameters"}),
    "another digest": (lambda p: manifest(p, digest="0" * 32), {"digest"}),
    "another start": (lambda p: manifest(p, incarnation="0" * 16), {"restarted"}),
    "a token more": (lambda p: manifest(p, num_tokens=19), {"digest"}),
    "a token fewer": (lambda p: manifest(p, num_tokens=17), {"digest"}),
    "a block fewer": (lambda p: manifest(p, groups=[{"first_token": 0, "block_ids": [1]}]), {"parameters"}),
    "a block that there is not": (
        lambda p: manifest(p, groups=[{"first_token": 0, "block_ids": [1, 2, 3, 4, 10**6]}]),
        {"range", "none if prefill writes"},
    ),
    "the blocks in another order": (other_blocks, {"lease", "none if prefill writes"}),
    "blocks of eight": (
        lambda p: manifest(p, block_sizes=[8], groups=[{"first_token": 0, "block_ids": [1, 2, 3]}]),
        {"range", "none if prefill writes"},
    ),
    "no groups": (lambda p: manifest(p, groups=[]), {"range"}),
    "context parallelism": (lambda p: manifest(p, context_parallel=[2, 1]), {"parameters"}),
    "another request": (lambda p: manifest(p, request_id="cmpl-1-0-ffffffff"), {"lease"}),
    "a manifest that is a list": (lambda p: changed(p, kvcached_nixl=[]), {"parameters"}),
}


@pytest.mark.parametrize("case", WRONG)
@POLICIES
def test_wrong_parameters_cost_their_request(pair: Pair, case: str, recomputes: bool) -> None:
    """No byte is used, the request ends as the policy says, the cause is counted, and both engines continue."""
    pair = Pair(pair.cluster.settings.transfer_mode, None, kind(recomputes=recomputes))
    pair.acquaint()
    offered = pair.offered()
    change, causes = WRONG[case]
    with Defects() as defects:
        found = pair.ask_decode(change(offered))
        pair.pass_time(TIMEOUT_SECONDS + 4)
    assert not defects.found
    if case == "no manifest" and pair.cluster.pushes:
        # Looks like a request that goes to both at once: decode gets its KV by name and prompt.
        causes = {"none if prefill writes"}
    if "none if prefill writes" in causes and pair.cluster.pushes:
        assert is_right(found) and not pair.causes()
    else:
        assert found.status is (Status.STOPPED if recomputes else Status.ERROR)
        assert len(pair.causes()) == 1 and set(pair.causes()) <= causes
    assert is_right(pair.hand_over(tuple(reversed(PROMPT))))


@pytest.mark.parametrize(
    "prompt", [(*PROMPT[:7], 0, *PROMPT[8:]), PROMPT[:10], (0, *PROMPT)], ids=["another token", "shorter", "longer"]
)
def test_another_prompt_than_prefill_s_is_not_given_its_kv(pair: Pair, prompt: tuple[int, ...]) -> None:
    found = pair.ask_decode(pair.offered(), prompt)
    pair.settle()
    assert found.status is Status.STOPPED and not found.num_external and pair.causes() == {"digest": 1}


def test_wrong_parameters_for_prefill_cost_no_answer(pair: Pair) -> None:
    """Prefill computes the request, but does not offer it."""
    for params in ({"do_remote_decode": "yes"}, {"do_remote_decode": True, "transfer_id": 3}):
        upstream = pair.ask_prefill(params=params)
        pair.settle()
        assert upstream.status is Status.STOPPED and upstream.answer is None
    assert pair.causes(pair.prefill) == {"parameters": 2}


# ------------------------------------------------------------------------------------------------- names and children


@pytest.mark.parametrize("order", ["decode first", "prefill first", "crossed"])
@pytest.mark.parametrize("by", ["X-Request-Id", "transfer_id"])
def test_two_prompts_under_one_name_get_their_own_kv(push: Pair, by: str, order: str) -> None:
    """The name finds candidates, and the digest decides: no request gets another one's KV."""
    prompts = [PROMPT, tuple(reversed(PROMPT))]
    extra = {"transfer_id": "t"} if by == "transfer_id" else {}
    found = []

    def upstream() -> None:
        for prompt in prompts:
            push.ask_prefill(prompt, **extra)
            push.settle()

    def downstream() -> None:
        for prompt in reversed(prompts) if order == "crossed" else prompts:
            found.append(push.ask_decode(push.meet(**extra), prompt))
            push.settle()

    for ask in (upstream, downstream) if order == "prefill first" else (downstream, upstream):
        ask()
    assert [is_right(one) for one in found] == [True, True] and not push.causes()
    push.nothing_is_left(LEASE_SECONDS + 10)


@pytest.mark.parametrize("children", [2, 3])
def test_children_of_one_request_share_its_parameters(pair: Pair, children: int) -> None:
    """``n`` > 1: each child has a hand-over or computes its prompt; none of them hangs."""
    pair = Pair(pair.cluster.settings.transfer_mode, None, kind(caches_prefixes=False))
    found = [pair.ask_decode(pair.offered(), name=f"{child}_cmpl-1-0") for child in range(children)]
    pair.pass_time(GRACE_SECONDS + 1)
    assert [one.status for one in found] == [Status.STOPPED] * children
    assert any(one.num_external for one in found) and set(pair.causes()) <= {"lease"}


# ---------------------------------------------------------------------------------------------------------- staging

SLOTS = (16, 4)
"""8 of the 16 slots may hold KV that no peer has requested yet."""
LONG = tuple(range(100, 160))
"""15 blocks."""
SIDES = [(SLOTS, (0, 0)), ((0, 0), SLOTS), (SLOTS, SLOTS)]


@pytest.mark.parametrize("sides", SIDES, ids=["P", "D", "both"])
@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["fits", "larger than the slab"])
def test_what_is_staged_arrives(pair: Pair, sides: tuple[tuple[int, int], ...], prompt: tuple[int, ...]) -> None:
    """For each side that stages. A request larger than the slab is moved range by range."""
    pair = Pair(pair.cluster.settings.transfer_mode, *(kind(slots=slots) for slots in sides))
    found = pair.hand_over(prompt)
    arrives(pair, found, len(prompt))


def test_a_staged_pull_that_was_preempted_is_copied_when_it_has_ended() -> None:
    """Its blocks are not held a second time, so they may be reused while it generates after its prompt."""
    pair = Pair(PULL, kind(budget=5, depth=1, caches_prefixes=False, slots=(32, 8)))
    upstream = pair.ask_prefill(max_tokens=8)
    pair.prefill.step()
    preempt(pair, upstream)
    worker = pair.prefill.workers[0]
    assert len(holds_of(pair.prefill.handover)) == 1 and worker.copier is not None
    while holds_of(pair.prefill.handover):
        pair.round()
        worker.copy()
    while upstream.num_computed < len(PROMPT) + 2:
        pair.round()
    assert not worker.copier.asked
    preempt(pair, upstream)
    assert not holds_of(pair.prefill.handover)
    pair.settle()
    found = pair.ask_decode(upstream.answer)
    arrives(pair, found)


@pytest.mark.parametrize("is_late", [False, True], ids=["copied", "being copied"])
def test_what_was_copied_of_a_pull_that_begins_anew_is_not_used(is_late: bool) -> None:
    """It may have been preempted because the weights have changed."""
    pair = Pair(PULL, kind(budget=5, depth=1, caches_prefixes=False, slots=(32, 8)))
    upstream = pair.ask_prefill()
    worker = pair.prefill.workers[0]
    while not (worker.copier is not None and worker.copier.asked):
        pair.round()
    if not is_late:
        worker.copy()
        pair.round()
    preempt(pair, upstream)
    pair.round(2)
    assert not parked_of(worker.registry) and not upstream.status.is_finished
    worker.copy()
    pair.settle()
    found = pair.ask_decode(upstream.answer)
    arrives(pair, found)


@pytest.mark.parametrize("is_full", [False, True], ids=["room", "full"])
def test_a_registration_of_other_groups_costs_itself(is_full: bool) -> None:
    """Prefill's blocks become free and its engine lives, whatever a registration contains (R10)."""
    pair = Pair(PULL, kind(slots=SLOTS))
    pair.acquaint()
    offered = pair.offered(LONG)
    worker = pair.prefill.workers[0]
    staging = worker.staging
    assert staging is not None and not parked_of(worker.registry), "it is larger than the slab"
    taken = staging.slots.take(staging.slots.available(Use.SENDING), Use.SENDING) if is_full else []
    found = pair.ask_decode(offered, LONG)
    while not pair.messages(Registration):
        pair.decode.step()
        pair.turn()
    (posted,) = pair.messages(Registration)
    said = decode(posted.notification)
    assert isinstance(said, Registration)
    twice = {"groups": said.groups * 2, "block_sizes": said.block_sizes * 2}
    posted.notification = encode(msgspec.structs.replace(said, **twice))
    pair.round(5)
    if is_full:
        staging.give_back(Held(Use.SENDING, "", 0, 0, (KernelBlockRange(0, tuple(map(KernelBlock, taken))),), taken, 0))
    pair.settle()
    assert not is_right(found, len(LONG)) and pair.causes() == {"range": 1}


def test_slots_are_copied_when_every_rank_has_written() -> None:
    """Each block has heads of both ranks of prefill."""
    pair = Pair(PUSH, kind(tp_size=2), kind(slots=SLOTS))
    pair.acquaint()
    pair.ask_prefill()
    found = pair.ask_decode(pair.meet())
    first, *_ = pair.until_posted(2)
    pair.wire.deliver(first)
    pair.round(3)
    assert not pair.decode.workers[0].copier.asked, "another rank has not written yet"
    arrives(pair, found)


@pytest.mark.parametrize("sides", [((0, 0), (0, 0)), *SIDES], ids=["none", "P", "D", "both"])
@DIRECTIONS
def test_a_model_with_windows_is_handed_over(mode: TransferMode, sides: tuple[tuple[int, int], ...]) -> None:
    """Decode requests one token fewer than the digest covers. Prefill announces no tokens before it has all."""
    pair = Pair(mode, *(kind(slots=slots, drops_blocks=True, budget=4) for slots in sides))
    assert is_right(pair.hand_over(), len(PROMPT) - 1)
    assert pair.causes() == {}
    if mode is PUSH:
        found = pair.ask_decode(pair.meet(), LONG, name="cmpl-9-0")
        pair.settle()
        upstream = pair.ask_prefill(LONG, name="cmpl-9-0")
        told = []
        while not upstream.status.is_finished:
            told.append(offers_of(pair.prefill.workers[0].registry).get(PrefillRequestId(upstream.request_id)))
            pair.round()
        assert not any(
            offer.update.ready_tokens for offer in told if offer is not None and offer.update.manifest is None
        )
        pair.settle()
        assert is_right(found, len(LONG) - 1)


@pytest.mark.parametrize("others", [PROMPT, LONG], ids=["fits", "larger than the slab"])
def test_what_a_vanished_host_may_still_write_does_not_keep_others_out(pair: Pair, others: tuple[int, ...]) -> None:
    """Its slots stay taken, like its blocks, but other hand-overs still get slots."""
    pair = Pair(pair.cluster.settings.transfer_mode, kind(num_blocks=200), kind(slots=SLOTS, num_blocks=200))
    prefill = pair.prefill
    upstreams = [pair.ask_prefill(tuple(range(begin, begin + 60)), name=f"cmpl-{begin}-0") for begin in (0, 70, 140)]
    pair.settle()
    for upstream in upstreams:
        pair.ask_decode(upstream.answer, upstream.prompt, name=upstream.request_id[:-9])
    pair.until_posted()
    pair.cluster.vanish(prefill)
    pair.pass_time(TIMEOUT_SECONDS + 1)
    assert pair.decode.workers[0].staging.slots.used(Use.RECEIVING)
    pair.prefill = pair.cluster.engine("q", kind(num_blocks=200))
    assert is_right(pair.hand_over(others), len(others))
    pair.cluster.come_back(prefill)
    pair.cluster.kill(prefill)


@pytest.mark.parametrize(("num", "size"), [(3, 60), (2, 24)], ids=["long", "short"])
def test_what_a_vanished_decode_is_sent_does_not_keep_others_out(pair: Pair, num: int, size: int) -> None:
    """The same, of the slots that prefill sends from."""
    pair = Pair(pair.cluster.settings.transfer_mode, kind(slots=SLOTS, num_blocks=400), kind(num_blocks=400))
    pair.acquaint()
    decode = pair.decode
    prompts = [tuple(range(begin, begin + size)) for begin in range(1000, 1000 + 100 * num, 100)]
    upstreams = [pair.ask_prefill(one, name=f"cmpl-{one[0]}-0") for one in prompts]
    pair.settle()
    for upstream in upstreams:
        pair.ask_decode(upstream.answer, upstream.prompt, name=upstream.request_id[:-9])
    for _ in range(30):
        pair.round()
        pair.prefill.workers[0].copy()
    assert pair.transfers
    pair.cluster.vanish(decode)
    for name, others in (("e", PROMPT), ("f", LONG)):
        pair.decode = pair.cluster.engine(name, kind(num_blocks=400))
        assert is_right(pair.hand_over(others), len(others))
        pair.pass_time(2 * TIMEOUT_SECONDS)
    assert pair.prefill.workers[0].staging.slots.used(Use.SENDING)
    pair.cluster.come_back(decode)
    pair.cluster.kill(decode)


def test_two_engines_whose_slabs_are_full_serve_each_other(pair: Pair) -> None:
    """Parked KV never takes the last slots; else each engine would wait for the other's until a lease ends."""
    mode = pair.cluster.settings.transfer_mode
    pair = Pair(mode, *(kind(slots=SLOTS, caches_prefixes=False, num_blocks=100) for _ in range(2)))
    engines = pair.prefill, pair.decode
    prompts = [tuple(range(begin, begin + 16)) for begin in range(0, 80, 16)]
    upstreams = {
        (engine, at): pair.ask_prefill(prompt, name=f"cmpl-{engine.own.engine_id}{at}-0", engine=engine)
        for engine in engines
        for at, prompt in enumerate(prompts)
    }
    pair.settle()
    found = [
        pair.ask_decode(
            upstream.answer,
            prompts[at],
            name=f"cmpl-{engine.own.engine_id}{at}-0",
            engine=engines[engine is pair.prefill],
        )
        for (engine, at), upstream in upstreams.items()
    ]
    pair.settle()
    assert all(is_right(one, 16) for one in found)


def test_a_copy_that_fails_costs_its_request(pair: Pair) -> None:
    """What prefill failed to copy is copied again when a peer asks. What decode failed to copy is recomputed."""
    pair = Pair(pair.cluster.settings.transfer_mode, kind(slots=SLOTS), kind(slots=SLOTS))
    pair.acquaint()
    pair.prefill.workers[0].copier.fails = 1
    assert pair.hand_over().num_external == len(PROMPT)
    pair.decode.workers[0].copier.fails = 1
    found = pair.hand_over(tuple(range(60, 80)))
    assert is_right(found, 0)
    assert pair.causes() == {"defect": 1}
