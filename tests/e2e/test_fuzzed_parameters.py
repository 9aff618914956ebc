# SPDX-License-Identifier: Apache-2.0
"""Wrong ``kv_transfer_params`` and bodies against real servers: nobody gets wrong tokens, and both servers go on.

``bash experiments/fuzzed_parameters/run.sh`` sends ten thousand; these are a few hundred of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from experiments.common.servers import running
from experiments.fuzzed_parameters.__main__ import MODES, specs
from experiments.fuzzed_parameters.traffic import Fuzz

COUNT = 250


@pytest.mark.parametrize(("mode", "policy"), [("pull", "recompute"), ("push", "fail")])
def test_wrong_parameters_give_no_wrong_tokens_and_end_no_server(mode: str, policy: str, tmp_path: Path) -> None:
    """In between and afterwards, honest requests are handed over: `Fuzz` raises if one is not."""
    assert mode in MODES
    with running(specs(mode, policy), tmp_path) as servers:
        fuzz = Fuzz(servers, mode, 1, lambda _: None)
        found = asyncio.run(fuzz.run(COUNT))
        for server in servers:
            server.check_alive()
    assert found.wrong == [] and found.hangs == []
    assert found.verdicts.total() == COUNT and found.verdicts["right"] > COUNT // 10
