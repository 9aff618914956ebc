# SPDX-License-Identifier: Apache-2.0
"""Shared by all tiers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator

import hypothesis
import pytest

pytest.register_assert_rewrite("support")

# A time on the wall says nothing of code on a busy machine.
hypothesis.settings.register_profile(
    "default without deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("default without deadline")


@pytest.fixture
def make_module(request: pytest.FixtureRequest) -> Iterator[Callable[..., types.ModuleType]]:
    """Put modules made from source text into ``sys.modules`` for one test: ``make_module("name", source)``."""
    made: list[str] = []

    def make(name: str, source: str = "") -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        made.append(name)
        exec(compile(source, f"<{name}>", "exec"), vars(module))
        return module

    yield make
    for name in made:
        sys.modules.pop(name, None)
