# SPDX-License-Identifier: Apache-2.0
"""Why vLLM's own push connector is refused: its defects, each shown on the installed vLLM.

Real: vLLM's ``NixlPushConnector``, its side channel, NIXL, and vLLM's scheduler over CPU memory. Missing: the model
(every step samples the same token) and HTTP. Each test asserts the defective behaviour itself, so it fails when a vLLM
fixes the defect; then reconsider the refusal. Files named in docstrings are those of
``vllm/distributed/kv_transfer/kv_connector/v1/nixl``.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import torch
from support import engine_node
from support.engine_node import BLOCKS, DECODE_ID, GEOMETRY, PREFILL_ID, PROMPT, USABLE, nodes, same
from support.transports import until
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.versions import installed_row

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(installed_row().shape.logical_views, reason="shown with vLLM 0.26 to 0.28"),
]

parallel_state, log = engine_node.parallel_state, engine_node.log


class Node(engine_node.Node):
    """An engine with vLLM's own push connector."""

    connector = "NixlPushConnector"

    @property
    def registrations(self) -> dict[str, Any]:
        """Prefill: decode's registrations that were not served, by decode's request."""
        found: dict[str, Any] = self.worker._pending_d_registrations
        return found

    @property
    def lease_ends(self) -> dict[str, float]:
        """Prefill: when the lease of each request ends."""
        found: dict[str, float] = self.worker._reqs_to_send
        return found

    @property
    def last_active(self) -> dict[str, float]:
        """When each remote engine was last active."""
        found: dict[str, float] = self.worker._engine_last_active
        return found

    def prefill(self, request_id: str, first_token: int = 0) -> list[int]:
        """Run a request to its end as prefill; returns its blocks, which are now kept for decode."""
        self.add(request_id, {"do_remote_decode": True}, 1, first_token)
        self.step()
        assert request_id in self.transfer_params
        return self.blocks(request_id)

    def stays_waiting(self, request_id: str, prefill: Node) -> bool:
        """It still waits when all that prefill had to say so far has been heard and stepped over."""
        prefill.settle()
        wrapper, marker = prefill.worker.nixl_wrapper, f"marker-{uuid.uuid4()}"
        agent = wrapper.add_remote_agent(self.worker.nixl_wrapper.get_agent_metadata())
        wrapper.send_notif(agent, notif_msg=f"{marker}:1".encode())
        self.step_until(lambda: f"Unrecognized request {marker}" in self.log.text)
        self.settle()
        self.step()
        return request_id not in self.received and self.waits(request_id)

    def step_until_it_shakes_hands(self) -> None:
        """On a thread of its own or, up to vLLM 0.26, on the writer's."""
        begun, handshake = threading.Event(), self.worker._nixl_handshake

        def noted(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            return handshake(*args, **kwargs)

        self.worker._nixl_handshake = noted
        self.step_until(begun.is_set)

    def settle(self) -> None:
        """Waits until the writer thread has handled all its inboxes once more, notifications included."""
        for _ in range(2):
            inbox = self.worker._evict_finished_inbox
            inbox.put("nobody")
            self.worker._push_writer_wake.set()
            until(inbox.empty)

    def end_lease(self, request_id: str) -> None:
        """As if the seconds of the lease had passed."""
        ends = {**self.lease_ends, request_id: time.perf_counter()}
        self.worker._reqs_to_send = dict(sorted(ends.items(), key=lambda item: item[1]))


@pytest.fixture
def node(tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., Node]]:
    """Makes a node of the given extra configuration, all its pages filled with the given byte."""
    with nodes(Node, tmp_path, log) as make:
        yield make


def pages(node: Node, block_ids: list[int], fill: int) -> None:
    """Overwrites the blocks with another request's tokens."""
    for cache in node.caches.values():
        for block_id in block_ids:
            cache[block_id].view(torch.uint8).fill_(fill)


def test_stock_push_delivers_when_nothing_goes_wrong(node: Callable[..., Node]) -> None:
    """The set-up of this file is no defect itself: blocks arrive, both sides are told, prefill's blocks come free."""
    prefill, decode = node(1), node(2)
    blocks = prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    assert decode.waits(DECODE_ID)
    local = decode.blocks(DECODE_ID)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert same(decode.content(local), prefill.content(blocks))
    decode.step()
    assert decode.scheduler.requests[DECODE_ID].status == RequestStatus.RUNNING
    assert prefill.free_blocks == USABLE


def test_stock_push_sends_another_requests_tokens_after_the_lease(node: Callable[..., Node]) -> None:
    """push_worker ``_do_start_push_kv``: a lease that ends during the handshake calls no WRITE off (vllm#55470)."""
    # The blocks are free and hold another request's tokens when they are sent; decode takes them for its own.
    prefill, decode = node(1), node(2, listening=False)
    blocks = prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    local = decode.blocks(DECODE_ID)
    prefill.step_until_it_shakes_hands()
    prefill.end_lease(PREFILL_ID)
    prefill.step()
    assert PREFILL_ID in prefill.sent and prefill.free_blocks == USABLE
    pages(prefill, blocks, fill=3)

    decode.listen()
    decode.step_until(lambda: prefill.worker.get_finished() and DECODE_ID in decode.received)
    assert "Releasing expired KV blocks" in prefill.log.text
    assert all(bool((page.view(torch.uint8) == 3).all()) for page in decode.content(local))
    decode.step()
    assert decode.scheduler.requests[DECODE_ID].status == RequestStatus.RUNNING


def test_stock_push_reports_a_request_sent_twice_and_kills_the_prefill_engine(node: Callable[..., Node]) -> None:
    """push_worker ``get_finished``: at the lease's end and at the WRITE's; the scheduler asserts (vllm#58188)."""
    prefill, decode = node(1), node(2, listening=False)
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    prefill.step_until_it_shakes_hands()
    prefill.end_lease(PREFILL_ID)
    prefill.step()
    assert PREFILL_ID in prefill.sent and PREFILL_ID not in prefill.scheduler.requests
    decode.listen()
    with pytest.raises(AssertionError) as raised:
        prefill.step_until(lambda: False)
    assert raised.traceback[-1].name == "_update_from_kv_xfer_finished"


def test_stock_push_mixes_up_requests_of_one_client_id(node: Callable[..., Node]) -> None:
    """push_worker ``_pop_matching_finished_blocks``: ids match without their random digits, the first is served."""
    # A client's or proxy's X-Request-Id used for two requests at once gives one the other's tokens.
    prefill, decode = node(1), node(2)
    theirs, own = prefill.prefill(PREFILL_ID), prefill.prefill("cmpl-x-0-bbbbbbbb", first_token=200)
    pages(prefill, own, fill=3)
    assert not set(theirs) & set(own)
    decode.add(DECODE_ID, prefill.transfer_params["cmpl-x-0-bbbbbbbb"], first_token=200)
    decode.step()
    local = decode.blocks(DECODE_ID)
    decode.step_until(lambda: prefill.step() and DECODE_ID in decode.received)
    assert same(decode.content(local), prefill.content(theirs)) and not same(
        decode.content(local), prefill.content(own)
    )


def test_stock_push_watchdog_does_not_fail_the_request(node: Callable[..., Node]) -> None:
    """push_scheduler ``build_connector_meta``: a registration that timed out is logged and forgotten (vllm#46283)."""
    prefill, decode = node(1), node(2, push_registration_timeout=0.01)
    decode.add(DECODE_ID, prefill.address("cmpl-x-0"))
    decode.step()
    decode.step_until(lambda: not decode.connector_scheduler._push_registration_deadlines)
    assert "timed out" in prefill.log.text
    assert decode.stays_waiting(DECODE_ID, prefill)
    decode.abort(DECODE_ID)
    decode.step()
    decode.step()
    assert DECODE_ID in decode.scheduler.requests
    assert decode.free_blocks == USABLE - BLOCKS


def test_stock_push_failed_write_kills_the_prefill_worker(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """base_worker ``_handle_failed_transfer``: a WRITE is queued as a failed receive; the next step asserts."""
    # Before that the request is reported as sent; decode is told nothing.
    prefill, decode = node(1), node(2)
    monkeypatch.setattr(prefill.worker.nixl_wrapper, "transfer", lambda handle: "PROC")
    monkeypatch.setattr(prefill.worker.nixl_wrapper, "check_xfer_state", lambda handle: "ERR")
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    with pytest.raises(AssertionError, match="not found in recving_metadata list"):
        prefill.step()
    assert decode.stays_waiting(DECODE_ID, prefill)


def held_until_the_lease_ends(prefill: Node) -> bool:
    """Nothing but the end of its lease gives prefill the request's blocks back."""
    for _ in range(2):
        prefill.settle()
        prefill.step()
    held = PREFILL_ID not in prefill.sent and prefill.free_blocks == USABLE - BLOCKS
    prefill.end_lease(PREFILL_ID)
    prefill.step()
    return held and PREFILL_ID in prefill.sent and "Releasing expired KV blocks" in prefill.log.text


def test_stock_push_write_that_cannot_be_posted_hangs_the_request(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """push_worker ``_xfer_blocks``: the failure is logged on prefill and decode is told nothing (vllm#50754)."""
    prefill, decode = node(1), node(2)

    def fail(handle: Any) -> str:
        raise RuntimeError("no route")

    monkeypatch.setattr(prefill.worker.nixl_wrapper, "transfer", fail)
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    prefill.step_until(lambda: "Push WRITE submission failed" in prefill.log.text)
    assert held_until_the_lease_ends(prefill)
    assert decode.stays_waiting(DECODE_ID, prefill)


def test_stock_push_handshake_that_fails_on_prefill_hangs_the_request(node: Callable[..., Node]) -> None:
    """push_worker ``_do_start_push_kv``: prefill cannot reach decode at the address it gave, logs it, and waits."""
    prefill, decode = node(1), node(2)
    decode.connector_scheduler.side_channel_port = prefill.engine.port
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    prefill.step_until(lambda: re.search("push_handshake_failed|Failed handshake to D", prefill.log.text))
    assert held_until_the_lease_ends(prefill)
    assert decode.stays_waiting(DECODE_ID, prefill)


def test_stock_push_registration_that_cannot_be_sent_hangs_the_request(node: Callable[..., Node]) -> None:
    """push_worker ``_do_send_reg_notif``: NIXL refuses to send, on decode itself, and the request is not failed."""
    prefill, decode = node(1), node(2)
    decode.add("cmpl-y-0-dddddddd", prefill.address("cmpl-y-0"))
    decode.step()
    until(lambda: prefill.settle() or prefill.registrations)
    for agent in decode.worker._remote_agents[prefill.engine.engine_id].values():
        decode.worker.nixl_wrapper.remove_remote_agent(agent)
    decode.add(DECODE_ID, prefill.address("cmpl-x-0"))
    decode.step()
    until(lambda: "push_reg_notif_failed" in prefill.log.text)
    assert decode.stays_waiting(DECODE_ID, prefill)
    decode.worker._remote_agents.clear()


def said_to_prefill(decode: Node, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The notifications that decode sends from now on."""
    said: list[bytes] = []
    real = decode.worker.nixl_wrapper.send_notif

    def send(agent: str, notif_msg: bytes, **options: Any) -> Any:
        said.append(notif_msg)
        return real(agent, notif_msg=notif_msg, **options)

    monkeypatch.setattr(decode.worker.nixl_wrapper, "send_notif", send)
    return said


def test_stock_push_request_aborted_in_decodes_queue_is_not_told_to_prefill(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """push_scheduler ``request_finished``: the empty receive it queues "so the worker emits a notif" emits none."""
    prefill, decode = node(1), node(2)
    said = said_to_prefill(decode, monkeypatch)
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.abort(DECODE_ID)
    metadata = decode.step()
    assert DECODE_ID in metadata.reqs_to_recv and not metadata.push_registrations
    decode.settle()
    decode.step()
    assert said == []
    assert DECODE_ID not in decode.scheduler.requests and DECODE_ID in decode.worker._recving_metadata
    assert held_until_the_lease_ends(prefill)


def test_stock_push_request_that_needs_no_remote_blocks_is_not_told_to_prefill(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """push_scheduler ``update_state_after_alloc``: nothing to receive is nothing to say, then and at the end."""
    # The code means a full hit of decode's prefix cache, which vLLM's own cache never gives for attention layers. Here
    # it is a prompt given as embeddings, whose tokens are counted as none: decode computes it all itself.
    prefill, decode = node(1), node(2)
    said = said_to_prefill(decode, monkeypatch)
    prefill.prefill(PREFILL_ID)
    embeddings = torch.zeros(PROMPT, 256)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID], embeddings=embeddings, max_tokens=1)
    decode.step()
    assert DECODE_ID not in decode.scheduler.requests
    decode.step()
    decode.settle()
    assert [one for one in said if one.startswith(PUSH_REG_NOTIF_PREFIX)] == []
    assert DECODE_ID in decode.worker._recving_metadata
    assert held_until_the_lease_ends(prefill)


def test_stock_push_aborted_prefill_is_not_told_to_decode(node: Callable[..., Node]) -> None:
    """push_scheduler ``request_finished``: prefill drops its request; decode's waits for ever, registered."""
    # Registrations are keyed by decode's id and evicted by prefill's.
    prefill, decode = node(1), node(2)
    decode.add(DECODE_ID, prefill.address("cmpl-x-0"))
    decode.step()
    until(lambda: prefill.settle() or DECODE_ID in prefill.registrations)
    prefill.add(PREFILL_ID, {"do_remote_decode": True})
    prefill.step()
    prefill.abort(PREFILL_ID)
    assert PREFILL_ID in prefill.step().reqs_not_processed
    prefill.settle()
    assert list(prefill.registrations) == [DECODE_ID]
    assert decode.stays_waiting(DECODE_ID, prefill)


def test_stock_push_stale_registration_takes_a_retrys_blocks(node: Callable[..., Node]) -> None:
    """push_worker ``_pop_matching_registration``: one of a request given up matches the next try of its client id."""
    prefill, decode = node(1), node(2)
    decode.add(DECODE_ID, prefill.address("cmpl-x-0"))
    decode.step()
    until(lambda: prefill.settle() or prefill.registrations)
    decode.abort(DECODE_ID)

    decode.add("cmpl-x-0-eeeeeeee", prefill.address("cmpl-x-0"))
    decode.step()
    until(lambda: prefill.settle() or len(prefill.registrations) == 2)
    prefill.prefill(PREFILL_ID)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.stays_waiting("cmpl-x-0-eeeeeeee", prefill)
    assert list(prefill.registrations) == ["cmpl-x-0-eeeeeeee"]


def test_stock_push_late_registration_is_never_removed(node: Callable[..., Node]) -> None:
    """push_worker ``_handle_push_reg_notif``: one that comes after the lease is kept, and never answered."""
    prefill, decode = node(1), node(2)
    prefill.prefill(PREFILL_ID)
    assert held_until_the_lease_ends(prefill)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    until(lambda: prefill.settle() or prefill.registrations)
    prefill.step()
    prefill.settle()
    assert list(prefill.registrations) == [DECODE_ID]
    assert decode.stays_waiting(DECODE_ID, prefill)


def test_stock_push_registration_that_cannot_be_served_loses_its_neighbours(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """push_worker ``_push_writer_loop``: an exception drops the rest of the notifications that came with it."""
    # It is a registration without decode's engine here; the well-formed one next to it is lost.
    prefill, decode = node(1), node(2)
    prefill.prefill("cmpl-y-0-aaaaaaaa")
    prefill.prefill(PREFILL_ID)
    prefill.step()
    prefill.settle()
    real, held = prefill.worker.nixl_wrapper.get_new_notifs, dict[str, list[bytes]]()

    def both_at_once() -> dict[str, list[bytes]]:
        for agent, notifs in real().items():
            held.setdefault(agent, []).extend(notifs)
        if sum(map(len, held.values())) < 2:
            return {}
        together = dict(held)
        held.clear()
        return together

    monkeypatch.setattr(prefill.worker.nixl_wrapper, "get_new_notifs", both_at_once)
    agent = decode.worker.nixl_wrapper.add_remote_agent(prefill.worker.nixl_wrapper.get_agent_metadata())
    malformed = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({"request_id": "cmpl-y-0-dddddddd"})
    decode.worker.nixl_wrapper.send_notif(agent, notif_msg=malformed)
    prefill.step_until(lambda: held)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    prefill.step_until(lambda: "nixl-push-writer error; continuing" in prefill.log.text)
    prefill.settle()
    assert prefill.registrations == {}
    assert list(prefill.worker._push_finished_blocks) == [PREFILL_ID]
    assert not {PREFILL_ID, "cmpl-y-0-aaaaaaaa"} & prefill.sent
    assert decode.stays_waiting(DECODE_ID, prefill)


@pytest.mark.parametrize(("notification", "error"), [(b"PUSH_REG", ValueError), (b"\xff:1", UnicodeDecodeError)])
def test_stock_push_notification_it_does_not_know_kills_the_worker(
    node: Callable[..., Node], notification: bytes, error: type[Exception]
) -> None:
    """push_worker ``_get_new_notifs``: all but registrations is parsed as completions, on the engine's thread."""
    prefill, decode = node(1), node(2)
    agent = decode.worker.nixl_wrapper.add_remote_agent(prefill.worker.nixl_wrapper.get_agent_metadata())
    decode.worker.nixl_wrapper.send_notif(agent, notif_msg=notification)
    with pytest.raises(error) as raised:
        prefill.step_until(lambda: False)
    assert "_get_new_notifs" in [entry.name for entry in raised.traceback]


def test_stock_push_request_without_prefills_id_kills_the_decode_engine(node: Callable[..., Node]) -> None:
    """metadata ``add_new_req_to_recv``: remote_request_id is needed, which a proxy cannot know before prefill began."""
    prefill, decode = node(1), node(2)
    params = prefill.address("cmpl-x-0")
    del params["remote_request_id"]
    decode.add(DECODE_ID, params)
    with pytest.raises(KeyError, match="remote_request_id"):
        decode.step()


def test_stock_push_heartbeat_with_the_clients_id_does_not_renew_the_lease(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """base_worker ``_handle_heartbeat``: only prefill's internal id counts, unlike in registrations (vllm#53095)."""
    prefill, decode = node(1), node(2, kv_lease_duration=1)
    prefill.prefill(PREFILL_ID)
    prefill.step()
    heard: list[str] = []
    real = prefill.worker._handle_heartbeat

    def hear(payload: str) -> None:
        real(payload)
        heard.append(payload)

    monkeypatch.setattr(prefill.worker, "_handle_heartbeat", hear)
    # Decode is full, so the request waits in its queue: what heartbeats are for.
    for name in ("one", "four", "three"):
        decode.add(f"cmpl-{name}-0-dddddddd", None, first_token=len(name) * 7, max_tokens=200)
    decode.step()
    prefill.end_lease(PREFILL_ID)
    prefill.lease_ends[PREFILL_ID] += 5.0
    ends = prefill.lease_ends[PREFILL_ID]

    decode.add(DECODE_ID, prefill.address("cmpl-x-0"))
    until(lambda: decode.step() and prefill.step() and heard)
    assert set(heard) == {"cmpl-x-0"}
    assert prefill.lease_ends[PREFILL_ID] == ends

    decode.abort(DECODE_ID)
    decode.add("cmpl-x-0-eeeeeeee", prefill.address(PREFILL_ID))
    until(lambda: decode.step() and prefill.step() and PREFILL_ID in heard)
    assert prefill.lease_ends[PREFILL_ID] > ends


def test_stock_push_leftover_registration_overwrites_another_requests_blocks(node: Callable[..., Node]) -> None:
    """push_worker ``_handle_push_reg_notif``: of one registration per decode rank, all but the first are left over."""
    # The next prefill of that client id is written to the blocks it names, which have another owner by then.
    prefill, decode = node(1), node(2)
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID], max_tokens=1)
    registration = decode.step().push_registrations[DECODE_ID]
    local = decode.blocks(DECODE_ID)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    # What the second of two decode ranks sends, with one prefill rank.
    decode.worker._reg_send_inbox.put((DECODE_ID, registration))
    decode.step_until(lambda: DECODE_ID not in decode.scheduler.requests)
    until(lambda: prefill.settle() or list(prefill.registrations) == [DECODE_ID])
    assert decode.free_blocks == USABLE

    pages(decode, local, fill=3)
    blocks = prefill.prefill("cmpl-x-0-bbbbbbbb", first_token=200)
    prefill.step_until(lambda: "cmpl-x-0-bbbbbbbb" in prefill.sent)
    assert same(decode.content(local), prefill.content(blocks))


def test_stock_push_hands_nothing_over_before_the_request_finished(node: Callable[..., Node]) -> None:
    """push_scheduler ``request_finished``: the only place that offers blocks, so no WRITE overlaps with the prefill."""
    prefill = node(1, tokens_a_step=GEOMETRY.block_size)
    prefill.add(PREFILL_ID, {"do_remote_decode": True}, max_tokens=1)
    for computed in range(1, BLOCKS + 1):
        assert prefill.step().push_finished_blocks == {}
        assert prefill.scheduler.requests[PREFILL_ID].num_computed_tokens == computed * GEOMETRY.block_size
    assert PREFILL_ID in prefill.transfer_params
    assert list(prefill.step().push_finished_blocks) == [PREFILL_ID]


def test_stock_push_completion_after_the_engines_hour_kills_the_decode_worker(node: Callable[..., Node]) -> None:
    """base_worker ``_evict_stale_engines``: decode's use of prefill is no activity, so engine_ttl forgets it."""
    # A heartbeat then starts the handshake again; a request that completes meanwhile is a KeyError in get_finished.
    prefill, decode = node(1), node(2)
    prefill.prefill(PREFILL_ID)
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    remote = prefill.engine.engine_id
    until(lambda: remote in decode.last_active)
    decode.last_active[remote] -= decode.worker._engine_ttl - 60.0
    marked = decode.last_active[remote]
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    until(lambda: decode.settle() or not decode.worker._pending_completion_notifs.empty())
    assert decode.last_active[remote] == marked

    decode.last_active[remote] -= 60.0
    decode.connector_scheduler._last_heartbeat_time = 0.0
    going_on = threading.Event()
    decode.worker._handshake_initiation_executor.submit(going_on.wait)
    try:
        with pytest.raises(KeyError, match=remote):
            decode.step()
    finally:
        going_on.set()
