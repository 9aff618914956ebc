# SPDX-License-Identifier: Apache-2.0
"""Real servers whose memory is short, and what they say they have taken back."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import uuid

from experiments.common.client import Client, Pair, answers_of, http_client
from experiments.common.counted import samples
from experiments.common.device import with_extra
from experiments.common.servers import Server, ServerSpec
from experiments.lease_recovery.arms import TOKENS, Arm, prompts

LEASE_SECONDS = 120
SOON_SECONDS = 15.0
"""``give_way_after`` is 2 s; the rest is for a busy machine."""


def revoked(server: Server) -> dict[str, float]:
    """Returns the offers that the server has taken back, by cause."""
    found = samples(f"{server.base_url}/metrics", "kvcached_nixl:revoked_offers_total")
    return {labels.partition('cause="')[2].partition('"')[0]: value for labels, value in found.items() if value}


def specs_of(arm: Arm, **environment: str) -> list[ServerSpec]:
    """Returns the pair's configurations, with leases that end after the test."""
    found = []
    for spec in arm.specs("recompute"):
        assert spec.kv_transfer is not None
        # kvcached looks at its limit on the thread that allocates pages in advance.
        changed = {**spec.environment, "KVCACHED_PAGE_PREALLOC_ENABLED": "true", **environment}
        kv_transfer = with_extra(spec.kv_transfer, {"kv_lease_duration": LEASE_SECONDS})
        found.append(dataclasses.replace(spec, environment=changed, kv_transfer=kv_transfer))
    return found


def short_device(reserve: int = 0) -> dict[str, str]:
    """Returns the environment of servers on a device that has less memory than two of them may use.

    Args:
        reserve: pages of 8 MiB that one of them keeps mapped, which the device has in addition.
    """
    return {"KVCACHED_HOSTVMM_DEVICE": f"test-{uuid.uuid4().hex}", "KVCACHED_HOSTVMM_GIB": str(0.1 + reserve / 128)}


def neighbours(arm: Arm, reserve: int = 0, **environment: str) -> list[ServerSpec]:
    """Two prefill servers of one device: one that will keep offers, and one that will wait for memory.

    Args:
        reserve: how many pages the first one keeps mapped for its next allocation.
    """
    pages = {f"KVCACHED_{which}_RESERVED_PAGES": str(reserve) for which in ("MIN", "MAX")}
    (spec, *_) = specs_of(arm, **environment)
    keeper = dataclasses.replace(spec, name="keeps", environment={**spec.environment, **pages})
    return [keeper, dataclasses.replace(spec, name="waits")]


async def keep_offers(keeps: Server, count: int = 5) -> None:
    """Has it keep offers that nobody fetches."""
    async with http_client(2) as http:
        client = Client(keeps.base_url, http)
        for place, one in enumerate(prompts(7, seed=9)[:count]):
            await Pair(client, client).prefill_only(one, salt=f"o-{place}", request_id=f"o-{place}")


async def cache_prefixes(server: Server, count: int = 5) -> None:
    """Has it answer prompts that stay in its prefix cache, and nothing else."""
    await answers_of(server.base_url, prompts(7, seed=9)[:count], 1, "c")


async def gets_its_memory(waits: Server) -> None:
    """Asserts that a long prompt is answered soon, and rightly, whatever memory the device has left."""
    async with http_client(2) as http:
        client = Client(waits.base_url, http)
        long = max(prompts(7, seed=9), key=len)
        names = [secrets.token_hex(4) for _ in range(2)]
        answer = asyncio.create_task(client.answer(long, max_tokens=TOKENS, salt=names[0], request_id=names[0]))
        done, _ = await asyncio.wait([answer], timeout=SOON_SECONDS)
        assert done, "it waits for memory that another engine keeps for nobody"
        alone = await client.answer(long, max_tokens=TOKENS, salt=names[1], request_id=names[1])
        assert answer.result().token_ids == alone.token_ids
