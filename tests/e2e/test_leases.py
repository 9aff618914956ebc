# SPDX-License-Identifier: Apache-2.0
"""Leases between real servers: outdated parameters, and servers that restart on the ports of dead ones.

experiments/lease_recovery is the long run of this, with every kind of fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from support.waiting import until

from experiments.common.client import Client, Pair, http_client, read_answer
from experiments.common.counted import own_names
from experiments.common.servers import Running, Server, ServerSpec
from experiments.lease_recovery.arms import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    PULL,
    PUSH,
    TOKENS,
    Arm,
    Ended,
    Traffic,
    prompts,
)
from experiments.lease_recovery.chaos import mapped_bytes

STALE = 50
RESTART_IS_NOTICED_SECONDS = 30.0
"""A handshake; the rest is for a busy machine. Less than handover_timeout, after which anything ends."""
# Of which the lease is a part; the rest is for a busy machine.
MEMORY_COMES_BACK_SECONDS = LEASE_SECONDS + 2 * HEARTBEAT_SECONDS + 20.0


def named(spec: ServerSpec, engine_id: str) -> ServerSpec:
    return dataclasses.replace(spec, kv_transfer={**(spec.kv_transfer or {}), "engine_id": engine_id})


def all_right(ended: list[Ended]) -> bool:
    wrong = [one for one in ended if one.verdict != "right"]
    assert not wrong, wrong
    return bool(ended)


@pytest.mark.parametrize(
    ("arm", "successors"), [(PULL, ("a prefill", "another")), (PUSH, ("a prefill",))], ids=["pull", "push"]
)
def test_what_is_out_of_date_is_recomputed_and_never_used(arm: Arm, successors: Sequence[str], tmp_path: Path) -> None:
    """Every answer is HTTP 200 with the right tokens, also when prefill has died and another one listens where it did.

    ``successors``: what those are called, one after the other. The first prefill is called like its successor.
    """

    async def before(traffic: Traffic) -> None:
        await traffic.learn()
        assert all_right(await asyncio.gather(*(traffic.one() for _ in range(8))))
        assert all_right(await traffic.stale(STALE, LEASE_SECONDS + 2 * HEARTBEAT_SECONDS))

    async def restarted(traffic: Traffic, name: str) -> None:
        """Decode has parameters of a prefill that was killed and replaced."""
        async with http_client(1) as http:
            pair = Pair(*(Client(server.base_url, http) for server in running.servers))
            offer = await pair.prefill_only(traffic.prompts[0], salt=name, request_id=name)
            running.servers[0].kill()
            running.replace(0, named(running.specs[0], name))
            running.ready()
            # Its successor says at once that it is another one.
            late = pair.decode_offered(offer, traffic.prompts[0], max_tokens=TOKENS, salt=name, request_id=name)
            answered = await asyncio.wait_for(late, RESTART_IS_NOTICED_SECONDS)
            assert answered.answer.token_ids == traffic.expected[0]
        assert all_right(await asyncio.gather(*(traffic.one() for _ in range(8))))

    async def shrunk(traffic: Traffic, prefill: Server, decode: Server) -> None:
        """While a lease lasts, kvcached is told to make do with what is in use, and others want blocks."""
        async with http_client(2) as http:
            pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
            offer = await pair.prefill_only(traffic.prompts[0], salt="held", request_id="held")
            (name,) = own_names(prefill.identity)
            before = get_kv_cache_limit(name)
            assert before.used_size > 0
            assert update_kv_cache_limit(name, before.used_size) is not None
            others = [asyncio.create_task(traffic.one()) for _ in range(4)]
            for _ in range(10):
                assert get_kv_cache_limit(name).used_size >= before.used_size
                assert (await pair.prefill.probe("digests", offer.block_ids))["digests"] == offer.digests
                await asyncio.sleep(0.05)
            names = {"salt": "held", "request_id": "held", "kv_transfer_params": offer.params}
            answer = read_answer(await pair.decode.complete(traffic.prompts[0], max_tokens=TOKENS, **names), TOKENS)
            assert answer.token_ids == traffic.expected[0]
            # They go on with what the lease has held.
            assert all_right(await asyncio.gather(*others))
            assert update_kv_cache_limit(name, before.total_size) is not None

    specs = arm.specs("recompute")
    with Running([named(specs[0], successors[0]), specs[1]], tmp_path) as running:
        prefill, decode = running.ready()
        rest = mapped_bytes(decode)
        traffic = Traffic(running.servers, prompts(12))
        asyncio.run(before(traffic))
        if arm is PULL:
            asyncio.run(shrunk(traffic, prefill, decode))
            assert "prefill does not keep" in decode.log.read_text()
        for name in successors:
            asyncio.run(restarted(traffic, name))
        kept = "decode keeps memory of requests that have ended"
        until(lambda: mapped_bytes(decode) <= rest, kept, MEMORY_COMES_BACK_SECONDS)
        decode.check_alive()
        assert prefill.process.poll() is not None
