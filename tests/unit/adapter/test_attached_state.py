# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.attributes`: state is found on vLLM's connectors at any depth, and on no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.vllm.adapter.attributes import attach, attach_step, side_of, sides, step_on


def nixl(side: str) -> SimpleNamespace:
    made = SimpleNamespace()
    attach(made, side)
    return made


def test_the_sides_of_an_engine_are_those_of_its_connectors_however_deep() -> None:
    stock = SimpleNamespace(other=1)
    assert side_of(nixl("one")) == "one"
    assert list(sides(nixl("one"))) == ["one"]
    inner = SimpleNamespace(_connectors=[stock, nixl("two")])
    assert sorted(sides(SimpleNamespace(_connectors=[nixl("one"), stock, inner]))) == ["one", "two"]


@pytest.mark.parametrize("connector", [None, SimpleNamespace(), SimpleNamespace(_connectors=[])], ids=str)
def test_an_engine_without_ours_has_none(connector: Any) -> None:
    assert list(sides(connector)) == []
    assert side_of(connector) is None


def test_a_side_is_not_inherited() -> None:
    """A connector's class may be another's base."""

    class Connector:
        pass

    attach(Connector, "of the class")
    assert side_of(Connector()) is None


def test_a_step_rides_on_the_metadata_that_is_bound() -> None:
    metadata = SimpleNamespace()
    assert attach_step(metadata, "a step") is metadata
    assert step_on(metadata) == "a step"
    with pytest.raises(ContractChanged, match="kvcached_nixl_step"):
        step_on(SimpleNamespace())
