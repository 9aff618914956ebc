# SPDX-License-Identifier: Apache-2.0
"""Do the spans of a request account for its time to first token?"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import httpx

from experiments.bench.pairs import KVCACHED
from experiments.bench.samples import Answer, Column, Run, Samples
from experiments.common import model as models
from experiments.common.asking import Asking
from experiments.common.otlp import ENVIRONMENT, Span, collecting
from experiments.common.plots import make_panels, save
from experiments.common.servers import GIVES_BACK, REPOSITORY, ServerSpec, prefill_and_decode
from experiments.common.targets import Verdict
from experiments.common.transfer_config import nixl

REQUESTS, QUICK_REQUESTS, PROMPT_TOKENS = 8, 3, 4000
PICTURE = REPOSITORY / "docs" / "trace.png"
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
        return max(span.end for span in self.spans if span.name == "server_answering" and _process(span) == "decode")

    @property
    def leaves(self) -> list[Span]:
        """The spans before the first token, one after the other: decode's, and while it asks, prefill's.

        Not what runs beside them: what prefill does with the KV after it has answered.
        """
        (asking,) = [span for span in self.parts if span.name == "decode_asking"]
        return [
            span
            for span in self.parts
            if (span.end <= asking.end if _process(span) == "prefill" else span.end <= self.first_token)
            and span is not asking
        ]

    @property
    def share(self) -> float:
        """What the leaves add up to, relative to the time to first token."""
        return sum(span.seconds for span in self.leaves) / self.first_token_seconds


WITHIN, AT_WORST = 0.05, 0.10
"""Of the median request, and of any: a span that nobody measures gets longer where processes wait for a core."""
PROCESSES = ("decode", "prefill")
_OF_PREFILL = ("queued", "computing", "sending")
_OF_DECODE = ("held", "asking", "queued", "allocated", "handshake", "moving", "verifying", "reporting", "resuming")
_ALWAYS = {
    *(f"prefill_{state}" for state in _OF_PREFILL),
    *(f"decode_{state}" for state in (*_OF_DECODE, "first_token")),
}


def answer(run_: Run) -> Answer:
    """Trace requests of each arm, one after the other."""
    found: dict[Arm, list[Traced]] = {}
    count = QUICK_REQUESTS if run_.quick else REQUESTS
    for arm in ARMS:
        if run_.only in arm.name:
            logs = run_.logs / arm.name.replace(", ", "-")
            found[arm] = run(arm, count, PROMPT_TOKENS, logs, run_.show)
            run_.tell(f"{arm.name}: {count} requests")
    samples = Samples(("{}", "{}"))
    for arm, traced in found.items():
        for one in traced:
            for process, name in dict.fromkeys((_process(span), span.name) for span in one.leaves):
                spent = sum(span.seconds for span in one.leaves if (_process(span), span.name) == (process, name))
                samples.add((process, name), arm.name, seconds=spent)
            samples.add(("client", "time to first token"), arm.name, seconds=one.first_token_seconds, share=one.share)
    table = samples.table("median milliseconds before the first token", [Column("ms", "seconds", digits=2)])
    verdicts = [verdict for arm, traced in found.items() for verdict in judge(arm, traced)]
    if not (run_.only or run_.quick):
        plot({arm: traced[-1] for arm, traced in list(found.items())[:2]}, PICTURE)
    return Answer([table], verdicts, {"prompt_tokens": PROMPT_TOKENS, "spans": samples.as_json()})


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
    environment = {**KVCACHED, "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK, **ENVIRONMENT}
    return [
        replace(one, environment={**environment, "OTEL_SERVICE_NAME": process})
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


def _process(span: Span) -> str:
    return str(span.resource["service.name"])


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


def states_of(arm: Arm) -> set[str]:
    """Return the states that a hand-over goes through."""
    found = set(_ALWAYS)
    if arm.mode == "pull":
        found.add("prefill_offered")
    if arm.mode == "push" or arm.is_staged:
        found.add("decode_waiting")
    if arm.is_staged:
        found.add("decode_copying")
    return found


def judge(arm: Arm, traced: Sequence[Traced]) -> list[Verdict]:
    """Return the targets of an arm."""
    shares = [one.share for one in traced]
    found = f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
    is_reached = abs(median(shares) - 1) <= WITHIN and all(abs(share - 1) <= AT_WORST for share in shares)
    missing = sorted(set.union(*(states_of(arm) - {span.name for span in one.spans} for one in traced)))
    processes = {_process(span) for one in traced for span in one.spans}
    return [
        Verdict(f"{arm.name}: spans / time to first token, median 0.95 to 1.05, any 0.9 to 1.1", found, is_reached),
        Verdict(f"{arm.name}: every state is there", ", ".join(missing) or "yes", not missing),
        Verdict(f"{arm.name}: one trace over two processes", ", ".join(sorted(processes)), processes == set(PROCESSES)),
    ]


def plot(found: Mapping[Arm, Traced], path: Path) -> None:
    """Draw the spans of one request of each arm until shortly after its first token, a line each."""
    figure, panels = make_panels(len(found), 13, 7)
    colours = dict(zip(PROCESSES, ("tab:orange", "tab:blue"), strict=True))
    for panel, (arm, one) in zip(panels, found.items(), strict=True):
        begun = one.spans[0].begin
        spans = [span for span in one.parts if span.begin < one.first_token + 0.02]
        lines = list(dict.fromkeys((_process(span), span.name) for span in spans))
        last = (one.first_token - begun) * 1e3 * 1.06
        for span in spans:
            place = lines.index((_process(span), span.name))
            begin, end = (span.begin - begun) * 1e3, min((span.end - begun) * 1e3, last)
            colour = colours[_process(span)]
            panel.barh(place, max(end - begin, last / 400), left=begin, color=colour, edgecolor="white", linewidth=0.4)
        panel.axvline((one.first_token - begun) * 1e3, color="tab:red", linewidth=0.8)
        panel.set_yticks(range(len(lines)), [name for _, name in lines], fontsize=7)
        panel.set(xlabel="ms", xlim=(0, last), title=f"{arm.name} (red: first token)")
        panel.invert_yaxis()
        panel.grid(axis="x", alpha=0.3)
    handles = [panels[0].barh(0, 0, color=colour, label=name) for name, colour in colours.items()]
    panels[0].legend(handles=handles, fontsize=8, loc="lower left")
    save(figure, "", path)
