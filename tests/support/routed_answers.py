# SPDX-License-Identifier: Apache-2.0
"""For tests of the router with real servers: how the servers are started, and what the official client gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from experiments.common import model as models
from experiments.common.servers import GIVES_BACK, ServerSpec
from experiments.common.transfer_config import role

openai = pytest.importorskip("openai", reason="the official client is not installed")

KVCACHED = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_CONTIGUOUS_LAYOUT": "true",
    "KVCACHED_HOSTVMM_GIB": "2",
    **GIVES_BACK,
}
TOKENS = 16
# The experiments' model has no chat template.
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
STEP_SECONDS = 150.0
Said = tuple[str, list[float]]


def spec(name: str, mode: str | None, **extra: object) -> ServerSpec:
    """Returns a server's spec. Without ``mode`` it is the stock reference. ``extra`` goes to the connector's config."""
    connector: dict[str, object] | None = None
    if mode is not None:
        connector = {
            "kv_connector": "NixlConnector",
            "kv_role": role(name),
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": mode, "kv_lease_duration": 5.0, **extra},
        }
    return ServerSpec(
        name=name,
        model=models.make_model(models.ModelShape(max_positions=4096)),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=128,
        kv_transfer=connector,
        environment=KVCACHED if mode is not None else {},
        arguments=("--chat-template", TEMPLATE),
        forks=True,
    )


def counted(metrics: str, name: str) -> float:
    """Returns the sum over all series of one of the router's counters; ``name`` without the prefix."""
    full = f"kvcached_nixl_router_{name}_total"
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(f"{full}{{"))


async def several(client: Any, prompts: list[list[int]], *, stream: bool) -> Said:
    """Returns the texts of two sequences of each prompt, in their order: of each token the most probable one."""
    asked = {"model": "model", "prompt": prompts, "n": 2, "max_tokens": TOKENS, "temperature": 1}
    more = {"ignore_eos": True, "top_k": 1}
    answer = await client.completions.create(**asked, stream=stream, extra_body=more)
    texts = [""] * (2 * len(prompts))
    for choice in [choice async for part in answer for choice in part.choices] if stream else answer.choices:
        texts[choice.index] += choice.text
    return "|".join(texts), []


ENDPOINTS = ("/v1/responses", "/v1/messages", "/inference/v1/generate")


async def of_endpoint(url: str, path: str, prompt: list[int], *, stream: bool) -> Said:
    """Returns what one of `ENDPOINTS` generates, as text. Without it, the status of the refusal."""
    words = " ".join(map(str, prompt[:60]))
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": words, "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        "/v1/messages": {"messages": [{"role": "user", "content": words}], "max_tokens": TOKENS, "temperature": 0},
        "/inference/v1/generate": {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        },
    }
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=STEP_SECONDS) as http:
        answer = await http.post(path, json={"model": "model", "stream": stream, **bodies[path]})
    if answer.status_code != 200:
        return f"status {answer.status_code}", []
    if not stream:
        return "".join(map(str, _texts(answer.json()))), []
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events and not any("error" in event for event in events if event.get("error")), answer.text
    pieces = [event for event in events if "delta" in event.get("type", "delta")]
    return "".join(str(found) for event in pieces for found in _texts(event)), []


def _texts(said: Any) -> list[Any]:
    """Returns the generated pieces of an answer or an event, in order: texts, or token ids."""
    if isinstance(said, list):
        return [found for one in said for found in _texts(one)]
    if not isinstance(said, dict):
        return []
    if isinstance(said.get("delta"), str):
        return [said["delta"]]
    if isinstance(said.get("token_ids"), list):
        return list(said["token_ids"])
    if isinstance(said.get("text"), str):
        return [said["text"]]
    return [found for name in ("output", "content", "choices", "delta") for found in _texts(said.get(name))]


async def complete(client: Any, prompt: list[int], *, stream: bool) -> Said:
    """Returns the text, and the log-probability of each token."""
    asked = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
    answer = await client.completions.create(**asked, stream=stream, extra_body={"ignore_eos": True})
    choices = [part.choices[0] async for part in answer if part.choices] if stream else [answer.choices[0]]
    text = "".join(one.text for one in choices)
    return text, [float(p) for one in choices if one.logprobs for p in one.logprobs.token_logprobs]


def client_of(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STEP_SECONDS)


def close(one: Said, other: Said) -> bool:
    """Whether texts are equal and log-probabilities differ by no more than those of one server with other batches."""
    return one[0] == other[0] and all(abs(a - b) < 0.001 for a, b in zip(one[1], other[1], strict=True))
