# SPDX-License-Identifier: Apache-2.0
"""experiments/router_overhead: the router accepts its stub, and its targets can be missed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.router_overhead.load import Seen
from experiments.router_overhead.report import judge
from experiments.router_overhead.stub import END, EVENT, PREFILLED
from kvcached_nixl.wire.params import parse


def test_the_stub_says_what_a_router_takes() -> None:
    """A change of the manifest must be one of the stub's, too."""
    params = json.loads(PREFILLED.partition(b"\r\n\r\n")[2])["kv_transfer_params"]
    assert parse(json.dumps(params).encode()).manifest is not None
    assert EVENT.endswith(b"\n\n\r\n") and END.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def row(
    arm: str, *, paced: bool, per_second: float = 100.0, first_p50_ms: float = 1.0, failed: int = 0
) -> dict[str, Any]:
    return {
        **{"arm": arm, "streams": 64, "paced": paced, "per_second": per_second},
        **{"first_p50_ms": first_p50_ms, "failed": failed},
    }


GOOD = {"per_second": 151.0, "first_p50_ms": 3.9}


@pytest.mark.parametrize(
    ("changed", "memory", "files", "missed"),
    [
        ({}, 1.05, 1.05, ""),
        ({"first_p50_ms": 4.1}, 1.05, 1, "first token"),
        ({"per_second": 149.0}, 1.05, 1, "requests a second"),
        ({"failed": 1}, 1.05, 1, "failed"),
        ({}, 1.2, 1, "memory"),
        ({}, 1, 1.2, "open files"),
    ],
    ids=str,
)
def test_each_target_can_be_missed(changed: dict[str, Any], memory: float, files: float, missed: str) -> None:
    rows = [row(arm, paced=paced) for arm in ("direct", "pass-through") for paced in (False, True)]
    rows += [row("router", paced=paced, **{**GOOD, **changed}) for paced in (False, True)]
    found = {"begin_bytes": 100, "end_bytes": 100 * memory, "begin_files": 100, "end_files": 100 * files}
    verdicts = judge(rows, {"requests": 100_000, **found})
    assert len(verdicts) == 5
    assert [verdict.target for verdict in verdicts if not verdict.reached] == [
        verdict.target for verdict in verdicts if missed and missed in verdict.target
    ]


def test_a_run_without_requests_is_summed_up_all_the_same() -> None:
    assert Seen(failed=3, wall_seconds=1.0).summary()["failed"] == 3
