# SPDX-License-Identifier: Apache-2.0
"""Runs requests through router, prefill and decode, with traces, and adds their spans up."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from experiments.common import model as models
from experiments.common.otlp import ENVIRONMENT, Span, collecting
from experiments.common.router import routed
from experiments.common.servers import GIVES_BACK, Running, ServerSpec
from experiments.common.transfer_config import role

TOKENS = 8
SUMMARY = "llm_request"
"""vLLM's own span of a whole request."""
ROUTER = "kvcached_nixl.proxy"
"""The scope of the router's spans."""
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
    def request(self) -> Span:
        """The router's span of the whole request."""
        (found,) = [span for span in self.spans if _is_request(span)]
        return found

    @property
    def parts(self) -> list[Span]:
        """The spans that are not another view of the same time: not vLLM's summary, not the web framework's."""
        return [span for span in self.spans if span.name != SUMMARY and span.scope != WEB_FRAMEWORK]

    @property
    def first_token(self) -> float:
        """When the router had the first token, in seconds since the epoch."""
        return max(span.end for span in self.spans if span.name == "decode")

    @property
    def leaves(self) -> list[Span]:
        """The spans without children before the first token, one after the other.

        Not what runs beside them: in push prefill's leg; in pull what prefill keeps after it has answered, which
        outlasts its leg.
        """
        by_id = {span.span_id: span for span in self.parts}
        parents = {span.parent_id for span in self.parts}
        is_push = self.request.attributes["kvcached_nixl.direction"] == "push"
        beside = {span.span_id for span in self.parts if is_push and span.name == "prefill"}
        return [
            span
            for span in self.parts
            if span.span_id not in parents | beside
            and span.parent_id not in beside
            and span.end <= min(self.first_token, by_id[span.parent_id].end if span.parent_id in by_id else span.end)
        ]

    @property
    def share(self) -> float:
        """What the leaves add up to, relative to the time to first token."""
        return sum(span.seconds for span in self.leaves) / self.first_token_seconds


def specs(arm: Arm, endpoint: str) -> list[ServerSpec]:
    """Return a prefill and a decode server that send spans to ``endpoint``; none if it is ""."""
    return [
        ServerSpec(
            name=name,
            model=models.make_model(models.ModelShape(max_positions=8192)),
            dtype="float32",
            max_model_len=8192,
            max_num_batched_tokens=512,
            kv_transfer={
                "kv_connector": "NixlConnector",
                "kv_role": role(name),
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {
                    "num_threads": 0,
                    "transfer_mode": arm.mode,
                    **({"memory_path": "host"} if arm.is_staged else {}),
                },
            },
            environment={
                "ENABLE_KVCACHED": "true",
                "KVCACHED_CONTIGUOUS_LAYOUT": "true",
                "KVCACHED_HOSTVMM_GIB": "2",
                **GIVES_BACK,
                **ENVIRONMENT,
                "OTEL_SERVICE_NAME": name,
            },
            arguments=("--otlp-traces-endpoint", endpoint) if endpoint else (),
            forks=True,
        )
        for name in ("prefill", "decode")
    ]


def run(arm: Arm, count: int, prompt_tokens: int, logs: Path, say: Callable[[str], None] | None = None) -> list[Traced]:
    """Return ``count`` requests, one after the other; those before them, which connect the servers, are left out."""
    import os

    with collecting() as collector, Running(specs(arm, collector.endpoint), logs, say) as launched:
        prefill, decode = launched.ready()
        # The router inherits this process's environment.
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            with routed([prefill], [decode], logs / "router.log", "--otlp-traces-endpoint", collector.endpoint) as url:
                asked = [ask(url, prompt_tokens) for _ in range(count + 2)]
                return [
                    Traced(trace_id, collector.of_trace(trace_id, is_whole), seconds) for trace_id, seconds in asked[2:]
                ]
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def is_whole(spans: list[Span]) -> bool:
    """Whether all three processes have sent their last span."""
    names = {span.name for span in spans}
    is_routed = any(map(_is_request, spans))
    is_computed = sum(span.name == SUMMARY for span in spans) >= 2
    return is_routed and is_computed and {"decode_first_token", "prefill_sending"} <= names


def _is_request(span: Span) -> bool:
    return span.scope == ROUTER and span.name.startswith("POST ")


def ask(url: str, prompt_tokens: int) -> tuple[str, float]:
    """Stream one completion of a prompt that nobody has cached. Returns its trace, and the seconds to first token."""
    trace_id = secrets.token_hex(16)
    prompt = [random.randrange(3, 500) for _ in range(prompt_tokens)]
    body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    first: float | None = None
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        # The connection is there before the clock starts.
        http.get(f"{url}/livez")
        begun = time.perf_counter()
        with http.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers) as answer:
            for line in answer.iter_lines():
                if first is None and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    first = time.perf_counter() - begun
    if answer.status_code != 200 or first is None:
        raise RuntimeError(f"found status {answer.status_code} and no token; expected a stream of tokens")
    return trace_id, first
