# SPDX-License-Identifier: Apache-2.0
"""experiments/bench/conversation_faults.py: every server gets every fault, and its targets can be missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("rich")
pytest.importorskip("hostvmm")

from experiments.bench.conversation_faults import VERDICTS, faults, judge, name_of
from experiments.bench.samples import Samples
from experiments.common.servers import Running


def test_every_server_gets_every_fault() -> None:
    made: list[Any] = [
        SimpleNamespace(base_url=f"http://{side}", spec=SimpleNamespace(name=f"home-{side}+1"))
        for side in ("prefill", "decode")
    ]
    launched = cast(Running, SimpleNamespace(servers=made))
    names = {name_of(one, launched) for one in faults(launched)}
    assert len(names) == len(faults(launched)) == 7
    assert {"short of memory", "prefill: killed", "decode: shut down", "decode: other weights"} < names


@pytest.mark.parametrize(
    ("verdict", "missed"),
    [("right", []), ("its server died", []), ("wrong", ["wrong answers"]), ("error", ["errors"])],
)
def test_each_target_can_be_missed(verdict: str, missed: list[str]) -> None:
    samples = Samples(("{}",))
    for found in ("right", verdict):
        samples.add(("decode is killed",), "home", **{one: float(one == found) for one in VERDICTS})
    targets = [one.target for one in judge(samples) if not one.reached]
    assert len(targets) == len(missed) and all(word in one for word, one in zip(missed, targets, strict=True))
