# SPDX-License-Identifier: Apache-2.0
"""Leases between real servers: parameters that are out of date, and servers that come back on the ports of dead ones.

The long run of this, with every kind of fault, is experiments/lease_recovery.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

from experiments.common.client import Client, Pair, http_client, read_answer
from experiments.common.servers import Running, Server
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS, PULL, PUSH, TOKENS, Arm, prompts
from experiments.lease_recovery.chaos import mapped_bytes
from experiments.lease_recovery.traffic import Ended, Traffic

STALE = 50
# Of which the lease is a part; the rest is for a busy machine.
MEMORY_COMES_BACK_SECONDS = LEASE_SECONDS + 2 * HEARTBEAT_SECONDS + 20.0


def start_again(running: Running, side: int) -> None:
    """The server is killed, and another one listens where it did."""
    running.servers[side].kill()
    running.replace(side)
    running.ready()


def all_right(ended: list[Ended]) -> bool:
    wrong = [one for one in ended if one.verdict != "right"]
    assert not wrong, wrong
    return bool(ended)


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=lambda arm: arm.name)
def test_what_is_out_of_date_is_recomputed_and_never_used(arm: Arm, tmp_path: Path) -> None:
    """Every answer is HTTP 200 with the right tokens."""

    async def before(traffic: Traffic) -> None:
        await traffic.learn()
        assert all_right(await asyncio.gather(*(traffic.one() for _ in range(8))))
        assert all_right(await traffic.stale(STALE, LEASE_SECONDS + 2 * HEARTBEAT_SECONDS))

    async def afterwards(traffic: Traffic) -> None:
        # Decode knows a prefill of another name at these ports, which is gone.
        assert all_right(await asyncio.gather(*(traffic.one() for _ in range(8))))

    async def shrunk(traffic: Traffic, prefill: Server, decode: Server) -> None:
        """While a lease lasts, kvcached is told to make do with what is in use, and others want blocks."""
        async with http_client(2) as http:
            pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
            offer = await pair.prefill_only(traffic.prompts[0], salt="held", request_id="held")
            before = get_kv_cache_limit(prefill.identity)
            assert before.used_size > 0
            assert update_kv_cache_limit(prefill.identity, before.used_size) is not None
            others = [asyncio.create_task(traffic.one()) for _ in range(4)]
            for _ in range(10):
                assert get_kv_cache_limit(prefill.identity).used_size >= before.used_size
                assert (await pair.prefill.probe("digests", offer.block_ids))["digests"] == offer.digests
                await asyncio.sleep(0.05)
            names = {"salt": "held", "request_id": "held", "kv_transfer_params": offer.params}
            answer = read_answer(await pair.decode.complete(traffic.prompts[0], max_tokens=TOKENS, **names), TOKENS)
            assert answer.token_ids == traffic.expected[0]
            # They go on with what the lease has held.
            assert all_right(await asyncio.gather(*others))
            assert update_kv_cache_limit(prefill.identity, before.total_size) is not None

    with Running(arm.specs("recompute"), tmp_path) as running:
        prefill, decode = running.ready()
        rest = mapped_bytes(decode)
        traffic = Traffic(running.servers, arm.mode, prompts(12))
        asyncio.run(before(traffic))
        if arm is PUSH:
            # Who dies while it pushes is test_push.py's.
            return
        asyncio.run(shrunk(traffic, prefill, decode))
        assert "Prefill does not keep request" in decode.log.read_text()
        start_again(running, 0)
        asyncio.run(afterwards(traffic))
        deadline = time.monotonic() + MEMORY_COMES_BACK_SECONDS
        while mapped_bytes(decode) > rest:
            assert time.monotonic() < deadline, "decode keeps memory of requests that have ended"
            time.sleep(0.05)
        decode.check_alive()
        assert prefill.process.poll() is not None
