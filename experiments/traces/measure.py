# SPDX-License-Identifier: Apache-2.0
"""Runs requests through decode, which asks prefill, with traces, and adds their spans up."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from experiments.common import model as models
from experiments.common.asking import Asking
from experiments.common.otlp import ENVIRONMENT, Span, collecting
from experiments.common.servers import GIVES_BACK, ServerSpec, prefill_and_decode
from experiments.common.transfer_config import nixl

TOKENS = 8
SUMMARY = "llm_request"
"""vLLM's own span of a whole request."""
WEB_FRAMEWORK = "fastapi"
"""The scope of spans that FastAPI makes by itself from 0.165 on, once vLLM has set a provider of tracers."""


@dataclass(frozen=True)
class Arm:
    """How KV is handed over."""

    name: str
    mode: str
    is_staged: bool = False


ARMS = (Arm("pull", "pull"), Arm("push", "push"), Arm("pull, staged", "pull", True), Arm("push, staged", "push", True))


@dataclass(frozen=True)
class Traced:
    """One request: its spans in the order of their begin, and the seconds until its client had the first token."""

    trace_id: str
    spans: list[Span]
    first_token_seconds: float

    @property
    def parts(self) -> list[Span]:
        """The spans that are not another view of the same time: not vLLM's summary, not the web framework's."""
        return [span for span in self.spans if span.name != SUMMARY and span.scope != WEB_FRAMEWORK]

    @property
    def first_token(self) -> float:
        """When decode's API server had the first token, in seconds since the epoch."""
        return max(span.end for span in self.spans if span.name == "server_answering" and _is_of(span, "decode"))

    @property
    def leaves(self) -> list[Span]:
        """The spans before the first token, one after the other: decode's, and while it asks, prefill's.

        Not what runs beside them: what prefill does with the KV after it has answered.
        """
        (asking,) = [span for span in self.parts if span.name == "decode_asking"]
        return [
            span
            for span in self.parts
            if (span.end <= asking.end if _is_of(span, "prefill") else span.end <= self.first_token)
            and span is not asking
        ]

    @property
    def share(self) -> float:
        """What the leaves add up to, relative to the time to first token."""
        return sum(span.seconds for span in self.leaves) / self.first_token_seconds


def specs(arm: Arm, endpoint: str) -> list[ServerSpec]:
    """Return a prefill and a decode server that send spans to ``endpoint``; none if it is ""."""
    extra = {"transfer_mode": arm.mode, **({"memory_path": "host"} if arm.is_staged else {})}
    made = prefill_and_decode(
        arm.name,
        nixl("", extra, kv_load_failure_policy="fail"),
        model=models.make_model(models.ModelShape(max_positions=8192)),
        dtype="float32",
        max_model_len=8192,
        arguments=("--otlp-traces-endpoint", endpoint) if endpoint else (),
        forks=True,
    )
    kvcached = {"ENABLE_KVCACHED": "true", "KVCACHED_CONTIGUOUS_LAYOUT": "true", "KVCACHED_HOSTVMM_GIB": "2"}
    return [
        replace(one, environment={**kvcached, **GIVES_BACK, **ENVIRONMENT, "OTEL_SERVICE_NAME": process})
        for one, process in zip(made, ("prefill", "decode"), strict=True)
    ]


def run(arm: Arm, count: int, prompt_tokens: int, logs: Path, say: Callable[[str], None] | None = None) -> list[Traced]:
    """Return ``count`` requests, one after the other; those before them, which connect the servers, are left out."""
    with collecting() as collector, Asking(specs(arm, collector.endpoint), logs, say) as launched:
        _, decode = launched.ready()
        asked = [ask(decode.base_url, prompt_tokens) for _ in range(count + 2)]
        return [Traced(trace_id, collector.of_trace(trace_id, is_whole), seconds) for trace_id, seconds in asked[2:]]


def is_whole(spans: list[Span]) -> bool:
    """Whether both processes have sent their last span."""
    names = {span.name for span in spans}
    is_computed = sum(span.name == SUMMARY for span in spans) >= 2
    return is_computed and {"decode_first_token", "prefill_sending"} <= names


def _is_of(span: Span, process: str) -> bool:
    return bool(span.resource["service.name"] == process)


def client_span(trace_id: str) -> str:
    """Return the id of the client's span, below which all others hang."""
    return trace_id[:16]


def ask(url: str, prompt_tokens: int) -> tuple[str, float]:
    """Stream one completion of a prompt that nobody has cached. Returns its trace, and the seconds to first token."""
    trace_id = secrets.token_hex(16)
    prompt = [random.randrange(3, 500) for _ in range(prompt_tokens)]
    body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-{client_span(trace_id)}-01"}
    first: float | None = None
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        # The connection is there before the clock starts.
        http.get(f"{url}/health")
        begun = time.perf_counter()
        with http.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers) as answer:
            for line in answer.iter_lines():
                if first is None and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    first = time.perf_counter() - begun
    if answer.status_code != 200 or first is None:
        raise RuntimeError(f"found status {answer.status_code} and no token; expected a stream of tokens")
    return trace_id, first
