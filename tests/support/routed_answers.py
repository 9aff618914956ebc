# SPDX-License-Identifier: Apache-2.0
"""For tests of the router with real servers: how the servers are started, and what the official client gets."""

from __future__ import annotations

from typing import Any

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
