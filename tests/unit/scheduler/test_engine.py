# SPDX-License-Identifier: Apache-2.0
"""scheduler/engine.py: what the scheduler reads of vLLM's objects is there."""

from __future__ import annotations

import pytest

from kvcached_nixl.scheduler.engine import BlockPool, Reader, Request
from kvcached_nixl.vllm.adapter.requests import RequestReader, RequestView
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks


@pytest.mark.parametrize(
    ("needed", "found"), [(Request, RequestView), (Reader, RequestReader), (BlockPool, EngineBlocks)]
)
def test_who_implements_a_protocol_has_all_of_it(needed: type, found: type) -> None:
    methods = {name for name in vars(needed) if not name.startswith("_")}
    names = methods | {*needed.__annotations__}
    assert names and names <= {*dir(found)}
