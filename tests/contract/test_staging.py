# SPDX-License-Identifier: Apache-2.0
"""KV through a slab, over real NIXL, on the installed vLLM: hand-overs work the same whichever side stages.

Runs cases of `test_handover` again, with either or both sides staging, and checks that NIXL never gets an address of a
staged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, nodes
from support.handover_node import (
    BLOCK_SIZE,
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    Node,
    asked,
    prefilled,
    rest,
    served,
)
from support.node_cases import (  # noqa: F401 - run here, too
    test_a_peer_that_was_forgotten_is_met_again,
    test_a_prompt_that_prefill_computed_in_chunks_arrives,
    test_decodes_request_aborted_in_its_queue_frees_prefills_blocks,
    test_parameters_from_before_prefills_restart_give_no_bytes,
    test_parameters_of_a_lease_that_has_ended_give_no_bytes,
    test_prefill_lets_go_of_what_decode_has_cached_altogether,
    test_the_missing_blocks_arrive_and_no_other_changes,
)
from support.transports import until

from kvcached_nixl.transport.base import Transport
from kvcached_nixl.worker import memory_registration as sizing
from kvcached_nixl.worker.staging.slab import Use

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, pair = handover_node.direction, handover_node.pair


@pytest.fixture(params=[("host", "direct"), ("direct", "device"), ("device", "host")], ids=["P", "D", "both"])
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
    """Creates nodes that stage as their role does, and fails if NIXL gets an address of a staged cache."""
    caches: dict[int, list[range]] = {}
    post = Transport.post

    def watched(self: Transport, operation: Any, peer: str, local: Any, *arguments: Any, **named: Any) -> Any:
        if not named.get("is_host"):
            for storage in caches.get(id(self._agent), ()):
                assert not any(begin in storage for begin in local[:, 0].tolist()), "a staged cache is named to NIXL"
        return post(self, operation, peer, local, *arguments, **named)

    monkeypatch.setattr(Transport, "post", watched)
    with nodes(Node, tmp_path, log) as make:

        def made(filling: int, geometry: Any = RESERVED, **options: Any) -> Node:
            path = paths[0] if filling == PREFILL_FILLING else paths[1]
            found = make(filling, geometry, **{"transfer_mode": direction, "memory_path": path, **options})
            if path != "direct":
                storages = [cache.untyped_storage() for cache in found.caches.values()]
                caches[id(found.agent)] = [range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
            return found

        yield made


def test_prefills_blocks_are_free_long_before_decode_comes(node: Callable[..., Node], paths: tuple[str, str]) -> None:
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    params = prefilled(prefill, PREFILL_ID)
    if paths[0] == "direct":
        prefill.step()
        assert PREFILL_ID not in prefill.sent
    else:
        prefill.step_until(lambda: PREFILL_ID in prefill.sent)
        assert prefill.context.staging.slots.used(Use.PARKED)
        # Somebody else has them now.
        prefill.fill(list(range(1, RESERVED.num_blocks)), 0x55)
    local = asked(decode, params)
    until(lambda: prefill.step() and decode.step() and DECODE_ID in decode.received)
    assert decode.holds(local)
    rest(prefill, decode)


def test_a_request_that_no_slab_could_hold_goes_through_range_by_range(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_LARGEST_BLOCK_TOKENS", BLOCK_SIZE)
    monkeypatch.setattr(sizing, "num_slots", lambda layout, load, _, **__: load.fewest_slots)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    slabs = [one.context.staging for one in (prefill, decode)]
    assert {slab.slots.count for slab in slabs if slab is not None} == {4}
    params = prefilled(prefill, PREFILL_ID)
    local = asked(decode, params)
    until(lambda: prefill.step() and decode.step() and DECODE_ID in decode.received)
    assert decode.holds(local)
    served(prefill, decode)
    assert not any(slab.slots.used(use) for slab in slabs if slab is not None for use in Use)
