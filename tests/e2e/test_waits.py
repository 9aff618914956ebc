# SPDX-License-Identifier: Apache-2.0
"""Real servers that are full for longer than any deadline, and servers whose limit leaves no room for a request."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from support.pressed_servers import SOON_SECONDS

from experiments.common.client import AnswerError, Client, Pair, answers_of, http_client, read_answer
from experiments.common.counted import own_names
from experiments.common.device import with_extra
from experiments.common.servers import Running, Server, ServerSpec
from experiments.lease_recovery.arms import NUM_BLOCKS, PULL, PUSH, Arm, prompts

ALLOCATION_SECONDS = 3.0
TIMEOUT_SECONDS = 2 * ALLOCATION_SECONDS
REQUESTS, TOKENS = 14, 160
DECODE_BLOCKS = NUM_BLOCKS // 2


def specs_of(arm: Arm) -> list[ServerSpec]:
    """A pair whose decode has blocks for about two requests, and whose deadlines are short."""
    found = []
    for spec, num_blocks in zip(arm.specs("fail"), (NUM_BLOCKS, DECODE_BLOCKS), strict=True):
        assert spec.kv_transfer is not None
        found.append(
            dataclasses.replace(
                spec,
                arguments=("--num-gpu-blocks-override", str(num_blocks)),
                # kvcached looks at its limit on the thread that allocates pages in advance.
                environment={**spec.environment, "KVCACHED_PAGE_PREALLOC_ENABLED": "true"},
                kv_transfer=with_extra(spec.kv_transfer, {"handover_timeout": TIMEOUT_SECONDS}),
            )
        )
    return found


@pytest.mark.parametrize("arm", [PULL, PUSH], ids=["pull", "push"])
def test_waits_have_ends_where_nothing_goes_on_and_there_only(arm: Arm, tmp_path: Path) -> None:
    async def run(prefill: Server, decode: Server) -> None:
        async with http_client(REQUESTS) as http:
            pair = Pair(Client(prefill.base_url, http), Client(decode.base_url, http))
            asked = prompts(REQUESTS, seed=11)
            alone = await answers_of(decode.base_url, asked, TOKENS, "alone")

            async def handed_over(place: int, round_: str) -> list[int]:
                names = {"salt": f"{round_}-{place}", "request_id": f"{round_}-{place}"}
                offer = await pair.prefill_only(asked[place], **names)
                said = await pair.decode.complete(
                    asked[place], max_tokens=TOKENS, **names, kv_transfer_params=offer.params
                )
                return read_answer(said, TOKENS).token_ids

            begun = time.monotonic()
            answers = await asyncio.gather(*(handed_over(place, "at-once") for place in range(REQUESTS)))
            assert time.monotonic() - begun > TIMEOUT_SECONDS, "some of them have to wait for longer than any deadline"
            assert answers == [one.token_ids for one in alone]

            longest = max(range(REQUESTS), key=lambda place: len(asked[place]))
            for server in (decode, prefill):
                await never_fits(pair, server, asked[longest])
            assert await handed_over(longest, "again") == alone[longest].token_ids
        for server in (prefill, decode):
            server.check_alive()

    async def never_fits(pair: Pair, server: Server, prompt: list[int]) -> None:
        """Ends in words, whether it is a hand-over or not, and soon after its time."""
        (name,) = own_names(server.identity)
        whole = get_kv_cache_limit(name).total_size
        params = None
        if server.base_url == pair.decode.base_url:
            params = (await pair.prefill_only(prompt, salt="small", request_id="small")).params
        assert update_kv_cache_limit(name, whole // NUM_BLOCKS) is not None
        # A thread of kvcached notices it within 0.1 s, and says so nowhere.
        await asyncio.sleep(1.0)
        client = Client(server.base_url, pair.decode.http)
        for kind, given in (("handed-over", params or {"do_remote_decode": True}), ("local", None)):
            names = {"salt": f"small-{kind}", "request_id": f"small-{kind}"}
            if kind == "handed-over":
                names = {"salt": "small", "request_id": "small"}
            with pytest.raises(AnswerError, match="500.*KV memory is short: cause=no_blocks.*expected at least"):
                await asyncio.wait_for(
                    client.complete(prompt, max_tokens=1, **names, kv_transfer_params=given),
                    ALLOCATION_SECONDS + SOON_SECONDS,
                )
        assert update_kv_cache_limit(name, whole) is not None

    with Running(specs_of(arm), tmp_path) as running:
        asyncio.run(run(*running.ready()))
