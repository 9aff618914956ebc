# SPDX-License-Identifier: Apache-2.0
"""Real servers whose memory is short: prefill takes back what nobody fetches, long before its leases end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from prometheus_client.parser import text_string_to_metric_families

from experiments.common.client import Client, Offer, Pair, http_client, read_answer
from experiments.common.pages import own_names
from experiments.common.servers import Running, Server
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


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_offers_that_nobody_fetches_give_way(arm: Arm, tmp_path: Path) -> None:
    specs = []
    for spec in arm.specs("recompute"):
        assert spec.kv_transfer is not None
        # kvcached looks at its limit on the thread that allocates pages in advance.
        environment = {**spec.environment, "KVCACHED_PAGE_PREALLOC_ENABLED": "true"}
        extra = {**spec.kv_transfer["kv_connector_extra_config"], "kv_lease_duration": LEASE_SECONDS}  # type: ignore[dict-item]
        spec = dataclasses.replace(spec, environment=environment)
        specs.append(dataclasses.replace(spec, kv_transfer={**spec.kv_transfer, "kv_connector_extra_config": extra}))

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

    with Running(specs, tmp_path) as running:
        asyncio.run(run(*running.ready()))
