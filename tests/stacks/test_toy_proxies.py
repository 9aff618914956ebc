# SPDX-License-Identifier: Apache-2.0
"""The proxies of vLLM's own tests and examples, from its source archive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments.stacks.measure import Outcome


@pytest.mark.parametrize(
    ("proxy", "mode"), [("vLLM's toy proxy", "pull"), ("vLLM's toy proxy", "push"), ("vLLM's push demo", "push")]
)
def test_every_answer_is_that_of_one_instance(proxy: str, mode: str, check: Callable[[str, str], Outcome]) -> None:
    assert check(proxy, mode).num_errors > 0, "nobody noticed that prefill was killed"
