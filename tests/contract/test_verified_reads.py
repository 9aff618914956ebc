# SPDX-License-Identifier: Apache-2.0
"""READs of requests that prefill keeps, keeps no more, or never kept: two real agents, as vLLM's worker uses them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from test_transport import until

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.lease_word import place_of
from kvcached_nixl.worker import verified_reads
from kvcached_nixl.worker.lease_table import KeptRequests
from kvcached_nixl.worker.verified_reads import LEASE_ENDED, VerifiedReads

api = pytest.importorskip("nixl._api", reason="needs an environment: bash experiments/env.sh")

BLOCKS, BLOCK_BYTES = 16, 4096
REQUEST = PrefillRequestId("cmpl-1:a-0-5f2c")
RANKS = 1


class Rank:
    """A rank's agent and its blocks."""

    def __init__(self) -> None:
        agent = api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(backends=["UCX"], capture_telemetry=True))
        self.agent = VerifiedReads(agent, ["UCX"])
        self.kept = KeptRequests(self.agent.table)
        self.blocks = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        whole = agent.get_reg_descs([(self.blocks.ctypes.data, self.blocks.nbytes, 0, "")], "DRAM")
        self.registered = agent.register_memory(whole, backends=["UCX"])
        self.rows = [(self.blocks.ctypes.data + number * BLOCK_BYTES, BLOCK_BYTES, 0) for number in range(BLOCKS)]

    def meets(self, other: Rank) -> None:
        self.peer = self.agent.add_remote_agent(other.agent.get_agent_metadata())
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.agent.get_xfer_descs(self.rows, "DRAM"))
        self.remote = self.agent.prep_xfer_dlist(self.peer, self.agent.get_xfer_descs(other.rows, "DRAM"))

    def reads(self, request_id: str = REQUEST, block: int = 3) -> Any:
        notification = f"{request_id}:{RANKS}".encode()
        handle = self.agent.make_prepped_xfer("READ", self.local, [block], self.remote, [block], notif_msg=notification)
        self.agent.transfer(handle)
        return handle

    def end_of(self, handle: Any) -> str:
        def ended() -> str:
            state = str(self.agent.check_xfer_state(handle))
            return "" if state == "PROC" else state

        found: str = until(ended)
        return found

    def heard(self) -> list[bytes]:
        return [one for some in self.agent.get_new_notifs().values() for one in some]


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    prefill, decode = Rank(), Rank()
    prefill.blocks[:] = np.random.default_rng(3).integers(1, 256, prefill.blocks.shape, dtype=np.uint8)
    decode.meets(prefill)
    yield prefill, decode


def test_what_is_kept_is_read_and_prefill_is_told(ranks: tuple[Rank, Rank]) -> None:
    prefill, decode = ranks
    prefill.kept.add(REQUEST)
    handle = decode.reads()
    assert decode.end_of(handle) == "DONE"
    assert np.array_equal(decode.blocks[3], prefill.blocks[3]) and not decode.blocks[4].any()
    assert until(prefill.heard) == [f"{REQUEST}:{RANKS}".encode()]
    assert decode.agent.get_xfer_telemetry(handle) is not None
    decode.agent.release_xfer_handle(handle)
    assert decode.agent.leases_ended == 0


@pytest.mark.parametrize("when", ["never kept", "given back before", "given back meanwhile", "kept again as another"])
def test_what_is_not_kept_any_more_is_not_used(when: str, ranks: tuple[Rank, Rank]) -> None:
    """The bytes arrive; nothing says that they are another request's but the word that is not there."""
    prefill, decode = ranks
    if when != "never kept":
        prefill.kept.add(REQUEST)
    if when in ("given back before", "kept again as another"):
        prefill.kept.remove(REQUEST)
    if when == "kept again as another":
        prefill.kept.add(PrefillRequestId("cmpl-1:a-0-77aa"))
    handle = decode.reads()
    if when == "given back meanwhile":
        until(lambda: decode.agent.__wrapped__.check_xfer_state(handle.blocks) == "DONE")
        prefill.kept.discard(REQUEST)
    assert decode.end_of(handle) == LEASE_ENDED
    decode.agent.release_xfer_handle(handle)
    assert decode.agent.leases_ended == 1
    prefill.kept.add(PrefillRequestId("next"))
    assert decode.end_of(decode.reads("next")) == "DONE"
    assert until(prefill.heard) == [b"next:1"], "prefill hears of what was used, and of nothing else"


def test_a_word_of_the_same_bucket_is_not_anothers(ranks: tuple[Rank, Rank]) -> None:
    prefill, decode = ranks
    bucket, _ = place_of(REQUEST)
    number = next(one for one in range(1_000_000) if place_of(PrefillRequestId(f"r{one}"))[0] == bucket)
    prefill.kept.add(PrefillRequestId(f"r{number}"))
    assert decode.end_of(decode.reads()) == LEASE_ENDED
    assert decode.end_of(decode.reads(f"r{number}")) == "DONE"


def test_more_reads_than_words_can_be_looked_at_end_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verified_reads, "LANDINGS", 2)
    prefill, decode = Rank(), Rank()
    decode.meets(prefill)
    names = [f"r{number}" for number in range(20)]
    for name in names[::2]:
        prefill.kept.add(PrefillRequestId(name))
    handles = {name: decode.reads(name) for name in names}
    ends = {name: decode.end_of(handle) for name, handle in handles.items()}
    assert ends == {name: "DONE" if name in names[::2] else LEASE_ENDED for name in names}


def test_what_one_read_saw_is_not_anothers_word(ranks: tuple[Rank, Rank]) -> None:
    """The first saw the word before it was taken back, the second afterwards."""
    prefill, decode = ranks
    prefill.kept.add(REQUEST)
    early, late = decode.reads(), decode.reads()
    agent = decode.agent.__wrapped__
    until(lambda: agent.check_xfer_state(early.blocks) == "DONE")
    decode.agent._look(early)
    until(lambda: agent.check_xfer_state(early.word) == "DONE")
    prefill.kept.remove(REQUEST)
    assert (decode.end_of(late), decode.end_of(early)) == (LEASE_ENDED, "DONE")


def test_a_read_that_ends_with_an_error_leaves_room_for_others(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look fails: so has the transfer, and what it used is free again."""
    prefill, decode = ranks
    free = len(decode.agent._self_free)
    prefill.kept.add(REQUEST)
    handle = decode.reads()
    check = decode.agent.__wrapped__.check_xfer_state

    def lost(asked: Any) -> Any:
        if asked is handle.word:
            until(lambda: check(asked) == "DONE")
            raise ConnectionError("planted")
        return check(asked)

    monkeypatch.setattr(decode.agent.__wrapped__, "check_xfer_state", lost)
    with pytest.raises(ConnectionError):
        until(lambda: decode.agent.check_xfer_state(handle) != "PROC")
    decode.agent.release_xfer_handle(handle)
    assert len(decode.agent._self_free) == free
    assert prefill.heard() == []


def test_a_peer_without_words_is_not_read(ranks: tuple[Rank, Rank]) -> None:
    prefill, decode = ranks
    with pytest.raises(msgspec.DecodeError):
        decode.agent.add_remote_agent(prefill.agent.__wrapped__.get_agent_metadata())


def test_a_read_that_names_no_request_is_refused(ranks: tuple[Rank, Rank]) -> None:
    _, decode = ranks
    for notification in (b"", b"request", b":1"):
        with pytest.raises(ValueError, match="expected its request's id"):
            decode.agent.make_prepped_xfer("READ", decode.local, [0], decode.remote, [0], notif_msg=notification)


def test_everything_else_is_the_agents_own(ranks: tuple[Rank, Rank]) -> None:
    prefill, decode = ranks
    decode.blocks[5] = 7
    handle = decode.agent.make_prepped_xfer("WRITE", decode.local, [5], decode.remote, [5], notif_msg=b"written:1")
    decode.agent.transfer(handle)
    assert decode.end_of(handle) == "DONE"
    assert until(prefill.heard) == [b"written:1"]
    assert (prefill.blocks[5] == 7).all()
    decode.agent.release_xfer_handle(handle)


def test_a_peer_that_is_forgotten_can_be_met_again(ranks: tuple[Rank, Rank]) -> None:
    prefill, decode = ranks
    prefill.kept.add(REQUEST)
    decode.agent.release_dlist_handle(decode.remote)
    decode.agent.remove_remote_agent(decode.peer)
    decode.meets(prefill)
    assert decode.end_of(decode.reads()) == "DONE"
