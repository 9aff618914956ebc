# SPDX-License-Identifier: Apache-2.0
"""What is refused: peers that differ, and configurations that would change the geometry."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.endpoints import ENDPOINTS, TEMPLATE, Endpoint, Failed, Prompt, read

from experiments.common import model as models
from experiments.common.client import AnswerError, Client, Pair, http_client, read_answer
from experiments.common.device import layout, nixl
from experiments.common.servers import ServerError, ServerSpec, running

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **layout()}
PROMPT = [3 + place % 500 for place in range(100)]


def spec(name: str, policy: str = "fail", environment: dict[str, str] | None = None, **extra: Any) -> ServerSpec:
    return ServerSpec(
        name=name,
        model=models.make_model(),
        dtype="float32",
        kv_transfer=nixl(name, extra, kv_load_failure_policy=policy),
        environment=KVCACHED if environment is None else environment,
        arguments=("--chat-template", TEMPLATE),
        forks=True,
    )


@pytest.mark.parametrize(
    ("policy", "groups"), [("fail", 2), ("recompute", 1)], ids=["fail, two groups", "recompute, one group"]
)
def test_a_stock_peer_is_refused_and_its_request_fails_or_is_recomputed(
    policy: str, groups: int, tmp_path: Path
) -> None:
    """A stock prefill server: decode never reads it. The client gets an error, or the right tokens; decode lives on."""
    specs = [spec("prefill", environment={}), spec("decode", policy)]
    if groups == 2:
        arguments = (*specs[0].arguments, "--no-disable-hybrid-kv-cache-manager")
        model = models.make_model(models.SLIDING_AND_FULL)
        # The one pair of this tier whose engines are spawned, as `vllm serve` does it on a CPU.
        specs = [replace(one, model=model, arguments=arguments, forks=False) for one in specs]
    with running(specs, tmp_path) as (prefill, decode):
        asyncio.run(_against_a_stock_peer(policy, prefill.base_url, decode.base_url))
        decode.check_alive()
        log = decode.log.read_text(errors="replace")
    assert "have no 'kvcached_nixl'" in log and "unchanged" in log


async def _against_a_stock_peer(policy: str, prefill_url: str, decode_url: str) -> None:
    async with http_client(1) as http:
        pair = Pair(Client(prefill_url, http), Client(decode_url, http))
        expected = await pair.prefill.answer(PROMPT, max_tokens=8, salt="alone", request_id="alone")
        for turn in range(2):
            names = {"salt": f"turn-{turn}", "request_id": f"turn-{turn}"}
            offered = await pair.prefill.offer(PROMPT, **names)
            request = pair.decode.complete(PROMPT, max_tokens=8, **names, kv_transfer_params=offered)
            if policy == "fail":
                with pytest.raises(AnswerError, match=r"answered 5.*KV hand-over failed: cause=no_manifest"):
                    await request
                for endpoint in ENDPOINTS:
                    await _fails_on(endpoint, decode_url, http, offered)
            else:
                assert read_answer(await request, 8).token_ids == expected.token_ids
        local = await pair.decode.answer(PROMPT, max_tokens=8, salt="local", request_id="local")
        assert local.token_ids == expected.token_ids


async def _fails_on(endpoint: Endpoint, url: str, http: httpx.AsyncClient, params: dict[str, Any]) -> None:
    """Of one choice and of two, as a whole and as a stream: an error, and never an answer with nothing in it."""
    if endpoint.path not in (await http.get(f"{url}/openapi.json")).json()["paths"]:
        return
    prompt = Prompt("a " * 50, PROMPT)
    for n, stream in itertools.product((1, 2)[: 1 + endpoint.takes_n], (False, True)[: 1 + endpoint.can_stream]):
        body = endpoint.ask(prompt, "", params, n) | ({"stream": True} if stream else {})
        try:
            reply = await http.post(url + endpoint.path, json=body)
        except httpx.RemoteProtocolError:
            # vLLM has no event for it there.
            assert stream and endpoint.path == "/v1/responses"
            continue
        if reply.status_code == httpx.codes.OK:
            assert stream, f"{endpoint.name}, n = {n}: {reply.text}"
            with pytest.raises(Failed):
                read(endpoint, reply.headers["content-type"], reply.text)
        else:
            assert reply.status_code == httpx.codes.INTERNAL_SERVER_ERROR, f"{endpoint.name}, n = {n}: {reply.text}"
            # Of several choices vLLM has one error for all, which may be of one that was not told.
            if n == 1 and endpoint.path == "/v1/completions":
                assert "KV hand-over failed: cause=no_manifest" in reply.text, f"{endpoint.name}: {reply.text}"


@pytest.mark.parametrize(
    ("extra", "environment", "word"),
    [
        ({"transfer_mode": "shove"}, {}, "transfer_mode"),
        ({"memory_path": "direct"}, {"NIXL_HOSTVMM_REGISTRATION": "pinned"}, "mapped after registration"),
    ],
    ids=["unknown mode", "registrations that pin"],
)
def test_what_cannot_be_served_stops_the_engine_at_start(
    extra: dict[str, Any], environment: dict[str, str], word: str, tmp_path: Path
) -> None:
    """The server ends before it listens, and its log says what was found, expected and what to do."""
    refused = spec("refused", environment={**KVCACHED, **environment}, **extra)
    with pytest.raises(ServerError, match="ended with status"), running([refused], tmp_path):
        pass
    log = (tmp_path / "refused.log").read_text(errors="replace")
    assert word in log
    for sentence in ("found:", "expected:", "consequence:", "remedy:"):
        assert sentence in log


@pytest.mark.long
def test_a_side_channel_port_that_is_taken_says_which_process_has_it(tmp_path: Path) -> None:
    """The engine's process; its server serves on, and ``doctor`` says so."""
    with running([spec("prefill")], tmp_path) as (prefill,):
        words = [sys.executable, "-m", "kvcached_nixl", "doctor", "--json", "--prefill", prefill.base_url]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120.0)
        (said,) = json.loads(done.stdout)
        assert done.returncode == 0 and said["why_not"] is None, done.stdout + done.stderr
        assert said["transfer_mode"] == "pull" and said["/health"] == "200"
        port = str(prefill.side_channel_port)
        second = spec("decode", environment={**KVCACHED, "VLLM_NIXL_SIDE_CHANNEL_PORT": port})
        with pytest.raises(ServerError, match="ended with status"), running([second], tmp_path):
            pass
        prefill.check_alive()
        log = (tmp_path / "decode.log").read_text(errors="replace")
        (found,) = {line.partition("found:")[2] for line in log.splitlines() if "found:" in line and "is taken" in line}
        assert f"port {port} of 127.0.0.1 is taken by process " in found and "EngineCore" in found
