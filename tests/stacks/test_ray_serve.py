# SPDX-License-Identifier: Apache-2.0
"""Ray Serve LLM, unchanged: it starts, names and restarts the engines itself.

Requests wait for the replica that it starts in place of a killed one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments.common.device import MODES
from experiments.stacks.measure import Outcome


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_that_of_one_instance(mode: str, check: Callable[[str, str], Outcome]) -> None:
    assert check("Ray Serve LLM", mode).troubled
