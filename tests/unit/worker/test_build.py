# SPDX-License-Identifier: Apache-2.0
"""worker/facade.py: a worker's parts over its registered memory, and what its handshake says."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from support.engine_fakes import grown
from support.kvcached_memory import Geometry
from support.memory_transport import Network
from support.worker_fakes import DIGEST, TOKENS, WEIGHTS, Asking, manifest

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.wire.handshake import RankHandshake, read_rank
from kvcached_nixl.wire.planes import HeadShare
from kvcached_nixl.wire.step import OfferUpdate, Step, WakeAddress
from kvcached_nixl.worker.facade import Device, WorkerFacade, build_worker
from kvcached_nixl.worker.memory_registration import Registered
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET


class Agent:
    """The part of NIXL's agent that building a worker uses."""

    def __init__(self) -> None:
        self.registered: list[tuple[list[tuple[int, int, int, str]], str, list[str]]] = []

    def get_agent_metadata(self) -> bytes:
        return b"\x00nixl"

    def get_reg_descs(self, rows: list[Any], memory_type: str) -> Any:
        return rows, memory_type

    def register_memory(self, descriptors: Any, backends: list[str]) -> None:
        self.registered.append((*descriptors, backends))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


class Stock:
    """vLLM's worker, as ``adapter.nixl_worker.WorkerView`` shows it."""

    def __init__(self, **fields: Any) -> None:
        self.agent = Agent()
        self.backends = ["UCX"]
        self.memory_type = "DRAM"
        self.device_id = 3
        self.engine_id = "e"
        self.tp_size, self.tp_rank, self.pp_size, self.pp_rank = 2, 1, 1, 0
        self.kernel_blocks_per_block = 2
        self.kv_shares = 1
        self.answers_before_drafts = self.zeroes_blocks = False
        self.facts = (("vLLM", "0.28.0"), ("model", "m"))
        self.kept: list[Any] = []
        self.offered: tuple[str, RankHandshake] | None = None
        vars(self).update(fields)

    def share_of(self, num_heads: int) -> HeadShare:
        return HeadShare(self.tp_rank * num_heads)

    def keep_registered(self, descriptors: Any) -> None:
        self.kept.append(descriptors)

    def offer_handshake(self, compatibility: str, metadata: bytes) -> None:
        self.offered = compatibility, read_rank(metadata)


def registered(geometry: Geometry, **fields: Any) -> Registered:
    caches, _ = geometry.allocate()
    layout = geometry.layout(caches)
    return Registered(layout, geometry.layers_of_groups(), **fields)


@pytest.fixture(autouse=True)
def gates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was opened, in the order of `open_gate`'s arguments."""
    opened: list[tuple[Any, ...]] = []
    network = Network()

    def open_gate(*arguments: Any) -> Any:
        opened.append(arguments)
        return network.open_gate("e")

    monkeypatch.setattr("kvcached_nixl.worker.facade.open_gate", open_gate)
    return opened


def started(stock: Stock, geometry: Geometry, mode: TransferMode = TransferMode.PULL) -> tuple[WorkerFacade, Asking]:
    channel = Asking()
    side = build_worker(stock, registered(geometry), Settings(mode), channel, Clock())
    side.identify(WEIGHTS)
    side.close()
    return side, channel


@pytest.mark.parametrize(
    ("mode", "answers_before_drafts", "waits"),
    [(TransferMode.PULL, True, True), (TransferMode.PULL, False, False), (TransferMode.PUSH, True, False)],
)
def test_the_device_is_waited_for_where_an_answer_comes_too_early(
    mode: TransferMode, answers_before_drafts: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only decode's READs need it: before a WRITE, prefill waits for an event of the device by itself."""
    waited: list[str] = []
    monkeypatch.setattr(Device, "wait", lambda device: waited.append(device._device.type))
    side, _ = started(Stock(answers_before_drafts=answers_before_drafts), Geometry(num_pools=2), mode)
    update = OfferUpdate(
        PrefillRequestId("p-1"), "transfer:t", DIGEST, TOKENS, grown([7, 3, 9]), TOKENS, manifest(7, 3, 9)
    )
    side.begin_step(Step("10.0.0.1", 5600, WakeAddress("127.0.0.1", 5601, "key"), "0" * 16, [update], is_idle=False))
    assert not waited
    side.end_step()
    assert waited == (["cpu"] if waits else [])


@pytest.mark.parametrize("mode", TransferMode)
def test_there_is_a_gate_where_others_write(mode: TransferMode, gates: list[tuple[Any, ...]]) -> None:
    geometry = Geometry(num_pools=2)
    found = registered(geometry, extents=((4096, 8192),), device_id=3)
    build_worker(Stock(), found, Settings(mode), Asking(), Clock()).close()
    expected = (("UCX",), ((4096, 8192),), "DRAM", 3)
    assert gates == ([expected] if mode is TransferMode.PUSH else [])


def test_peers_are_told_where_this_rank_keeps_what() -> None:
    stock = Stock()
    side, channel = started(stock, Geometry(num_pools=2))
    assert stock.offered is not None
    tag, rank = stock.offered
    assert tag == "kvcached_nixl/16 pull [vLLM 0.28.0; model m; group 0: cells of 16 bytes]"
    assert (rank.engine_id, rank.tp_size, rank.tp_rank, rank.device_id) == ("e", 2, 1, 3)
    assert rank.agent_metadata == b"\x00nixl"
    (group,) = rank.groups
    assert group.kernel_blocks_per_block == 2
    (kind,) = group.planes
    assert (len(kind.bases), kind.num_heads, kind.first_head, kind.num_blocks) == (4, 4, 4, 5)
    assert channel.is_closed
    # The token table is registered and empty; a published token is at the address where peers read it.
    ((rows, memory_type, backends),) = stock.agent.registered
    ((address, length, device, _),) = rows
    assert (address, memory_type, backends, device) == (rank.token_table_address, "DRAM", ["UCX"], 0)
    assert length == (BUCKETS + BUFFERS) * TOKENS_PER_BUCKET * 8
    assert stock.kept == [(rows, "DRAM")]
    assert ctypes.string_at(address, length) == bytes(length)
    side.tokens.publish("p", BUCKETS + 5)
    place = address + 5 * TOKENS_PER_BUCKET * 8
    assert int.from_bytes(ctypes.string_at(place, 8), "little") == BUCKETS + 5


@pytest.mark.parametrize(
    ("changed", "geometry", "mode", "is_equal"),
    [
        ({"facts": (("vLLM", "0.28.0"), ("model", "n"))}, {}, TransferMode.PULL, False),
        ({}, {}, TransferMode.PUSH, False),
        ({}, {"head_size": 4}, TransferMode.PULL, False),
        ({}, {"dtype": torch.float32}, TransferMode.PULL, False),
        ({}, {"contiguous": True}, TransferMode.PULL, True),
        ({}, {"block_size": 8}, TransferMode.PULL, True),
        ({}, {"num_kv_heads": 2}, TransferMode.PULL, True),
        ({}, {"num_blocks": 3}, TransferMode.PULL, True),
    ],
    ids=["model", "direction", "head size", "type", "arrangement", "block size", "share of the heads", "blocks"],
)
def test_whatever_bytes_mean_is_in_the_tag_and_where_they_lie_is_not(
    changed: dict[str, Any], geometry: dict[str, Any], mode: TransferMode, is_equal: bool
) -> None:
    """Unequal tensor-parallel and block sizes are served."""
    plain, other = Stock(), Stock(**changed)
    started(plain, Geometry(num_pools=2))
    started(other, Geometry(num_pools=2, **geometry), mode)
    assert plain.offered is not None and other.offered is not None
    assert (plain.offered[0] == other.offered[0]) is is_equal


def test_another_device_is_asked_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded by the call, and may be queried later on any thread."""
    reached: list[bool] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"
            self.is_recorded = False

        def record(self) -> None:
            self.is_recorded = True

        def query(self) -> bool:
            return self.is_recorded and bool(reached)

    monkeypatch.setattr(torch, "Event", Event)
    is_reached = Device(torch.device("cuda")).record()
    assert not is_reached()
    reached.append(True)
    assert is_reached()
