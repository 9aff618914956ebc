# SPDX-License-Identifier: Apache-2.0
"""Traces of real servers: one for each request, every state in it, and they account for its time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from experiments.bench.traces import ARMS, ENVIRONMENT, PROCESSES, WITHIN, Arm, ask, client_span, send, specs, states_of
from experiments.common.servers import Asking

PROMPT_TOKENS = 4000
NOWHERE = "http://127.0.0.1:9/v1/traces"
STOP_SECONDS = 30.0


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name.replace(", ", "-"))
def test_a_request_is_one_trace_that_accounts_for_its_first_token(arm: Arm, tmp_path: Path) -> None:
    traced = send(arm, 5, PROMPT_TOKENS, tmp_path)
    for one in traced:
        assert {span.process for span in one.spans} == set(PROCESSES)
        names = {span.name for span in one.spans}
        assert states_of(arm) <= names, f"{states_of(arm) - names} are missing"
        known = {client_span(one.trace_id), *(span.span_id for span in one.spans)}
        hanging = [span.name for span in one.spans if span.parent_id not in known]
        assert hanging == [], "everything hangs below the client's span"
        told = [(span.name, round(span.seconds * 1e3, 2)) for span in one.leaves]
        assert one.share <= 1 + WITHIN, f"{one.share:.3f} of {one.first_token_seconds * 1e3:.1f} ms: {told}"
    # What takes its time in each request and has no span shows in all of them. On few cores some wait between two
    # processes, too.
    assert max(one.share for one in traced) >= 1 - WITHIN


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_down_costs_no_request_and_no_shutdown(protocol: str, tmp_path: Path) -> None:
    """And /metrics has the times in states."""
    arm, environment = ARMS[0], {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    servers = specs(arm, NOWHERE)
    for one in servers:
        one.environment.update(environment)  # type: ignore[attr-defined]
    with Asking(servers, tmp_path) as launched:
        prefill, decode = launched.ready()
        for _ in range(3):
            ask(decode.base_url, 200)
        shown = httpx.get(f"{decode.base_url}/metrics", trust_env=False).text
        moving = [line for line in shown.splitlines() if 'state="decode_moving"' in line and "_count" in line]
        assert len(moving) == 1 and 'direction="pull"' in moving[0] and float(moving[0].split()[-1]) >= 2
        for server in (prefill, decode):
            begun = time.monotonic()
            os.kill(server.process.pid, 15)
            server.process.wait(STOP_SECONDS)
            assert time.monotonic() - begun < STOP_SECONDS
