# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings of all tiers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator

import hypothesis
import pytest

pytest.register_assert_rewrite("support")

# On a busy machine wall-clock time says nothing about the code, so no example has a deadline.
hypothesis.settings.register_profile(
    "default without deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("default without deadline")


@pytest.fixture
def make_module(request: pytest.FixtureRequest) -> Iterator[Callable[..., types.ModuleType]]:
    """Creates modules from source text in ``sys.modules`` for one test: ``make_module("name", source)``. Makes
    the packages around it, too, that are not there."""
    made: list[str] = []

    def make(name: str, source: str = "") -> types.ModuleType:
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            make(parent).__path__ = []
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        made.append(name)
        exec(compile(source, f"<{name}>", "exec"), vars(module))
        return module

    yield make
    for name in made:
        sys.modules.pop(name, None)
