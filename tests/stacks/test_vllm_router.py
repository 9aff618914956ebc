# SPDX-License-Identifier: Apache-2.0
"""vllm-router, unchanged, before a prefill and a decode server.

It pushes to both servers at once from the second request on. When prefill is killed its clients get errors, and right
answers as soon as prefill is back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments.common.device import MODES
from experiments.stacks.measure import Outcome


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_that_of_one_instance(mode: str, check: Callable[[str, str], Outcome]) -> None:
    assert check("vllm-router", mode).num_errors > 0, "nobody noticed that prefill was killed"
