# SPDX-License-Identifier: Apache-2.0
"""Verified hand-overs: decode never uses bytes that differ from those prefill sent, in either direction.

The engines of these cases check every byte as well (`flow_engine`), so a wrong byte that was used would fail the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Kind, Request, Worker
from support.flow_pair import PROMPT, PULL, PUSH, Pair, is_right, kind
from support.flow_schedule import SHAPES
from support.internals import attempts_of, offers_of, report_of

from kvcached_nixl.scheduler import fetch_request as fetching
from kvcached_nixl.wire.messages import Written

SLOTS = (12, 3)
OTHER = tuple(range(60, 80))
Made = Callable[..., Pair]


@pytest.fixture(params=[PULL, PUSH], ids=["pull", "push"])
def made(request: pytest.FixtureRequest) -> Made:
    """made(prefill, decode) returns a pair that verifies all hand-overs."""

    def make(*kinds: Kind, fraction: float = 1.0) -> Pair:
        return Pair(request.param, *kinds, verify_fraction=fraction)

    return make


def under_way(pair: Pair, workers: list[Worker], prompt: tuple[int, ...] = PROMPT) -> Request:
    """Runs a request of decode until one of ``workers`` must compute a checksum of it. None of theirs is computed."""
    found = pair.ask_decode(pair.offered(prompt), prompt)
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


@pytest.mark.parametrize("slots", [(SLOTS, (0, 0)), ((0, 0), SLOTS), (SLOTS, SLOTS)], ids=["P", "D", "both"])
def test_what_is_staged_is_found_to_be_right(made: Made, slots: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """A request longer than its share of the slots is verified range by range."""
    pair = made(*(kind(slots=one, num_blocks=100) for one in slots))
    for number in range(3):
        prompt = tuple(range(number * 50, number * 50 + 45))
        assert is_right(pair.hand_over(prompt), len(prompt))
    assert not pair.causes()


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
