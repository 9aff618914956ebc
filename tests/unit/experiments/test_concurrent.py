# SPDX-License-Identifier: Apache-2.0
"""The concurrent part keeps 32 requests running, makes P's pool grow, and inspects the pools while nothing runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from experiments.byte_equivalence.arm_run import CONCURRENCY, PairRun
from experiments.byte_equivalence.harness import came_back, remapped
from experiments.byte_equivalence.prompts import Prompt
from experiments.common.client import Answer, HandOver, Offer, Pair
from experiments.common.pages import PageCount

PAGE_GROUP = 16 << 20


class FakePair:
    """Answers at once, one block per prompt, and notes what was under way when."""

    def __init__(self) -> None:
        self.decode = self.prefill = self
        self.under_way = self.most_under_way = self.held = 0
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

    async def answer(self, prompt: list[int], **named: Any) -> Answer:
        assert self.under_way == 0, "P is only made to step while nothing runs"
        return Answer([1, 1], [0.0, 0.0])

    async def probe_ranks(self, method: str) -> list[dict[str, Any]]:
        """Of two, the second of which reports in another order."""
        records = [
            {"transfer": name, "digests": [["d"]], "request_id": f"cmpl-{name}-0-0123abcd"} for name in self.decoded
        ]
        first = {"records": records, "sent": [], "pending": []}
        return [first, {**first, "records": records[::-1]}]


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


@pytest.mark.parametrize(
    ("prompts", "hold", "least"), [(CONCURRENCY, 1, 1), (10, 6, 6), (10, 99, 10), (CONCURRENCY + 5, 999, CONCURRENCY)]
)
def test_32_requests_are_under_way_and_d_waits_until_p_holds_enough(prompts: int, hold: int, least: int) -> None:
    """P's pool grows however fast D is; and if there is not that much to hold, D begins all the same."""
    pair, looks, seen = served(prompts, hold)
    assert pair.most_under_way == min(prompts, CONCURRENCY)
    assert (looks, seen) == (2, 2 * prompts)
    assert pair.held_at_first_decode is not None and pair.held_at_first_decode >= least


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
