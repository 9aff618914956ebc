# SPDX-License-Identifier: Apache-2.0
"""Real servers whose memory is short: prefill takes back what nobody fetches, long before its leases end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from prometheus_client.parser import text_string_to_metric_families

from experiments.common.client import Client, Offer, Pair, http_client, read_answer
from experiments.common.pages import own_names
from experiments.common.servers import Running, Server, ServerSpec
from experiments.lease_recovery.arms import NUM_BLOCKS, PULL, PUSH, TOKENS, Arm, prompts

LEASE_SECONDS = 120
SOON_SECONDS = 15.0
"""``give_way_after`` is 2 s; the rest is for a busy machine."""


async def until(reached: Callable[[], bool], seconds: float = SOON_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it takes too long"
        await asyncio.sleep(0.05)


def revoked(server: Server) -> dict[str, float]:
    """Returns the offers that the server has taken back, by cause."""
    said = httpx.get(f"{server.base_url}/metrics", timeout=30).text
    return {
        sample.labels["cause"]: sample.value
        for family in text_string_to_metric_families(said)
        for sample in family.samples
        if sample.name == "kvcached_nixl:revoked_offers_total"
    }


def specs_of(arm: Arm, **environment: str) -> list[ServerSpec]:
    """Returns the pair's configurations, with leases that end after the test."""
    found = []
    for spec in arm.specs("recompute"):
        assert spec.kv_transfer is not None
        extra = {**spec.kv_transfer["kv_connector_extra_config"], "kv_lease_duration": LEASE_SECONDS}  # type: ignore[dict-item]
        # kvcached looks at its limit on the thread that allocates pages in advance.
        changed = {**spec.environment, "KVCACHED_PAGE_PREALLOC_ENABLED": "true", **environment}
        kv_transfer = {**spec.kv_transfer, "kv_connector_extra_config": extra}
        found.append(dataclasses.replace(spec, environment=changed, kv_transfer=kv_transfer))
    return found


@pytest.mark.parametrize("reserve", [0, 3])
def test_what_nobody_fetches_gives_way_to_another_engine_on_the_device(reserve: int, tmp_path: Path) -> None:
    """Two prefill servers of one device that has no more memory than one of them may use.

    ``reserve``: how many pages of 8 MiB the first one keeps mapped for its next allocation. They go first.
    """
    device = {"KVCACHED_HOSTVMM_DEVICE": f"test-{uuid.uuid4().hex}", "KVCACHED_HOSTVMM_GIB": str(0.1 + reserve / 128)}
    pages = {f"KVCACHED_{which}_RESERVED_PAGES": str(reserve) for which in ("MIN", "MAX")}
    (spec, _) = specs_of(PULL, **device)
    keeper = dataclasses.replace(spec, name="keeps", environment={**spec.environment, **pages})
    both = [keeper, dataclasses.replace(spec, name="waits")]

    async def run(keeps: Server, waits: Server) -> None:
        async with http_client(2) as http:
            clients = [Client(server.base_url, http) for server in (keeps, waits)]
            asked = prompts(7, seed=9)
            long = max(asked, key=len)
            for place, one in enumerate(asked[:5]):
                await Pair(clients[0], clients[1]).prefill_only(one, salt=f"o-{place}", request_id=f"o-{place}")
            answer = asyncio.create_task(clients[1].answer(long, max_tokens=TOKENS, salt="long", request_id="long"))
            done, _ = await asyncio.wait([answer], timeout=SOON_SECONDS)
            assert done, "it waits for memory that another engine keeps for nobody"
            found = revoked(keeps)
            if reserve:
                assert not found
            else:
                assert set(found) == {"neighbour"} and found["neighbour"] <= 4, "the first one alone empties no page"
            alone = await clients[0].answer(long, max_tokens=TOKENS, salt="alone", request_id="alone")
            assert answer.result().token_ids == alone.token_ids
        for server in (keeps, waits):
            server.check_alive()

    with Running(both, tmp_path) as running:
        asyncio.run(run(*running.ready()))


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_offers_that_nobody_fetches_give_way(arm: Arm, tmp_path: Path) -> None:
    async def run(prefill: Server, decode: Server) -> None:
        async with http_client(4) as http:
            pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
            asked = prompts(6, seed=9)
            expected = [
                (await pair.decode.answer(one, max_tokens=TOKENS, salt=f"alone-{place}", request_id=f"alone-{place}"))
                for place, one in enumerate(asked)
            ]

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
            await until(lambda: get_kv_cache_limit(name).used_size <= used // 3)
            counts = revoked(prefill)
            assert set(counts) == {"limit"} and 0 < counts["limit"] <= len(asked)
            assert update_kv_cache_limit(name, whole) is not None
            await fetched(offers, "limit")

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
