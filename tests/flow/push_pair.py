# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode around the two halves of a push, over the in-memory transport, with a memory that tells tales.

Every byte of a request's KV is known from its prompt and its place, so wrong bytes are seen wherever they come from.
Blocks that are free get other bytes at once: a late read or write of them shows as well.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.transport.memory import MemoryTransport, Network
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Peer, Registration, decode, draw_attempt
from kvcached_nixl.worker.push_receive import PushReceiver
from kvcached_nixl.worker.push_send import PushSender

BLOCK_SIZE = 4
CELL_BYTES = 2
NUM_PLANES = 2
FREE_BYTE = 255
TIMEOUT_SECONDS = 60.0
REPEAT_SECONDS = 5.0
LEASE_SECONDS = 30.0


class Pool:
    """A rank's KV memory: ``memory[plane, block, token, cell]``, and which blocks are free."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = np.full((NUM_PLANES, num_blocks, BLOCK_SIZE, CELL_BYTES), FREE_BYTE, dtype=np.uint8)
        self.free = list(range(num_blocks))
        stride = self.memory.strides
        self.planes = Planes(
            bases=tuple(self.memory.ctypes.data + plane * stride[0] for plane in range(NUM_PLANES)),
            block_stride_bytes=stride[1],
            token_stride_bytes=stride[2],
            head_stride_bytes=CELL_BYTES,
            cell_bytes=CELL_BYTES,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_heads=1,
        )

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken

    def give(self, blocks: list[int]) -> None:
        self.memory[:, blocks] = FREE_BYTE
        # Used again as late as possible, so that a late WRITE is found in a free block, and as itself in a used one.
        self.free += blocks

    def free_are_untouched(self) -> bool:
        return bool((self.memory[:, self.free] == FREE_BYTE).all())

    def fill(self, prompt: int, blocks: list[int], tokens: range) -> None:
        for token in tokens:
            self.memory[:, blocks[token // BLOCK_SIZE], token % BLOCK_SIZE] = kv(prompt, token)

    def holds(self, prompt: int, blocks: list[int], first_token: int, end_token: int) -> bool:
        return all(
            np.array_equal(
                self.memory[:, blocks[(token - first_token) // BLOCK_SIZE], token % BLOCK_SIZE], kv(prompt, token)
            )
            for token in range(first_token, end_token)
        )


def kv(prompt: int, token: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Never FREE_BYTE."""
    numbers = np.arange(NUM_PLANES * CELL_BYTES, dtype=np.int64).reshape(NUM_PLANES, CELL_BYTES)
    return ((prompt * 101 + token * 7 + numbers * 13) % 251).astype(np.uint8)


def make_sender(transport: MemoryTransport, clock: ManualClock, pool: Pool) -> PushSender:
    return PushSender(
        transport, clock, pool.planes, tp_rank=0, tp_size=1,
        lease_seconds=LEASE_SECONDS, unmatched_seconds=TIMEOUT_SECONDS,
    )  # fmt: skip


def make_receiver(transport: MemoryTransport, clock: ManualClock) -> PushReceiver:
    return PushReceiver(transport, clock, registration_timeout_seconds=TIMEOUT_SECONDS, repeat_seconds=REPEAT_SECONDS)


@dataclass
class PrefillRequest:
    prompt: int
    num_tokens: int
    transfer: str
    blocks: list[int]
    computed: int = 0
    over: bool = False


class Prefill:
    """The engine around a :class:`PushSender`."""

    def __init__(self, network: Network, clock: ManualClock, num_blocks: int = 64) -> None:
        self.network, self.pool = network, Pool(num_blocks)
        self.transport: MemoryTransport = network.agent("prefill")
        self.sender = make_sender(self.transport, clock, self.pool)
        self.requests: dict[PrefillRequestId, PrefillRequest] = {}
        self.held: dict[int, list[int]] = {}
        self.holds = itertools.count()

    def start(self, name: str, prompt: int, num_tokens: int, transfer: str) -> PrefillRequestId:
        request_id = PrefillRequestId(name)
        blocks = self.pool.take(-(-num_tokens // BLOCK_SIZE))
        self.requests[request_id] = PrefillRequest(prompt, num_tokens, transfer, blocks)
        return request_id

    def compute(self, request_id: PrefillRequestId, tokens: int) -> None:
        """One step: the next tokens, and the end of the request after the last one."""
        request = self.requests[request_id]
        upto = min(request.computed + tokens, request.num_tokens)
        self.pool.fill(request.prompt, request.blocks, range(request.computed, upto))
        request.computed = upto
        self.sender.offer(request.transfer, request_id, (list(request.blocks),), upto)
        if upto == request.num_tokens:
            request.over = True
            self.sender.finish(request_id)

    def abort(self, request_id: PrefillRequestId) -> None:
        self.requests[request_id].over = True
        self.sender.stop(request_id, "aborted")

    def preempt(self, request_id: PrefillRequestId) -> None:
        """Its blocks are lost, and it will be computed again in others."""
        request = self.requests[request_id]
        hold = next(self.holds)
        self.held[hold] = request.blocks
        self.sender.restart(request_id, hold)
        request.blocks = self.pool.take(len(request.blocks))
        request.computed = 0

    def step(self, decoder_of: dict[str, Decode]) -> None:
        for peer, notification in self.transport.received():
            self.sender.handle(peer, decode(notification))
        for peer in self.sender.unknown_peers():
            if peer in self.network.agents and peer in decoder_of:
                self.transport.add_peer(peer.encode())
                self.sender.peer_known(peer, decoder_of[peer].pool.planes)
            else:
                self.sender.peer_lost(peer, "no answer to the handshake")
        self.sender.tick()
        for hold in self.sender.take_quiet():
            self.pool.give(self.held.pop(hold))
        for request_id in self.sender.take_done():
            request = self.requests.pop(request_id)
            assert request.over, "the blocks of a request that still computes were given back"
            self.pool.give(request.blocks)


@dataclass
class DecodeRequest:
    prompt: int
    first_token: int
    end_token: int
    blocks: list[int]


@dataclass
class Outcome:
    received: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Decode:
    """The engine around a :class:`PushReceiver`."""

    def __init__(self, network: Network, clock: ManualClock, num_blocks: int = 64) -> None:
        self.network, self.pool = network, Pool(num_blocks)
        self.transport: MemoryTransport = network.agent("decode")
        self.receiver = make_receiver(self.transport, clock)
        self.requests: dict[DecodeRequestId, DecodeRequest] = {}
        self.outcome = Outcome()

    def register(self, name: str, prompt: int, num_tokens: int, transfer: str, cached_tokens: int = 0) -> None:
        request_id = DecodeRequestId(name)
        blocks = self.pool.take(-(-(num_tokens - cached_tokens) // BLOCK_SIZE))
        self.requests[request_id] = DecodeRequest(prompt, cached_tokens, num_tokens, blocks)
        if "prefill" in self.network.agents:
            self.transport.add_peer(b"prefill")
        self.receiver.register(
            Registration(
                transfer=transfer,
                attempt=draw_attempt(),
                decode_request_id=request_id,
                decode=Peer(EngineId("d"), "127.0.0.1", 1, 1, 0),
                first_token=cached_tokens,
                end_token=num_tokens,
                block_size=BLOCK_SIZE,
                block_ids=(tuple(blocks),),
            ),
            [(0, "prefill")],
        )

    def abort(self, name: str) -> None:
        self.receiver.withdraw(DecodeRequestId(name), "aborted")

    def step(self) -> None:
        for peer, notification in self.transport.received():
            self.receiver.handle(peer, decode(notification))
        self.receiver.tick()
        for peer in self.receiver.silent_peers():
            # The probe of the side channel finds out whether a silent prefill is dead.
            if peer not in self.network.agents:
                self.receiver.peer_gone(peer)
        for ended in self.receiver.take_ended():
            request = self.requests.pop(ended.request_id)
            if ended.failed:
                assert ended.request_id not in self.outcome.failed
                self.outcome.failed[ended.request_id] = ended.failed
            else:
                assert ended.request_id not in self.outcome.received
                self.outcome.received.append(ended.request_id)
                whole = dataclasses.astuple(request)
                assert self.pool.holds(request.prompt, request.blocks, request.first_token, request.end_token), whole
            self.pool.give(request.blocks)


class Pair:
    """Both engines on one network and one clock. ``settle`` lets everything that can happen happen."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = Network()
        self.prefill, self.decode = Prefill(self.network, self.clock), Decode(self.network, self.clock)

    @property
    def alive(self) -> tuple[bool, bool]:
        return "prefill" in self.network.agents, "decode" in self.network.agents

    def step(self) -> None:
        """Each living engine once."""
        if self.alive[0]:
            self.prefill.step({"decode": self.decode})
        if self.alive[1]:
            self.decode.step()
        assert self.prefill.pool.free_are_untouched()
        assert self.decode.pool.free_are_untouched(), "a WRITE went into blocks that were free"

    def settle(self) -> None:
        for _ in range(8):
            self.network.deliver_all()
            self.step()

    def let_time_pass(self) -> None:
        """Longer than every timeout, in steps smaller than each, with everything delivered."""
        for _ in range(int(2 * (TIMEOUT_SECONDS + LEASE_SECONDS) / REPEAT_SECONDS)):
            self.settle()
            self.clock.advance(REPEAT_SECONDS)
        self.settle()

    def assert_nothing_is_left(self) -> None:
        """No table entry, no handle, no block: on every side that lives."""
        if self.alive[0]:
            assert len(self.prefill.sender) == 0
            assert self.prefill.transport.unreleased() == []
            assert len(self.prefill.pool.free) == self.prefill.pool.planes.num_blocks
        if self.alive[1]:
            assert len(self.decode.receiver) == 0
            assert len(self.decode.pool.free) == self.decode.pool.planes.num_blocks
