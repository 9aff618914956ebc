# SPDX-License-Identifier: Apache-2.0
"""The concurrent part keeps 32 requests running, makes P's pool grow, and inspects the pools while nothing runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from experiments.byte_equivalence import harness as pool
from experiments.byte_equivalence.arm_run import CONCURRENCY, PairRun
from experiments.byte_equivalence.arms import Order
from experiments.byte_equivalence.harness import PoolMemory, came_back, remapped
from experiments.byte_equivalence.prompts import Prompt, fixed_prompts
from experiments.common.client import Answer, HandOver, Offer, Pair
from experiments.common.pages import PageCount

PAGE_GROUP = 16 << 20


class FakePair:
    """Answers at once, one block per prompt, and notes what was under way when."""

    def __init__(self) -> None:
        self.decode = self.prefill = self
        self.under_way = self.most_under_way = self.held = 0
        self.pushes = False
        self.asked_decode = 0
        self.held_at_first_decode: int | None = None
        self.decoded: list[str] = []

    async def prefill_only(self, prompt: list[int], *, salt: str, request_id: str) -> Offer:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.held += 1
        return Offer({"remote_request_id": request_id}, [[1]], [["digest"]])

    async def decode_offered(self, offer: Offer, prompt: list[int], **named: Any) -> HandOver:
        if self.held_at_first_decode is None:
            self.held_at_first_decode = self.held
        await asyncio.sleep(0)
        self.under_way -= 1
        self.decoded.append(offer.params["remote_request_id"])
        return HandOver(Answer([1], [0.0]), offer.params["remote_request_id"], offer.block_ids, offer.digests)

    async def decode_first(self, prompt: list[int], *, request_id: str, **named: Any) -> HandOver:
        self.asked_decode += 1
        await asyncio.sleep(0)
        self.decoded.append(request_id)
        return HandOver(Answer([1], [0.0]), request_id, [], [])

    async def asked(self, prompt: list[int], *, request_id: str, **named: Any) -> HandOver:
        handed = await self.decode_first(prompt, request_id=request_id)
        self.decoded[-1] = f"transfer:{request_id}"
        return handed

    async def answer(self, prompt: list[int], **named: Any) -> Answer:
        assert self.under_way == 0, "P is only made to step while nothing runs"
        return Answer([1, 1], [0.0, 0.0])

    async def probe_ranks(self, method: str) -> list[dict[str, Any]]:
        """Of two, the second of which reports in another order."""
        records = [
            {"transfer": name, "digests": [["d"]], "request_id": f"cmpl-{name.removeprefix('transfer:')}-0-0123abcd"}
            for name in self.decoded
        ]
        sent = [{"transfer": name, "block_ids": [[1]], "digests": [["d"]]} for name in self.decoded]
        first = {"records": records, "sent": sent if self.pushes else [], "pending": []}
        return [first, {**first, "records": records[::-1], "sent": first["sent"][::-1]}]


def served(prompts: int, hold_blocks: int) -> tuple[FakePair, int, int]:
    """Serve two rounds; return the pair, how often the pools were looked at, and the observations."""
    pair, looks = FakePair(), 0

    async def settle() -> None:
        nonlocal looks
        looks += 1
        assert pair.under_way == 0

    made = [Prompt(str(place), (place,)) for place in range(prompts)]
    run = PairRun(cast(Pair, pair))
    seen = asyncio.run(
        run.concurrent(made, "run", rounds=2, hold_blocks=hold_blocks, settle=settle, progress=lambda text: None)
    )
    assert all(observed.record is not None for _, observed in seen)
    return pair, looks, len(seen)


@pytest.mark.parametrize("prompts", [CONCURRENCY, CONCURRENCY + 5])
def test_32_requests_are_under_way_and_the_pools_are_seen_at_rest(prompts: int) -> None:
    """Not more, not fewer; after each round, while nothing runs."""
    pair, looks, seen = served(prompts, hold_blocks=1)
    assert pair.most_under_way == CONCURRENCY
    assert looks == 2
    assert seen == 2 * prompts


@pytest.mark.parametrize(("prompts", "hold", "least"), [(10, 6, 6), (10, 99, 10), (CONCURRENCY + 5, 999, CONCURRENCY)])
def test_d_waits_until_p_holds_enough(prompts: int, hold: int, least: int) -> None:
    """P's pool grows however fast D is; and if there is not that much to hold, D begins all the same."""
    pair, _, _ = served(prompts, hold)
    assert pair.held_at_first_decode is not None
    assert pair.held_at_first_decode >= least


@pytest.mark.parametrize("order", ["asked", "D first"])
def test_where_d_is_asked_first_p_is_not_made_to_step(order: Order) -> None:
    """Every request goes through D first, and P's memory has to come back by itself. All records are found."""
    pair = FakePair()
    pair.pushes, pair.held = True, 1
    run = PairRun(cast(Pair, pair), writes=True, order=order)
    made = [Prompt(str(place), (place,)) for place in range(3)]

    async def settle() -> None:
        pair.under_way = 1

    named: dict[str, Any] = {"rounds": 2, "hold_blocks": 1, "settle": settle, "progress": lambda text: None}
    seen = asyncio.run(run.concurrent(made, "run", **named))
    assert pair.asked_decode == len(seen) == 6
    assert all(one.record is not None and one.hand_over.sent_digests for _, one in seen)


def test_the_fixed_prompts_fill_more_than_p_holds() -> None:
    """32 prompts, so that one round is 32 at a time, and more blocks than one and a half page groups."""
    prompts = fixed_prompts(block_size=32, max_batched=512, max_prompt=1900, vocabulary=512)
    assert len(prompts) == CONCURRENCY
    assert sum(prompt.blocks(32) for prompt in prompts) > 192 + 60


@pytest.mark.parametrize(
    ("counted", "passed"), [(PageCount(5, 9, 1, 3, 2, 2, 2), True), (PageCount(5, 9, 1, 3, 2), False)]
)
def test_a_run_that_remapped_nothing_fails(counted: PageCount, passed: bool) -> None:
    """Growing alone is no proof."""
    assert remapped("arm", "what", counted).passed is passed


@pytest.mark.parametrize(
    ("resting", "passed"), [([PAGE_GROUP] * 2, True), ([PAGE_GROUP, 2 * PAGE_GROUP], False), ([], False)]
)
def test_memory_that_did_not_come_back_fails(resting: list[int], passed: bool) -> None:
    """Every round has to end with one page group; never having looked is no success."""
    assert came_back("arm", "what", resting, PAGE_GROUP).passed is passed


def test_settling_ends_even_if_memory_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that stays large is reported, not waited for."""
    monkeypatch.setattr(pool, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(pool.PageWatch, "mapped_bytes", lambda self: 3 * PAGE_GROUP)
    memory = PoolMemory(["engine"], PAGE_GROUP)
    asyncio.run(memory.settle())
    assert memory.resting == [[3 * PAGE_GROUP]]
