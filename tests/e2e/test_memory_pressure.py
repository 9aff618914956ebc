# SPDX-License-Identifier: Apache-2.0
"""Real servers whose memory is short: prefill takes back what nobody fetches, long before its leases end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from support.pressed_servers import (
    LEASE_SECONDS,
    SOON_SECONDS,
    cache_prefixes,
    gets_its_memory,
    keep_offers,
    neighbours,
    revoked,
    short_device,
    specs_of,
)
from support.waiting import until

from experiments.common.client import Client, Offer, Pair, answers_of, http_client, read_answer
from experiments.common.counted import PageWatch, own_names
from experiments.common.servers import Running, Server
from experiments.lease_recovery.arms import NUM_BLOCKS, PULL, PUSH, TOKENS, Arm, prompts


@pytest.mark.parametrize("reserve", [0, 3])
def test_what_nobody_fetches_gives_way_to_another_engine_on_the_device(reserve: int, tmp_path: Path) -> None:
    """Two prefill servers of one device that has no more memory than one of them may use.

    ``reserve``: how many pages the first one keeps mapped for its next allocation. They go first.
    """
    device = short_device(reserve)

    async def run(keeps: Server, waits: Server) -> None:
        await keep_offers(keeps)
        await gets_its_memory(waits)
        found = revoked(keeps)
        if reserve:
            assert not found
        else:
            assert set(found) == {"neighbour"} and found["neighbour"] <= 4, "the first one alone empties no page"
        for server in (keeps, waits):
            server.check_alive()

    with Running(neighbours(PULL, reserve, **device), tmp_path) as running:
        asyncio.run(run(*running.ready()))


def test_an_idle_engine_gives_its_prefix_cache_to_another_engine_on_the_device(tmp_path: Path) -> None:
    """It has no requests, and keeps no offers."""
    device = short_device()

    async def run(caches: Server, waits: Server) -> None:
        watch = PageWatch(caches.identity)
        at_rest = watch.mapped_bytes()
        await cache_prefixes(caches)
        cached = watch.mapped_bytes()
        await gets_its_memory(waits)
        assert at_rest < watch.mapped_bytes() < cached and not revoked(caches)
        for server in (caches, waits):
            server.check_alive()

    with Running(neighbours(PULL, **device, KVCACHED_MAX_CACHED_TOKENS="16000"), tmp_path) as running:
        asyncio.run(run(*running.ready()))


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_offers_that_nobody_fetches_give_way(arm: Arm, tmp_path: Path) -> None:
    async def run(prefill: Server, decode: Server) -> None:
        async with http_client(4) as http:
            pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
            asked = prompts(6, seed=9)
            expected = await answers_of(decode.base_url, asked, TOKENS, "alone")

            async def offered(round_: str) -> list[Offer]:
                return [
                    await pair.prefill_only(one, salt=f"{round_}-{place}", request_id=f"{round_}-{place}")
                    for place, one in enumerate(asked)
                ]

            async def fetched(offers: list[Offer], round_: str) -> None:
                for place, one in enumerate(asked):
                    names = {"salt": f"{round_}-{place}", "request_id": f"{round_}-{place}"}
                    found = await pair.decode.complete(
                        one, max_tokens=TOKENS, **names, kv_transfer_params=offers[place].params
                    )
                    assert read_answer(found, TOKENS).token_ids == expected[place].token_ids, round_

            (name,) = own_names(prefill.identity)
            whole = get_kv_cache_limit(name).total_size
            # kvctl's own call. The engine is idle, and allocates nothing that would have kvcached look at its limit.
            offers = await offered("limit")
            used = get_kv_cache_limit(name).used_size
            assert used > 0 and not revoked(prefill)
            assert update_kv_cache_limit(name, used // 3) is not None
            await asyncio.to_thread(
                until, lambda: get_kv_cache_limit(name).used_size <= used // 3, seconds=SOON_SECONDS
            )
            counts = revoked(prefill)
            assert set(counts) == {"limit"} and 0 < counts["limit"] <= len(asked)
            assert update_kv_cache_limit(name, whole) is not None
            await fetched(offers, "limit")

            # Nothing runs, so nothing is allocated that would have kvcached look at a limit that is raised again.
            assert update_kv_cache_limit(name, whole // 16) is not None
            # A thread of kvcached notices it within 0.1 s, and says so nowhere.
            await asyncio.sleep(1.0)
            waiting = asyncio.create_task(pair.prefill_only(max(asked, key=len), salt="waits", request_id="waits"))
            await asyncio.sleep(2.0)
            assert not waiting.done()
            assert update_kv_cache_limit(name, whole) is not None
            await asyncio.wait_for(waiting, SOON_SECONDS)

            # All blocks are kept for a decode that does not come, and another prompt needs some.
            kept = []
            for round_ in ("first", "second", "third"):
                if len(kept) < NUM_BLOCKS // 24:
                    kept += await offered(round_)
            begun = time.monotonic()
            last = await asyncio.wait_for(offered("last"), LEASE_SECONDS / 2)
            assert time.monotonic() - begun < LEASE_SECONDS / 2
            assert revoked(prefill)["blocks"] > 0
            await fetched(last, "last")
            await fetched(kept[: len(asked)], "first")
        for server in (prefill, decode):
            server.check_alive()

    with Running(specs_of(arm), tmp_path) as running:
        asyncio.run(run(*running.ready()))
