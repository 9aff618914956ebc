# SPDX-License-Identifier: Apache-2.0
"""Dynamo's frontend and workers, unchanged: vLLM's engine without vLLM's HTTP server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments.common.device import MODES
from experiments.stacks.measure import Outcome


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_that_of_one_instance(mode: str, check: Callable[[str, str], Outcome]) -> None:
    assert check("Dynamo", mode).num_errors > 0, "nobody noticed that prefill was killed"
