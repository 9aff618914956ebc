# SPDX-License-Identifier: Apache-2.0
"""Verified hand-overs: decode never uses bytes that differ from those prefill sent, in either direction.

The engines of these cases check every byte as well (`flow_engine`), so a wrong byte that was used would fail the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.scheduler import fetch_attempts as fetching
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.messages import MAX_ATTEMPT, Registration, Withdrawal, Written, decode, encode
from kvcached_nixl.wire.planes import GroupMemory
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.transfer.checksums import Range
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Kind, Request, Status, Worker
from support.flow_pair import PROMPT, Pair, kind
from support.flow_schedule import SHAPES
from support.internals import attempts_of, offers_of, report_of

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
SLOTS = (12, 3)
OTHER = tuple(range(60, 80))
Made = Callable[..., Pair]


@pytest.fixture(params=[PULL, PUSH], ids=["pull", "push"])
def made(request: pytest.FixtureRequest) -> Made:
    """made(prefill, decode) returns a pair that verifies all hand-overs."""

    def make(*kinds: Kind, fraction: float = 1.0) -> Pair:
        return Pair(request.param, *kinds, verify_fraction=fraction)

    return make


def is_right(request: Request, num_external: int = len(PROMPT)) -> bool:
    return (request.status, request.num_external) == (Status.STOPPED, num_external)


def under_way(pair: Pair, workers: list[Worker], prompt: tuple[int, ...] = PROMPT) -> Request:
    """Runs a request of decode until one of ``workers`` must compute a checksum of it. None of theirs is computed."""
    upstream = pair.ask_prefill(prompt)
    pair.settle()
    found = pair.ask_decode(upstream.answer, prompt)
    for _ in range(60):
        if any(worker.awaiting_checksum.asked for worker in workers):
            return found
        for worker in _all(pair):
            if worker.copier is not None and worker.copier.asked:
                worker.copier.run()
            if worker not in workers and worker.awaiting_checksum.asked:
                worker.awaiting_checksum.run()
        pair.wire.deliver_all()
        pair.round()
    raise AssertionError("nothing is verified")


def _all(pair: Pair) -> Iterator[Worker]:
    for engine in pair.cluster.running:
        yield from engine.workers


def spoil(pair: Pair, request: Request, token: int = 7, head: int = 0, rank: int = 0) -> None:
    """Changes one cell of the KV that has arrived for a request."""
    memory = pair.decode.workers[rank].memory
    block = pair.decode.pool.tables[request.request_id][token // memory.shape.block_size]
    kernel = block * memory.shape.ratio + token % memory.shape.block_size // memory.tokens
    memory.cells[1, kernel, token % memory.tokens, head] ^= 1


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_what_is_right_is_found_to_be_right(made: Made, shapes: tuple[object, object]) -> None:
    """For every combination of block sizes, layouts and ranks on the two sides."""
    pair = made(*(Kind(shape=shape) for shape in shapes))  # type: ignore[arg-type]
    for prompt in (PROMPT, PROMPT[:16], PROMPT[:1]):
        assert is_right(pair.hand_over(tuple(token + len(prompt) for token in prompt)), len(prompt))
    assert not pair.causes()
    pair.nothing_is_left()


@pytest.mark.parametrize("slots", [(SLOTS, (0, 0)), ((0, 0), SLOTS), (SLOTS, SLOTS)], ids=["P", "D", "both"])
def test_what_is_staged_is_found_to_be_right(made: Made, slots: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """A request longer than its share of the slots is verified range by range."""
    pair = made(*(kind(slots=one, num_blocks=100) for one in slots))
    for number in range(3):
        prompt = tuple(range(number * 50, number * 50 + 45))
        assert is_right(pair.hand_over(prompt), len(prompt))
    assert not pair.causes()
    pair.nothing_is_left()


@pytest.mark.parametrize("slots", [(0, 0), SLOTS], ids=["direct", "staged"])
@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[5]], ids=str)
def test_other_bytes_are_not_used_and_their_sender_is_not_believed_again(
    made: Made, shapes: tuple[object, object], slots: tuple[int, int]
) -> None:
    """Decode recomputes the request, and does not wait for anything that engine sends afterwards."""
    pair = made(*(Kind(shape=shape, slots=slots) for shape in shapes))  # type: ignore[arg-type]
    pair.acquaint()
    request = under_way(pair, pair.decode.workers)
    spoil(pair, request)
    pair.settle()
    assert is_right(request, 0)
    assert pair.causes() == {"checksum": 1}
    assert is_right(pair.hand_over(OTHER), 0)
    assert pair.causes() == {"checksum": 2}
    pair.pass_time(LEASE_SECONDS + 1)
    pair.nothing_is_left()


def test_a_prefill_that_was_started_again_is_believed(made: Made) -> None:
    """A restarted engine is another incarnation: the fault in its memory may be repaired."""
    pair = made()
    pair.acquaint()
    request = under_way(pair, pair.decode.workers)
    spoil(pair, request)
    pair.settle()
    assert pair.causes() == {"checksum": 1}
    pair.prefill = pair.cluster.restart(pair.prefill)
    assert is_right(pair.hand_over(OTHER), len(OTHER))
    pair.nothing_is_left()


def test_others_are_still_believed(made: Made) -> None:
    """Only requests that name the distrusted engine fail."""
    pair = made()
    pair.acquaint()
    request = under_way(pair, pair.decode.workers)
    spoil(pair, request)
    pair.settle()
    other = pair.cluster.engine("q")
    upstream = pair.ask_prefill(OTHER, engine=other)
    pair.settle()
    found = pair.ask_decode(upstream.answer, OTHER)
    pair.settle()
    assert is_right(found, len(OTHER))
    assert pair.causes() == {"checksum": 1}
    pair.nothing_is_left()


def test_only_some_are_verified(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt's number decides; here the first two are verified."""
    monkeypatch.setattr(fetching, "draw_attempt", itertools.count(1).__next__)
    pair = made(fraction=2.5 / MAX_ATTEMPT)
    pair.acquaint()
    request = under_way(pair, pair.decode.workers)
    pair.settle()
    assert is_right(request)
    with pytest.raises(AssertionError, match="nothing is verified"):
        under_way(pair, list(_all(pair)), OTHER)
    pair.settle()
    assert not pair.causes()
    pair.nothing_is_left()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_digest_that_cannot_be_found_costs_its_request(made: Made, who: str) -> None:
    """No engine is distrusted because of it."""
    pair = made()
    pair.acquaint()
    getattr(pair, who).workers[0].awaiting_checksum.fails = 1
    found = pair.hand_over()
    assert is_right(found, 0)
    assert pair.causes() == {"defect": 1}
    assert is_right(pair.hand_over(OTHER), len(OTHER))
    pair.nothing_is_left()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_blocks_are_not_free_while_a_digest_of_them_is_found(made: Made, who: str) -> None:
    """The client leaves while the checksum is computed."""
    pair = made(*(kind(caches_prefixes=False) for _ in range(2)))
    pair.acquaint()
    engine = getattr(pair, who)
    request = under_way(pair, engine.workers)
    pair.decode.abort(request)
    for _ in range(30):
        pair.wire.deliver_all()
        pair.round()
    assert any(engine.pool.holders)
    engine.workers[0].awaiting_checksum.run()
    pair.settle()
    pair.pass_time(LEASE_SECONDS + 1)
    assert not any(engine.pool.holders)
    pair.nothing_is_left()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_blocks_are_free_when_a_checksum_ends_that_nobody_waits_for(made: Made, who: str) -> None:
    """The client leaves while the checksum is computed, and it is equal."""
    pair = made(*(kind(caches_prefixes=False) for _ in range(2)))
    pair.acquaint()
    engine = getattr(pair, who)
    request = under_way(pair, engine.workers)
    end = engine.workers[0].awaiting_checksum.begin()
    pair.decode.abort(request)
    while not pair.messages(Withdrawal):
        pair.decode.step()
        for worker in pair.decode.workers:
            worker.turn()
    end()
    pair.settle()
    pair.pass_time(LEASE_SECONDS + 1)
    assert not any(engine.pool.holders)
    pair.nothing_is_left()


def test_who_does_not_say_what_it_sent_is_not_believed(made: Made) -> None:
    """An engine that was asked for checksums sends none."""
    pair = made()
    pair.acquaint()

    def silent(posted: object) -> None:
        said = getattr(posted, "notification", b"")
        if said.startswith(b"KVNX") and isinstance(message := decode(said), Written):
            posted.notification = encode(msgspec.structs.replace(message, digest=None))  # type: ignore[attr-defined]

    notify = pair.wire.notify
    pair.wire.notify = lambda posted: (silent(posted), notify(posted))[1]  # type: ignore[method-assign]
    found = pair.hand_over()
    assert is_right(found, 0)
    assert pair.causes() == {"protocol": 1}
    pair.nothing_is_left()


def test_what_was_read_is_asked_for_once_and_nothing_is_written() -> None:
    """Pull: decode has read everything before it asks for the checksum."""
    pair = Pair(PULL, verify_fraction=1.0)
    pair.acquaint()
    assert is_right(pair.hand_over())
    operations = [one.operation for worker in _all(pair) for one in worker.agent.posted if one.is_transfer]
    assert "READ" in operations and "WRITE" not in operations
    said = [decode(one.notification) for one in pair.wire.said if one.notification.startswith(b"KVNX")]
    asked = [one for one in said if isinstance(one, Registration)]
    assert [one.is_read for one in asked] == [True] * len(asked) and len(asked) == 2
    pair.nothing_is_left()


def test_what_is_under_way_when_its_sender_is_found_out_is_not_used(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These hand-overs are not verified themselves, but their bytes came from the same memory."""
    numbers = iter([2**61, 1, 2**61 + 1, 2**61 + 2])
    monkeypatch.setattr(fetching, "draw_attempt", lambda: next(numbers))
    pair = made(fraction=0.25)
    pair.acquaint()
    upstreams = [pair.ask_prefill(prompt) for prompt in (OTHER, PROMPT)]
    pair.settle()
    verified = under_way(pair, pair.decode.workers, tuple(range(80, 100)))
    assert not pair.decode.workers[0].awaiting_checksum.ended
    others = [pair.ask_decode(one.answer, one.prompt) for one in upstreams]
    pair.until_posted()
    spoil(pair, verified)
    pair.decode.workers[0].awaiting_checksum.run()
    pair.turn()
    assert pair.causes() or report_of(pair.decode.workers[0].side.thread).failed
    pair.settle()
    assert is_right(verified, 0) and all(is_right(one, 0) for one in others)
    assert pair.causes() == {"checksum": 3}
    pair.pass_time(LEASE_SECONDS + 1)
    pair.nothing_is_left()


def test_a_prefill_that_vanishes_while_it_is_asked_what_was_read_keeps_no_block() -> None:
    """Prefill was not given any blocks to write, so there is nothing to wait for."""
    pair = Pair(PULL, verify_fraction=1.0)
    pair.acquaint()
    request = under_way(pair, pair.prefill.workers)
    pair.cluster.vanish(pair.prefill)
    pair.pass_time(TIMEOUT_SECONDS + 1)
    assert is_right(request, 0)
    assert not any(pair.decode.pool.holders) and not pair.decode.quarantined


@pytest.mark.parametrize("ends", [(18, 4, 18), (18, 18), (40,), (4,)], ids=str)
def test_ranges_that_cannot_be_cost_no_digest(ends: tuple[int, ...]) -> None:
    """A peer's ranges must come in order, none twice, and none beyond what was requested."""
    pair = Pair(PUSH, verify_fraction=1.0)
    pair.acquaint()
    request = under_way(pair, pair.prefill.workers)
    worker = pair.decode.workers[0]
    (attempt,) = attempts_of(worker.receiver).values()
    (share,) = attempt.parts
    offer = next(iter(offers_of(pair.prefill.workers[0].registry).values()))
    assert offer.update.manifest is not None
    for index, end in enumerate(ends):
        manifest = msgspec.structs.replace(offer.update.manifest, groups=()) if index == len(ends) - 1 else None
        said = Written(attempt.number, 0, index, manifest, end, "0" * 32)
        worker.receiver.handle(share.agent, said)
    assert not worker.awaiting_checksum.asked
    pair.settle()
    assert is_right(request, 0) and pair.causes() == {"protocol": 1}
    pair.nothing_is_left()


def test_peers_take_turns(made: Made) -> None:
    """A peer with many requests does not block the others, and checksums that are no longer needed are skipped."""
    worker = made().decode.workers[0]
    checksums, runs = worker.context.checksums, worker.awaiting_checksum
    told: list[tuple[str, str]] = []
    wanted = {"a": True, "b": True}
    groups = (GroupMemory((worker.memory.planes,)),)
    for agent in ("a", "a", "a", "b"):
        sent: Range = [(KernelBlocks([KernelBlock(1)]), 0)], 4
        checksums.of_sent(
            *(agent, sent, groups, lambda agent=agent: wanted[agent]),  # type: ignore[misc]
            lambda _, failed, agent=agent: told.append((agent, failed)),  # type: ignore[misc]
        )
    for _ in range(2):
        runs.run()
        checksums.turn()
    assert [agent for agent, _ in told] == ["a", "b"] and len(runs.asked) == 1
    wanted["a"] = False
    for _ in range(2):
        runs.run()
        checksums.turn()
    assert told[2:] == [("a", "the checksum is not needed any more")] * 2
