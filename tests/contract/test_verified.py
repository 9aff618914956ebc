# SPDX-License-Identifier: Apache-2.0
"""Verified hand-overs, over real NIXL and the installed vLLM's layouts.

Runs cases of `test_handover` again, in which both sides must compute the same checksums, and cases in which bytes
change on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import torch
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, nodes
from support.handover_node import (
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    Node,
    asked,
    computed_alone,
    ends_by_policy,
    prefilled,
    rest,
    until_both,
)
from support.node_cases import (  # noqa: F401 - run here, too
    test_a_prompt_that_prefill_computed_in_chunks_arrives,
    test_the_missing_blocks_arrive_and_no_other_changes,
)

from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.worker.transfer.checksums import Content

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, pair = handover_node.direction, handover_node.pair


@pytest.fixture(params=[("direct", "direct"), ("host", "direct"), ("direct", "device")], ids=["direct", "P", "D"])
def paths(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Of prefill, and of decode."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def node(
    direction: str,
    paths: tuple[str, str],
    tmp_path: Any,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Node]]:
    """Makes a node that verifies all hand-overs. Digests have to be found on both sides."""
    finders = set[int]()
    digest = Content.digest

    def noted(self: Content, *arguments: Any, **options: Any) -> str:
        finders.add(id(self))
        return digest(self, *arguments, **options)

    monkeypatch.setattr(Content, "digest", noted)
    with nodes(Node, tmp_path, log) as make:
        yield lambda filling, geometry=RESERVED, **options: make(
            filling,
            geometry,
            **{
                "transfer_mode": direction,
                "memory_path": paths[0] if filling == PREFILL_FILLING else paths[1],
                "verify_fraction": 1.0,
                **options,
            },
        )
        assert len(finders) >= 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_other_bytes_end_the_request_by_policy_and_are_not_used(
    policy: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of one head of the last token that was moved has become another since it was sent."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    received = decode.context.checksums._received
    digest = received.digest
    params = prefilled(prefill, PREFILL_ID)
    local = asked(decode, params)

    def changed(*arguments: Any, **options: Any) -> str:
        cache = list(decode.caches.values())[-1]
        block = cache[local[-1]].view(torch.uint8)
        block[(-1,) * block.dim()] ^= 1
        return digest(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(received, "digest", changed)
        ends_by_policy(policy, decode, prefill)
    assert [FailureCause(one) for one in decode.account["kvcached_nixl_failures"]] == [FailureCause.CHECKSUM]
    assert "is not what prefill sent" in decode.log.text
    computed_alone(decode)
    # That engine is not believed again.
    params = prefilled(prefill, "cmpl-w-0-aaaaaaaa", 100)
    decode.ended.clear()
    decode.add(DECODE_ID, params, first_token=100)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == {"fail": "error", "recompute": "length"}[policy]
    assert "memory_path" in decode.log.text
    rest(prefill, decode)
