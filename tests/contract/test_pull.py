# SPDX-License-Identifier: Apache-2.0
"""A pull between two engines, on the installed vLLM: leases, and KV that prefill does not keep any more.

The engines are those of ``test_push.py``; every byte of a request's KV is known from its tokens and their places.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import engine_node
import test_geometry
import test_push
from engine_node import BLOCKS, DECODE_ID, PREFILL_ID, PROMPT, USABLE, nodes
from test_push import ANOTHER_REQUESTS, DECODE_FILLING, PREFILL_FILLING, RESERVED, SEND, all_free, until_both
from test_transport import until
from vllm.v1.request import RequestStatus

from kvcached_nixl.patching import Registry
from kvcached_nixl.transport.agent import peer_name
from kvcached_nixl.wire.lease import EXTENSION, MOST_BEAT_BYTES

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, test_geometry.patched

LEASE_SECONDS = 1.5
FOREVER = 3600.0


class Node(test_push.Node):
    @property
    def pending(self) -> bool:
        return bool(self.scheduler.has_requests())

    def lease_ends(self, request_id: str) -> None:
        """As if its time were over; a beat of decode's may still be under way, and renews it once more."""

        def is_over() -> bool:
            if request_id in self.worker._reqs_to_send:
                self.worker._reqs_to_send[request_id] = 0.0
            return request_id in self.sent

        is_over()
        self.step_until(is_over)


@pytest.fixture
def node(tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., Node]]:
    """Makes a node that pulls, all its pages filled with the given byte."""
    with nodes(Node, tmp_path, log) as make:
        yield lambda filling, geometry=RESERVED, kv_lease_duration=FOREVER, **options: make(
            filling, geometry, kv_lease_duration=kv_lease_duration, **options
        )


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    return node(PREFILL_FILLING), node(DECODE_FILLING)


def prefilled(prefill: Node, request_id: str = PREFILL_ID, first_token: int = 0) -> dict[str, Any]:
    """A request that prefill has computed and keeps; returns decode's parameters for it."""
    prefill.add(request_id, dict(SEND), 1, first_token)
    prefill.step_until(lambda: request_id in prefill.transfer_params)
    prefill.step_until(lambda: request_id in prefill.worker._reqs_to_send)
    return prefill.transfer_params[request_id]


def rest(*both: Node) -> None:
    until(lambda: [node.step() for node in both] and not any(node.pending for node in both))
    assert all(all_free(node) for node in both)


def served(prefill: Node, decode: Node, number: int = 7) -> None:
    """Both engines go on: another request is pulled."""
    first_token = 40 * number
    params = prefilled(prefill, f"cmpl-w-0-aaaaaaa{number}", first_token)
    decode.add(f"cmpl-w-0-ddddddd{number}", params, first_token=first_token)
    decode.step()
    local = decode.blocks(f"cmpl-w-0-ddddddd{number}")
    until_both(prefill, decode, lambda: f"cmpl-w-0-ddddddd{number}" in decode.received)
    assert decode.holds(local, first_token=first_token)
    rest(prefill, decode)


def test_a_pull_reads_the_blocks_and_prefill_lets_go_of_them(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    params = prefilled(prefill)
    blocks = prefill.blocks(PREFILL_ID)
    assert prefill.agent.table.any()
    decode.add(DECODE_ID, params)
    decode.step()
    local = decode.blocks(DECODE_ID)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.holds(local) and prefill.holds(blocks)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    assert not prefill.agent.table.any()
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"
    rest(prefill, decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("known", [False, True], ids=["strangers", "peers"])
def test_parameters_of_a_lease_that_has_ended_give_no_bytes(
    policy: str, known: bool, node: Callable[..., Node]
) -> None:
    """Of its blocks, which hold another request's KV by now."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    if known:
        served(prefill, decode)
    params = prefilled(prefill)
    blocks = prefill.blocks(PREFILL_ID)
    prefill.lease_ends(PREFILL_ID)
    prefill.fill(blocks, ANOTHER_REQUESTS)
    decode.add(DECODE_ID, params)
    test_push.ends_by_policy(policy, decode)
    assert decode.agent.leases_ended == 1
    served(prefill, decode, 8)


def test_the_stock_connector_hands_out_another_requests_bytes(patched: Registry, node: Callable[..., Node]) -> None:
    """What the test before this one is about; if this fails, vLLM has learned it."""
    patched.uninstall()
    exact = dataclasses.replace(RESERVED, reserved_blocks=RESERVED.num_blocks)
    prefill, decode = node(PREFILL_FILLING, exact), node(DECODE_FILLING, exact)
    params = prefilled(prefill)
    blocks = prefill.blocks(PREFILL_ID)
    prefill.lease_ends(PREFILL_ID)
    prefill.fill(blocks, ANOTHER_REQUESTS)
    decode.add(DECODE_ID, params)
    decode.step()
    local = decode.blocks(DECODE_ID)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.are_filled(local, ANOTHER_REQUESTS)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"


def test_an_idle_prefill_gets_its_blocks_back_when_the_lease_ends(node: Callable[..., Node]) -> None:
    """Without another request, and it sleeps as soon as nothing is owed."""
    prefill = node(PREFILL_FILLING, kv_lease_duration=LEASE_SECONDS)
    assert not prefill.pending
    prefilled(prefill)
    for _ in range(5):
        prefill.step()
        assert prefill.pending and prefill.free_blocks == USABLE - BLOCKS
    rest(prefill)
    assert PREFILL_ID in prefill.sent


def test_an_engine_steps_until_a_read_has_ended_whose_request_is_gone(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    gate = test_push.writes_held(decode, monkeypatch)
    decode.add(DECODE_ID, prefilled(prefill))
    decode.step_until(lambda: decode.worker._recving_transfers)
    decode.abort(DECODE_ID)
    for _ in range(5):
        decode.step()
        assert decode.pending and decode.free_blocks == USABLE - BLOCKS
    gate.closed = False
    rest(decode)
    rest(prefill)


def test_a_request_that_waits_for_room_keeps_its_lease_and_others_end(node: Callable[..., Node]) -> None:
    """It has no blocks on decode yet. The renewed lease is older than the one that ends: it shelters nothing."""
    prefill = node(PREFILL_FILLING, kv_lease_duration=LEASE_SECONDS)
    decode = node(DECODE_FILLING, kv_lease_duration=LEASE_SECONDS)
    pool = decode.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(USABLE - 1)
    params = prefilled(prefill)
    left = prefilled(prefill, "cmpl-z-0-aaaaaaaa", 300)
    blocks = prefill.blocks(PREFILL_ID)
    decode.add(DECODE_ID, params)
    until_both(prefill, decode, lambda: left["remote_request_id"] in prefill.sent)
    begun = prefill.worker._reqs_to_send[PREFILL_ID]
    until_both(prefill, decode, lambda: prefill.worker._reqs_to_send[PREFILL_ID] > begun + 2 * EXTENSION)
    assert decode.scheduler.requests[DECODE_ID].status == RequestStatus.WAITING and prefill.holds(blocks)
    assert PREFILL_ID not in prefill.sent
    pool.free_blocks(taken)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(decode.blocks(DECODE_ID))
    rest(prefill, decode)


@pytest.mark.parametrize("whose", ["decode", "prefill"])
def test_a_lease_outlives_a_long_step(whose: str, node: Callable[..., Node]) -> None:
    """Decode's may last half of the lease less its way; prefill's as long as it likes, if decode beats meanwhile."""
    lease_seconds = 2 * LEASE_SECONDS
    prefill, decode = (node(filling, kv_lease_duration=lease_seconds) for filling in (PREFILL_FILLING, DECODE_FILLING))
    served(prefill, decode)
    pool = decode.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(USABLE - 1)
    params = prefilled(prefill)
    decode.add(DECODE_ID, params)
    begun = prefill.worker._reqs_to_send[PREFILL_ID]
    until_both(prefill, decode, lambda: prefill.worker._reqs_to_send[PREFILL_ID] > begun)
    other, lasts_seconds = (prefill, 0.4) if whose == "decode" else (decode, 1.2)
    over = time.monotonic() + lasts_seconds * lease_seconds
    until(lambda: other.step() and time.monotonic() > over)
    until_both(prefill, decode, lambda: True)
    assert PREFILL_ID not in prefill.sent and prefill.holds(prefill.blocks(PREFILL_ID))
    pool.free_blocks(taken)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(decode.blocks(DECODE_ID))
    rest(prefill, decode)


def test_what_nobody_can_read_does_not_end_prefill(pair: tuple[Node, Node]) -> None:
    """vLLM's worker would: it takes notifications apart as they come."""
    prefill, decode = pair
    served(prefill, decode)
    (agents,) = decode.worker._remote_agents.values()
    (to_prefill,) = agents.values()
    malformed = [b"", b"\xff", b"no number", b"cmpl-1:", b":1", b"cmpl-1:0", b"cmpl-1:x", b"HB:\xff", b"a:123456"]
    for notification in malformed:
        decode.agent.__wrapped__.send_notif(to_prefill, notif_msg=notification)
    prefill.step_until(lambda: prefill.agent.malformed == len(malformed))
    decode.agent.send_notif(to_prefill, notif_msg=b"cmpl-unknown:1")
    decode.agent.send_notif(to_prefill, notif_msg=b"HB:cmpl-unknown,")
    served(prefill, decode, 8)
    assert prefill.agent.malformed == len(malformed)


def test_no_heartbeat_is_larger_than_is_said(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait: vLLM's own worker names them all in one."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, kv_lease_duration=LEASE_SECONDS)
    served(prefill, decode)
    sent: list[bytes] = []
    monkeypatch.setattr(decode.agent.__wrapped__, "send_notif", lambda agent, notif_msg: sent.append(notif_msg))
    pool = decode.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(USABLE)
    for number in range(300):
        params = {**prefill.address(f"cmpl-{number:08}-0-aaaaaaaa"), "remote_block_ids": ([1, 2, 3],)}
        decode.add(f"cmpl-{number:08}-0-dddddddd", params, num_tokens=PROMPT)
    decode.step_until(lambda: b"".join(sent).count(b"aaaaaaaa") >= 300)
    beats = [one for one in sent if one.startswith(b"HB:")]
    assert len(beats) > 1 and max(map(len, beats)) <= MOST_BEAT_BYTES


def test_an_engine_that_nobody_holds_is_gone_without_a_collection(node: Callable[..., Node]) -> None:
    """In a cycle, its agent may be gone before the worker has released its handles, which aborts the process."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    served(prefill, decode)
    for worker in (prefill.worker, decode.worker):
        cyclic = [one for one in gc.get_referrers(worker) if type(one).__module__.startswith("kvcached_nixl")]
        assert cyclic == []


@pytest.mark.parametrize("when", ["it is posted", "it is read", "its word is read", "NIXL has let go of the peer"])
def test_a_connection_that_was_lost_is_made_anew(
    when: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines live; without another handshake every READ would fail from now on."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    served(prefill, decode)
    agent = decode.agent.__wrapped__
    met: list[bytes] = []
    add = agent.add_remote_agent
    monkeypatch.setattr(agent, "add_remote_agent", lambda metadata: met.append(metadata) or add(metadata))
    params = prefilled(prefill)
    with monkeypatch.context() as planted:

        def lost(*args: Any) -> Any:
            raise ConnectionError("planted")

        if when == "it is posted":
            planted.setattr(agent, "transfer", lost)
        elif when == "it is read":
            planted.setattr(agent, "check_xfer_state", lost)
        elif when == "its word is read":
            planted.setattr(decode.agent, "_look", lost)
        else:
            ((peer,),) = [list(map(peer_name, ranks.values())) for ranks in decode.worker._remote_agents.values()]
            agent.remove_remote_agent(peer)
        decode.add(DECODE_ID, params)
        decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "error" and decode.agent.leases_ended == 0
    prefill.lease_ends(PREFILL_ID)
    served(prefill, decode, 8)
    assert len(met) == 1
