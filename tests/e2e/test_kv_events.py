# SPDX-License-Identifier: Apache-2.0
"""KV events and cache metrics of a pair with kvcached: what routers and dashboards read of hand-overs."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.feature_models import spec

from experiments.common.counted import count
from experiments.common.model import GQA, make_model
from experiments.common.servers import Running, Server, ServerSpec

zmq = pytest.importorskip("zmq", reason="vLLM publishes events with it")
msgspec = pytest.importorskip("msgspec", reason="vLLM encodes events with it")

BLOCK_SIZE, BLOCKS = 32, 6
PROMPT = [3 + (7 * place + 5) % 500 for place in range(BLOCKS * BLOCK_SIZE)]
EVENTS_SECONDS = 20.0


def with_events(one: ServerSpec, endpoint: str) -> ServerSpec:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return dataclasses.replace(
        one,
        block_size=BLOCK_SIZE,
        arguments=(*one.arguments, "--kv-events-config", json.dumps(events)),
        environment={
            **one.environment,
            # Both servers, and the stock one, begin their hashes alike.
            "PYTHONHASHSEED": "0",
            "VLLM_SERVER_DEV_MODE": "1",
        },
    )


class Subscriber:
    """What a server says that it has: the hashes of its blocks."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.known: list[Any] = []
        self.is_cleared = False

    def until(self, count: int, *, is_cleared: bool = False) -> list[Any]:
        """Read events until so many hashes are known, or everything was cleared."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

        deadline = time.monotonic() + EVENTS_SECONDS
        while (self.is_cleared, len(self.known)) != (is_cleared, count):
            assert time.monotonic() < deadline, (self.known, self.is_cleared)
            if not self.socket.poll(200):
                continue
            batch = msgspec.msgpack.decode(self.socket.recv_multipart()[-1], type=KVEventBatch)
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self.known += event.block_hashes
                elif isinstance(event, BlockRemoved):
                    for one in event.block_hashes:
                        self.known.remove(one)
                elif isinstance(event, AllBlocksCleared):
                    self.known, self.is_cleared = [], True
        return self.known


def ask(server: Server, max_tokens: int, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0} | more
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_events_name_what_was_computed_and_what_was_handed_over(tmp_path: Path) -> None:
    """The same hashes as one stock instance's, on prefill and on decode; and that all is gone after a reset."""
    modes = {"alone": None, "prefill": "pull", "decode": "pull"}
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        # vLLM connects to a TCP endpoint, and listens on one of these.
        endpoints = {name: f"ipc://{folder}/{name}" for name in modes}
        specs = [with_events(spec(name, make_model(GQA), mode), endpoints[name]) for name, mode in modes.items()]
        with Running(specs, tmp_path) as launched:
            alone, prefill, decode = launched.ready()
            heard = [Subscriber(context, endpoint) for endpoint in endpoints.values()]
            # A subscription takes effect some time after it is made; nothing says when.
            time.sleep(1.0)
            said = ask(alone, 2)["choices"][0]["text"]
            expected = heard[0].until(BLOCKS)
            offered = ask(prefill, 1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
            assert ask(decode, 2, kv_transfer_params=offered)["choices"][0]["text"] == said
            assert heard[1].until(BLOCKS) == expected
            assert heard[2].until(BLOCKS) == expected
            # Counters are updated with a step, before its events are published. What was handed over is no hit of
            # decode's own prefix cache.
            assert count([decode], "vllm:prefix_cache_hits_total{") == 0
            assert count([decode], "vllm:prefix_cache_queries_total{") == len(PROMPT)
            assert count([decode], "vllm:external_prefix_cache_hits_total{") == len(PROMPT)
            # No cache may serve it, so that it misses none.
            ask(decode, 1, prompt_logprobs=1)
            assert httpx.post(f"{decode.base_url}/reset_prefix_cache", timeout=60.0, trust_env=False).status_code == 200
            # Events are published with a step.
            ask(decode, 1, prompt=PROMPT[BLOCK_SIZE : 2 * BLOCK_SIZE + 1])
            assert not set(heard[2].until(1, is_cleared=True)) & set(expected)
            assert count([decode], "vllm:external_prefix_cache_queries_total{") == len(PROMPT) + BLOCK_SIZE + 1
        context.destroy(linger=0)
