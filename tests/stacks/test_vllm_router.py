# SPDX-License-Identifier: Apache-2.0
"""vllm-router, unchanged, before a prefill and a decode server: `experiments.stacks`, with fewer requests.

It pushes to both servers at once from the second request on. When prefill is killed its clients get errors, and right
answers as soon as prefill is back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.stacks.frontends import STACKS
from experiments.stacks.measure import measure, targets
from experiments.stacks.traffic import Answer, Request

(VLLM_ROUTER,) = [one for one in STACKS if one.name == "vllm-router"]


@pytest.mark.parametrize("mode", VLLM_ROUTER.modes)
def test_every_answer_is_that_of_one_instance(
    mode: str, expected: dict[Request, Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found = measure(VLLM_ROUTER, mode, expected, tmp_path, lambda text: print(f"\n{text}", end=""))
    assert [one for one in targets(found) if not one.reached] == []
    assert found.troubled.get("error", 0) > 0, "nobody noticed that prefill was killed"
