# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that do not finish, on the installed vLLM: the client gets its error before the blocks are free.

Sections B3 and B10 of the review of the earlier implementation; flow has the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import BLOCKS, DECODE_ID, PREFILL_ID, USABLE, same
from support.handover_node import (
    BLOCK_SIZE,
    DECODE_FILLING,
    PREFILL_FILLING,
    Node,
    asked,
    computed_alone,
    mover,
    prefilled,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.transports import until

from kvcached_nixl.wire.causes import FailureCause

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair

POLICIES = ["fail", "recompute"]
TIMEOUT_SECONDS = 0.4


def quarantined(decode: Node) -> int:
    """As the metric has it."""
    return int(([0, *decode.account["kvcached_nixl_quarantined_blocks"]])[-1])


def sleeps(one: Node) -> bool:
    """When everything has been heard, its engine does not step any more, though it keeps blocks."""
    for _ in range(5):
        one.settle()
        one.step()
    for _ in range(3):
        one.settle()
        if one.scheduler.has_requests():
            return False
    return True


@pytest.mark.parametrize("policy", POLICIES)
def test_a_transfer_that_never_ends_fails_in_time_and_keeps_its_blocks(
    policy: str, direction: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings B3, B10: the client hears at ``handover_timeout``; blocks come back when NIXL says that it has ended."""
    # Long enough for decode to come in time on any machine.
    prefill = node(PREFILL_FILLING, kv_lease_duration=3)
    decode = node(DECODE_FILLING, policy=policy, handover_timeout=TIMEOUT_SECONDS)
    served(prefill, decode)
    gate = transfers_held(mover(direction, prefill, decode), monkeypatch)
    begun = time.monotonic()
    local = asked(decode, prefilled(prefill, PREFILL_ID))
    until(lambda: gate.kept)
    before = decode.content(local)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert time.monotonic() - begun >= TIMEOUT_SECONDS
    assert decode.ended[DECODE_ID] == {"fail": "error", "recompute": "length"}[policy]
    until_both(prefill, decode, lambda: not decode.scheduler.has_requests())
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.DEADLINE]
    assert "has not come within 0.4 s" in decode.log.text
    assert quarantined(decode) == BLOCKS and decode.free_blocks == USABLE - BLOCKS
    assert sleeps(decode)
    # Others are computed in what is left.
    computed_alone(decode)
    until(lambda: decode.step() and not decode.scheduler.has_requests())
    assert same(decode.content(local), before)

    gate.closed = False
    until_both(prefill, decode, lambda: decode.free_blocks == USABLE)
    rest(prefill, decode)
    assert quarantined(decode) == 0
    served(prefill, decode, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_fits_beside_no_quarantine_is_told_so(
    policy: str, direction: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule R4, for local requests as well: vLLM would wait at the head of its queue for blocks that are never freed."""
    prefill = node(PREFILL_FILLING)
    decode = node(DECODE_FILLING, policy=policy, handover_timeout=TIMEOUT_SECONDS)
    served(prefill, decode)
    gate = transfers_held(mover(direction, prefill, decode), monkeypatch)
    asked(decode, prefilled(prefill, PREFILL_ID))
    until(lambda: gate.kept)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    until_both(prefill, decode, lambda: not decode.scheduler.has_requests())
    assert quarantined(decode) == BLOCKS
    large, small = "cmpl-l-0-eeeeeeee", "cmpl-s-0-eeeeeeee"
    decode.add(large, None, first_token=100, num_tokens=(USABLE - 1) * BLOCK_SIZE)
    decode.add(small, None, first_token=300, num_tokens=BLOCK_SIZE)
    decode.step_until(lambda: small in decode.ended)
    assert (decode.ended[large], decode.ended[small]) == ("error", "length")
    assert f"{BLOCKS} blocks are in quarantine" in decode.log.text
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.DEADLINE, FailureCause.QUARANTINE]
    gate.closed = False
    rest(prefill, decode)
    computed_alone(decode)
