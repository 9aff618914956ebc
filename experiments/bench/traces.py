# SPDX-License-Identifier: Apache-2.0
"""Do the spans of a request account for its time to first token?

A prefill and a decode server that asks it, and a collector of their spans: pull, push, and both staged through host
memory. Decode's spans before the first token, and prefill's while decode asks, are added up. --only names arms. A
whole run draws docs/trace.png.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import httpx

from experiments.bench.comparison import KVCACHED, Arm, Column, Samples, pair_specs
from experiments.common import model as models
from experiments.common.client import Client
from experiments.common.device import MODES
from experiments.common.report import Run, Verdict, make_panels, save
from experiments.common.servers import GIVES_BACK, REPOSITORY, Asking, ServerSpec

REQUESTS, QUICK_REQUESTS, PROMPT_TOKENS = 8, 3, 4000
TOKENS = 8
SUMMARY = "llm_request"
"""vLLM's own span of a whole request."""
WEB_FRAMEWORK = "fastapi"
"""The scope of spans that FastAPI makes by itself from 0.165 on, once vLLM has set a provider of tracers."""


ARMS = tuple(
    Arm(f"{mode}{', staged' if path else ''}", extra={"transfer_mode": mode, **path})
    for path in ({}, {"memory_path": "host"})
    for mode in MODES
)


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
        return max(span.end for span in self.spans if span.name == "server_answering" and span.process == "decode")

    @property
    def leaves(self) -> list[Span]:
        """The spans before the first token, one after the other: decode's, and while it asks, prefill's.

        Not what runs beside them: what prefill does with the KV after it has answered.
        """
        (asking,) = [span for span in self.parts if span.name == "decode_asking"]
        until = {"prefill": asking.end}
        ended = [one for one in self.parts if one.end <= until.get(one.process, self.first_token)]
        return [one for one in ended if one is not asking]

    @property
    def share(self) -> float:
        """What the leaves add up to, relative to the time to first token."""
        return sum(span.seconds for span in self.leaves) / self.first_token_seconds


WITHIN, AT_WORST = 0.05, 0.10
"""Of the median request, and of any: a span that nobody measures gets longer where processes wait for a core."""
PROCESSES = ("decode", "prefill")
_OF_DECODE = ("held", "asking", "queued", "allocated", "handshake", "moving", "verifying", "reporting", "resuming")
_ALWAYS = {"prefill_queued", "prefill_computing", "prefill_sending", "decode_first_token"}
_ALWAYS |= {f"decode_{state}" for state in _OF_DECODE}


def main(run: Run) -> int:
    found: list[tuple[Arm, list[Traced]]] = []
    count, samples = QUICK_REQUESTS if run.quick else REQUESTS, Samples(("{}", "{}"))
    for arm in run.chosen(ARMS):
        traced = send(arm, count, PROMPT_TOKENS, run.logs / arm.name.replace(", ", "-"), run.update)
        run.say(f"{arm.name}: {count} requests")
        found.append((arm, traced))
        for one in traced:
            for state in dict.fromkeys((span.process, span.name) for span in one.leaves):
                seconds = sum(span.seconds for span in one.leaves if (span.process, span.name) == state)
                samples.add(state, arm.name, seconds=seconds)
            samples.add(("client", "time to first token"), arm.name, seconds=one.first_token_seconds, share=one.share)
    table = samples.table("median milliseconds before the first token", [Column("ms", "seconds", digits=2)])
    verdicts = [verdict for arm, traced in found for verdict in judge(arm, traced)]
    if not (run.options.only or run.quick):
        plot([(arm, traced[-1]) for arm, traced in found[:2]], REPOSITORY / "docs" / "trace.png")
    return run.conclude([table], verdicts, {"prompt_tokens": PROMPT_TOKENS, "spans": samples.as_json()})


def specs(arm: Arm, endpoint: str) -> list[ServerSpec]:
    model = models.make_model(models.ModelShape(max_positions=8192))
    arguments = ("--otlp-traces-endpoint", endpoint) if endpoint else ()
    sizes = {"model": model, "dtype": "float32", "max_model_len": 8192, "arguments": arguments, "forks": True}
    environment = {**KVCACHED, "KVCACHED_HOSTVMM_GIB": "2", **GIVES_BACK, **ENVIRONMENT}
    return [
        replace(one, environment={**environment, "OTEL_SERVICE_NAME": process})
        for one, process in zip(pair_specs(arm, "", {}, **sizes), ("prefill", "decode"), strict=True)
    ]


def send(
    arm: Arm, count: int, prompt_tokens: int, logs: Path, say: Callable[[str], None] | None = None
) -> list[Traced]:
    """Return ``count`` requests, one after the other; those before them, which connect the servers, are left out."""
    with Collector() as collector, Asking(specs(arm, collector.endpoint), logs, say) as launched:
        _, decode = launched.ready()
        asked = [ask(decode.base_url, prompt_tokens) for _ in range(count + 2)]
        return [Traced(trace_id, collector.of_trace(trace_id), seconds) for trace_id, seconds in asked[2:]]


def client_span(trace_id: str) -> str:
    """Return the id of the client's span, below which all others hang."""
    return trace_id[:16]


def ask(url: str, prompt_tokens: int) -> tuple[str, float]:
    """Stream one completion of a prompt that nobody has cached. Returns its trace, and the seconds to first token."""
    trace_id = secrets.token_hex(16)
    prompt = [random.randrange(3, 500) for _ in range(prompt_tokens)]
    headers = {"traceparent": f"00-{trace_id}-{client_span(trace_id)}-01"}

    async def first_token_seconds() -> float:
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
            # The connection is there before the clock starts.
            await http.get(f"{url}/health")
            begun = time.perf_counter()
            names = {"salt": trace_id, "request_id": trace_id, "headers": headers}
            return [at async for at, _ in Client(url, http).stream(prompt, max_tokens=TOKENS, **names)][0] - begun

    return trace_id, asyncio.run(first_token_seconds())


def states_of(arm: Arm) -> set[str]:
    is_push, is_staged = arm.extra["transfer_mode"] == "push", "memory_path" in arm.extra
    more = {"prefill_offered": not is_push, "decode_waiting": is_push or is_staged, "decode_copying": is_staged}
    return _ALWAYS | {state for state, is_there in more.items() if is_there}


def judge(arm: Arm, traced: Sequence[Traced]) -> list[Verdict]:
    shares = [one.share for one in traced]
    found = f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
    is_reached = abs(median(shares) - 1) <= WITHIN and all(abs(share - 1) <= AT_WORST for share in shares)
    missing = sorted(set.union(*(states_of(arm) - {span.name for span in one.spans} for one in traced)))
    processes = {span.process for one in traced for span in one.spans}
    return [
        Verdict(f"{arm.name}: spans / time to first token, median 0.95 to 1.05, any 0.9 to 1.1", found, is_reached),
        Verdict(f"{arm.name}: every state is there", ", ".join(missing) or "yes", not missing),
        Verdict(f"{arm.name}: one trace over two processes", ", ".join(sorted(processes)), processes == set(PROCESSES)),
    ]


def plot(found: Sequence[tuple[Arm, Traced]], path: Path) -> None:
    figure, panels = make_panels(len(found), 13, 7)
    colours = dict(zip(PROCESSES, ("tab:orange", "tab:blue"), strict=True))
    for panel, (arm, one) in zip(panels, found, strict=True):
        begun = one.spans[0].begin
        spans = [span for span in one.parts if span.begin < one.first_token + 0.02]
        lines = list(dict.fromkeys((span.process, span.name) for span in spans))
        last = (one.first_token - begun) * 1e3 * 1.06
        for span in spans:
            place = lines.index((span.process, span.name))
            begin, end = (span.begin - begun) * 1e3, min((span.end - begun) * 1e3, last)
            colour = colours[span.process]
            panel.barh(place, max(end - begin, last / 400), left=begin, color=colour, edgecolor="white", linewidth=0.4)
        panel.axvline((one.first_token - begun) * 1e3, color="tab:red", linewidth=0.8)
        panel.set_yticks(range(len(lines)), [name for _, name in lines], fontsize=7)
        panel.set(xlabel="ms", xlim=(0, last), title=f"{arm.name} (red: first token)")
        panel.invert_yaxis()
        panel.grid(axis="x", alpha=0.3)
    handles = [panels[0].barh(0, 0, color=colour, label=name) for name, colour in colours.items()]
    panels[0].legend(handles=handles, fontsize=8, loc="lower left")
    save(figure, "", path)


# ---------------------------------------------------------------------------------------------------------- a collector
# It takes OpenTelemetry's spans over HTTP on the loopback address, and keeps them.


WAIT_SECONDS = 20.0
ENVIRONMENT: Mapping[str, str] = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    # Otherwise a span is sent up to 5 s after its end.
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "NO_PROXY": "127.0.0.1",
}
"""Of a process that sends to `Collector`."""


@dataclass(frozen=True)
class Span:
    """One span. Times are in seconds since the epoch; ``parent_id`` is "" for the first one of a trace.

    ``scope`` is OpenTelemetry's: the name of the library that made the span. ``process``: the name of its service.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    scope: str
    begin: float
    end: float
    process: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Collector(ThreadingHTTPServer):
    """Receives spans during a ``with`` block, on a free port of the loopback address."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receives)
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.spans: list[Span] = []

    def __enter__(self) -> Collector:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def of_trace(self, trace_id: str) -> list[Span]:
        """Return the spans of a trace in the order of their begin, waiting until they are whole, or for 20 s."""
        until = time.monotonic() + WAIT_SECONDS
        while True:
            found = [span for span in list(self.spans) if span.trace_id == trace_id]
            names = Counter(span.name for span in found)
            is_whole = names[SUMMARY] >= 2 and {"decode_first_token", "prefill_sending"} <= names.keys()
            if is_whole or time.monotonic() > until:
                return sorted(found, key=lambda span: span.begin)
            time.sleep(0.05)


class _Receives(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        said = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for of_resource in said.resource_spans:
            attributes = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    times = (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
                    process = attributes.get("service.name", "")
                    self.server.spans.append(Span(*ids, span.name, of_scope.scope.name, *times, process))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: one line for each request would hide what is measured."""
