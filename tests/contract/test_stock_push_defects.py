# SPDX-License-Identifier: Apache-2.0
"""Why vLLM's own push connector is refused: its defects, each shown on the installed vLLM.

Real: vLLM's ``NixlPushConnector``, its side channel, NIXL, and vLLM's scheduler over CPU memory. Missing: the model
(every step samples the same token) and HTTP. Each test asserts the defective behaviour itself, so it fails when a vLLM
fixes the defect; then reconsider the refusal. Files named in docstrings are those of
``vllm/distributed/kv_transfer/kv_connector/v1/nixl``.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import torch
from support import engine_node
from support.engine_node import BLOCKS, DECODE_ID, PREFILL_ID, USABLE, nodes, same
from support.transports import until
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(installed_has(LOADS_BEHIND), reason="shown with vLLM 0.26 to 0.28"),
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
