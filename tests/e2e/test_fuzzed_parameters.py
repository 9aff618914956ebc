# SPDX-License-Identifier: Apache-2.0
"""Wrong ``kv_transfer_params`` against real servers: no client gets wrong tokens, and both servers live."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx
import pytest
from support.fuzz import Fuzz, specs

from experiments.common.client import Client, Pair, http_client
from experiments.common.servers import running
from kvcached_nixl.wire.params import MANIFEST_KEY

COUNT = 250


@pytest.mark.parametrize(("mode", "policy"), [("pull", "recompute"), ("push", "fail")])
def test_wrong_parameters_give_no_wrong_tokens_and_end_no_server(mode: str, policy: str, tmp_path: Path) -> None:
    """In between and afterwards, valid requests are handed over: `Fuzz` raises if one is not."""
    with running(specs(mode, policy), tmp_path) as servers:
        asyncio.run(rejected(*(server.base_url for server in servers)))
        fuzz = Fuzz(servers, mode, 1)
        asyncio.run(fuzz.run(COUNT))
        for server in servers:
            server.check_alive()
    assert fuzz.bad == []
    assert fuzz.verdicts.total() == COUNT and fuzz.verdicts["right"] > COUNT // 20


async def rejected(*urls: str) -> None:
    """Requests of models that there are not, under the ids of a request that prefill keeps, which is handed over then.

    Two of them, of any client, ended prefill's engine.
    """
    prompt = [3 + place % 500 for place in range(100)]
    async with http_client(1) as http:
        pair = Pair(*(Client(url, http) for url in urls))
        expected = (await pair.prefill.answer(prompt, max_tokens=8, salt="alone", request_id="alone")).token_ids
        kept = await pair.prefill.offer(prompt, salt="kept", request_id="kept", transfer_id="kept")
        for url, name in itertools.product(urls, (kept["remote_request_id"], "kept", "cmpl-kept-0")):
            params = {**kept, "remote_request_id": "another", "transfer_id": "another", MANIFEST_KEY: None}
            body = {"model": "no such model", "prompt": prompt, "request_id": name, "kv_transfer_params": params}
            reply = await http.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name})
            assert reply.status_code == httpx.codes.NOT_FOUND
        decoded = await pair.decode.complete(
            prompt, max_tokens=8, salt="kept", request_id="kept", kv_transfer_params=kept
        )
        assert decoded["choices"][0]["token_ids"] == expected
