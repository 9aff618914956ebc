# SPDX-License-Identifier: Apache-2.0
"""Sends the prompts to one arm's running servers, plants corruptions, and collects what both sides recorded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from experiments.byte_equivalence.arms import Arm, Order
from experiments.byte_equivalence.compare import largest_logprob_gap, match_records
from experiments.byte_equivalence.subjects import Corruption, Prompt
from experiments.common.client import Answer, AnswerError, Client, HandOver, Pair, joined
from experiments.common.servers import Server

MAX_TOKENS = 64
CONCURRENCY = 32
SHUFFLE_SEED = 11
SENT_SECONDS = 20.0
"""How long P may take to report what it has sent."""


@dataclass(frozen=True)
class Dependence:
    """Whether the output depends on each block: change (nats) of the log-probabilities when it alone is zeroed."""

    blocks: int
    control_gap: float
    gaps: dict[int, float] = field(default_factory=dict)

    @property
    def proved(self) -> bool:
        """Whether repeating changed nothing and zeroing any tried block changed something."""
        return self.control_gap == 0.0 and bool(self.gaps) and min(self.gaps.values()) > 0.0


class PairRun:
    """An arm's running servers, asked in one ``order``. Requests go to every P with every D, in turn; corruptions are
    planted in the first pair only. ``progress`` is told what is being asked."""

    def __init__(
        self, arm: Arm, servers: Sequence[Server], http: httpx.AsyncClient, progress: Callable[[str], None]
    ) -> None:
        clients = [Client(one.base_url, http) for one in servers]
        self.prefills, self.decodes = clients[: arm.servers], clients[arm.servers :]
        self.pairs = [
            Pair(source, target, server.coordinates, keeps_blocks=not arm.is_staged)
            for server, source in zip(servers, self.prefills, strict=False)
            for target in self.decodes
        ]
        self.writes, self.progress = arm.writes, progress
        self.order: Order = arm.orders[0]

    async def arm(self) -> dict[str, Any]:
        """Start recording on all sides; return the geometry of D's KV tensors."""
        for side in (*self.prefills, *self.decodes):
            await side.probe("arm")
        return await self.decodes[0].probe("geometry")

    async def _observe(self, seen: Sequence[HandOver]) -> list[HandOver]:
        """Pair each answered hand-over with what both sides recorded of its blocks."""
        received: list[Mapping[str, Any]] = []
        for decode in self.decodes:
            taken = await decode.probe_ranks("take")
            if pending := [one for rank in taken for one in rank["pending"]]:
                raise AnswerError(f"found transfers unfinished on D after every answer: {pending}; expected none.")
            received += of_all_ranks([rank["records"] for rank in taken])
        # Of each P and rank. Ranks report at different times, so records are kept until all have one.
        sent: list[list[list[dict[str, Any]]]] = [[] for _ in self.prefills]

        def of_all() -> list[dict[str, Any]]:
            return [one for ranks in sent for one in of_all_ranks(ranks)]

        awaited = {one.transfer for one in seen} if self.writes else set()
        if self.order == "asked":
            awaited = {str(one["transfer"]) for one in received}
        deadline = time.monotonic() + SENT_SECONDS
        if awaited and not self.writes:
            await self._step_prefill("sent")
        while awaited - {one["transfer"] for one in of_all()} and time.monotonic() < deadline:
            for place, prefill in enumerate(self.prefills):
                taken = await prefill.probe_ranks("take")
                known = sent[place] or [[] for _ in taken]
                sent[place] = [[*before, *rank["sent"]] for before, rank in zip(known, taken, strict=True)]
        return match_records(seen, received, of_all())

    async def _one(
        self, prompt: Prompt, salt: str, request_id: str, *, place: int = 0, max_tokens: int = MAX_TOKENS
    ) -> HandOver:
        pair = self.pairs[place % len(self.pairs)]
        ways = {"asked": pair.asked, "P first": pair.hand_over, "D first": pair.decode_first}
        return await ways[self.order](list(prompt.token_ids), max_tokens=max_tokens, salt=salt, request_id=request_id)

    async def sequential(self, prompts: Sequence[Prompt], run: str) -> list[HandOver]:
        seen = []
        for place, prompt in enumerate(prompts):
            self.progress(f"{run}: {place + 1} of {len(prompts)}, {prompt.name}")
            seen.append(await self._one(prompt, prompt.salt(run), f"{run}-{place}", place=place))
        return await self._observe(seen)

    async def concurrent(
        self,
        prompts: Sequence[Prompt],
        run: str,
        *,
        rounds: int,
        hold_blocks: int,
        settle: Callable[[], Awaitable[None]],
    ) -> list[tuple[Prompt, HandOver]]:
        """Hand every prompt over once per round, shuffled, 32 at a time.

        With P first, D starts a round when P holds ``hold_blocks`` for it, so that P's demand does not depend on how
        fast D is. ``settle`` is awaited after each round, while nothing runs.
        """
        shuffler = random.Random(SHUFFLE_SEED)
        shuffled: list[Prompt] = []
        seen: list[HandOver] = []
        for number in range(rounds):
            these = shuffler.sample(prompts, len(prompts))
            shuffled += these
            seen += await self._round(these, f"{run}-{number}", hold_blocks)
            if not self.writes:
                await self._step_prefill(f"{run}-{number}-step")
            await settle()
        return list(zip(shuffled, await self._observe(seen), strict=True))

    async def _step_prefill(self, name: str) -> None:
        """Make P take two steps: an idle engine reads no notifications, so it keeps what D has read until it steps."""
        for prefill in self.prefills:
            await prefill.answer([2], max_tokens=2, salt=name, request_id=name)

    async def _round(self, prompts: Sequence[Prompt], run: str, hold_blocks: int) -> list[HandOver]:
        places, enough = asyncio.Semaphore(CONCURRENCY), asyncio.Event()
        held: list[int] = []
        done: list[str] = []

        async def one(place: int, prompt: Prompt) -> HandOver:
            names = {"salt": prompt.salt(run), "request_id": f"{run}-{place}"}
            pair = self.pairs[place % len(self.pairs)]
            async with places:
                if self.order != "P first":
                    return await self._one(prompt, **names, place=place)
                offer = await pair.prefill_only(list(prompt.token_ids), **names)
                held.append(sum(len(group) for group in offer.block_ids))
                if sum(held) >= hold_blocks or len(held) >= min(CONCURRENCY, len(prompts)):
                    enough.set()
                await enough.wait()
                handed = await pair.decode_offered(offer, list(prompt.token_ids), max_tokens=MAX_TOKENS, **names)
            done.append(prompt.name)
            self.progress(f"{run}: {len(done)} of {len(prompts)} at a time")
            return handed

        return list(await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts))))

    async def planted(self, corruption: Corruption, prompt: Prompt, run: str) -> HandOver:
        """Hand ``prompt`` over with ``corruption`` planted in the blocks that D receives."""
        if corruption.kept_tokens:
            earlier = Prompt(f"{prompt.name} kept", prompt.token_ids[: corruption.kept_tokens])
            await self.planted(Corruption(earlier.name, "keep_state", group=corruption.group), earlier, f"{run}-kept")
        await self.pairs[0].decode.probe("plant", corruption.kind, corruption.block, corruption.group)
        handed = await self._one(prompt, prompt.salt(run), prompt.salt(run).replace(" ", "-"))
        (seen,) = await self._observe([handed])
        if seen.record is None or seen.record["planted"] != corruption.kind:
            raise AnswerError(
                f"{corruption.words}: found no corrupted transfer in D's records; the harness proves nothing."
            )
        return seen

    async def dependence(self, prompt: Prompt, block_size: int, every: int, run: str) -> Dependence:
        """Zero every ``every``-th received block alone, and the last one, and measure how much the output changes.

        Neither side has the prompt cached, so all blocks travel each time.
        """
        blocks = prompt.blocks(block_size)

        async def answer(name: str) -> Answer:
            handed = await self._one(prompt, f"{run}-{name}", f"{run}-{name}", max_tokens=8)
            (seen,) = await self._observe([handed])
            if seen.record is None or [len(group) for group in seen.record["digests"]] != [blocks]:
                raise AnswerError(f"{name}: found a transfer of another size; expected all {blocks} blocks.")
            return handed.answer

        clean = await answer("clean")
        control_gap = largest_logprob_gap(clean, await answer("control"))
        gaps = {}
        for index in sorted({*range(0, blocks, every), blocks - 1}):
            self.progress(f"{run}: block {index + 1} of {blocks} zeroed")
            await self.pairs[0].decode.probe("plant", "zero_a_block", index)
            gaps[index] = largest_logprob_gap(clean, await answer(f"block-{index}"))
        return Dependence(blocks, control_gap, gaps)


def of_all_ranks(records: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the records of transfers that every rank has recorded, with the digests of all ranks joined."""
    first, *others = records or [[]]
    known = [{one["transfer"]: one["digests"] for one in rank} for rank in others]
    return [
        {**one, "digests": joined([one["digests"], *(rank[one["transfer"]] for rank in known)])}
        for one in first
        if all(one["transfer"] in rank for rank in known)
    ]
