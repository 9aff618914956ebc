# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between engines that divide the KV differently: tensor-parallel sizes, block sizes, memory arrangements.

Every rank is as in a server: a NIXL agent, registered memory with kvcached's layout, and the worker's half of this
package. The test plays the engines' threads and, except in one case, runs the turns of the transfer threads. A rank's
memory is one extent of random bytes that is compared as a whole: each requested token of each head must be there, as
attention sees it, and nothing else may have changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.digest_fakes import digests_over
from support.engine_fakes import grown
from support.internals import context_of, receiver_of, registry_of
from support.kvcached_memory import Geometry

from experiments.common.memory_transport import Network
from kvcached_nixl.deadlines import MonotonicClock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.transport.agent import NixlTransport, register_host_memory
from kvcached_nixl.transport.base import Handle, Operation, Ranges, Transport
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.handshake import Answer, Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.kv_groups import KVGroup, KVGroups
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, HeadShare
from kvcached_nixl.wire.step import FetchSpec, Finish, OfferUpdate, Step, WakeAddress, failure_of, finished_attempts_of
from kvcached_nixl.worker import build
from kvcached_nixl.worker.facade import Device
from kvcached_nixl.worker.geometry.planes import planes_of
from kvcached_nixl.worker.transfer import transfer_queue as transfer_queue
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET, TokenArray
from kvcached_nixl.worker.transfer.peer_link import Host
from kvcached_nixl.worker.transfer.topology import LocalRank
from kvcached_nixl.worker.transfer_thread import POLL_SECONDS

pytestmark = pytest.mark.long

WAIT_SECONDS = 20.0
NEVER_SECONDS = 3600.0
FURTHER_TURNS = 10
"""After everything was reported: whatever comes too late or too often shows in these."""
ARENA_BYTES = 1 << 18
GAP_BYTES = 256
LAYERS = 2
HEAD_SIZE = 4
NUM_BLOCKS = 36
HOST, PORTS = "127.0.0.1", (5600, 5700)
START, DIGEST, ATTEMPT = "0" * 16, "d" * 32, 17
TAG = "one and the same"
WEIGHTS = Weights(Tensors("1" * 32, "2" * 32))
REQUEST, WANTED = PrefillRequestId("p1"), DecodeRequestId("d1")
MOST_RANKS = 6
DIRECTIONS = ["pull", "push"]


# ---------------------------------------------------------------------------------------------------------- the engines


@dataclass(frozen=True)
class Shape:
    """How an engine cuts the KV. ``block_size``: tokens in a kernel block, of which ``ratio`` make a logical one."""

    tp_size: int = 1
    block_size: int = 4
    era: str = "kv_apart"
    contiguous: bool = False
    head_major: bool = False
    ratio: int = 1

    def __str__(self) -> str:
        kind = f"{self.era}{' contiguous' * self.contiguous}{' head-major' * self.head_major}"
        return f"{kind} {self.ratio}x{self.block_size}"

    @property
    def logical_block_size(self) -> int:
        return self.block_size * self.ratio

    def heads(self, total: int, tp_rank: int) -> range:
        """The heads of a rank, as vLLM shares them out: several ranks have the same one where there are too few."""
        if self.era == "mla":
            return range(1)
        first = tp_rank * total // self.tp_size
        return range(first, first + max(1, total // self.tp_size))

    def share(self, total: int, tp_rank: int) -> HeadShare:
        copies = max(1, self.tp_size // (1 if self.era == "mla" else total))
        return HeadShare(self.heads(total, tp_rank).start, copies, tp_rank % copies)


@dataclass(frozen=True)
class Case:
    """One request. ``chunks``: tokens computed at the end of each step but the last; all in one step without.

    ``beside_states``: decode asks every rank of prefill for something, as where each of them has a share of a state.
    """

    prefill: Shape
    decode: Shape
    heads: int = 8
    tokens: int = 29
    cached_tokens: int = 0
    chunks: tuple[int, ...] = ()
    prefill_blocks: tuple[int, ...] = ()
    decode_blocks: tuple[int, ...] = ()
    direction: str = "push"
    beside_states: bool = False
    is_verified: bool = False

    @property
    def step(self) -> int:
        """The largest run of tokens that is inside one block on both sides."""
        return math.gcd(self.prefill.block_size, self.decode.block_size)

    def boundary(self, ready_tokens: int) -> int:
        """How many tokens have been written when so many are computed."""
        if ready_tokens >= self.tokens:
            return self.tokens
        return ready_tokens - ready_tokens % max(self.prefill.block_size, self.decode.block_size)

    def writes_upto(self, ready_tokens: int) -> int:
        """WRITEs between two ranks when so many tokens are computed, each step's having been seen."""
        ends = [self.boundary(ready) for ready in (*self.chunks, self.tokens) if ready <= ready_tokens]
        return len({end for end in ends if end > self.cached_tokens})

    def meets(self, prefill_rank: int, decode_rank: int) -> bool:
        """Whether the two ranks' shares of the model meet."""
        ours, theirs = self.prefill.tp_size, self.decode.tp_size
        return prefill_rank * theirs < (decode_rank + 1) * ours and decode_rank * ours < (prefill_rank + 1) * theirs

    def moves_to(self, prefill_rank: int, decode_rank: int) -> bool:
        """Whether a rank has bytes for another one: the first of those that have copies of what it needs."""
        part = max(1, self.prefill.tp_size // self.decode.tp_size)
        copies = min(part, self.prefill.share(self.heads, prefill_rank).copies)
        return self.meets(prefill_rank, decode_rank) and prefill_rank % copies == 0

    def asks(self, decode_rank: int, prefill_rank: int) -> bool:
        """Whether a rank of decode asks a rank of prefill for KV, and does not only tell it to let go."""
        return (self.meets if self.beside_states else self.moves_to)(prefill_rank, decode_rank)


def kv(num_planes: int, tokens: int, heads: int, cell_bytes: int, *, computed: bool) -> torch.Tensor:
    """The bytes of each plane, token and head; those that were not ``computed`` are others, and known as well."""
    cells = torch.empty(num_planes, tokens, heads, cell_bytes, dtype=torch.uint8)
    cells[:] = torch.arange(cell_bytes)
    cells[..., 0] = torch.arange(num_planes)[:, None, None]
    cells[..., 1] = torch.arange(tokens)[None, :, None]
    cells[..., 2] = torch.arange(heads)[None, None, :]
    cells[..., 3] = 1 if computed else 2
    return cells


@dataclass
class Endpoint:
    """An agent, with its registered extent and ownership tokens. ``agent``: NIXL's own; None in memory."""

    transport: Transport
    arena: torch.Tensor
    token_table: TokenArray
    agent: Any = None


class Recorded:
    """A transport with its traffic noted."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.moves: list[tuple[str, Ranges, Ranges]] = []
        self.words_read = 0
        self.arrived = 0
        self.unreleased = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(
        self,
        operation: Operation,
        peer: str,
        local: Ranges,
        remote: Ranges,
        notification: bytes = b"",
        *,
        is_host: bool = False,
    ) -> Handle:
        if is_host:
            self.words_read += 1
        else:
            self.moves.append((peer, local, remote))
        handle = self._transport.post(operation, peer, local, remote, notification, is_host=is_host)
        self.unreleased += 1
        return handle

    def release(self, handle: Handle) -> None:
        self._transport.release(handle)
        self.unreleased -= 1

    def received(self) -> list[tuple[str, bytes]]:
        found = self._transport.received()
        self.arrived += len(found)
        return found


class Channel:
    """The side channels of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        assert host == HOST
        found: Future[tuple[str, bytes]] = Future()
        rank = self._cluster.engine_at(port)[tp_rank]
        found.set_result((TAG, msgspec.msgpack.encode(Answer(START, msgspec.msgpack.encode(rank.handshake)))))
        return found

    def wake(self, host: str, port: int, key: str) -> None:
        """Nobody sleeps here."""

    def close(self) -> None:
        """Nothing is open."""


class Rank:
    """A worker of an engine, its memory, and what it has reported."""

    def __init__(self, cluster: Cluster, engine_id: str, shape: Shape, tp_rank: int, endpoint: Endpoint) -> None:
        self.shape, self.tp_rank, self.endpoint = shape, tp_rank, endpoint
        self.heads = shape.heads(cluster.case.heads, tp_rank)
        self.share = shape.share(cluster.case.heads, tp_rank)
        self.geometry = Geometry(
            era=shape.era,
            contiguous=shape.contiguous,
            num_pools=LAYERS,
            num_kv_heads=len(self.heads),
            # A latent is wider than a head.
            head_size=3 * HEAD_SIZE if shape.era == "mla" else HEAD_SIZE,
            block_size=shape.block_size,
            num_blocks=NUM_BLOCKS,
            reserved_blocks=NUM_BLOCKS + 3,
            head_major=shape.head_major,
        )
        self.transport = Recorded(endpoint.transport)
        self.metadata = endpoint.transport.metadata()
        self._places = self._lay_out()
        self.arena = endpoint.arena
        self.arena.copy_(torch.randint(0, 256, self.arena.shape, dtype=torch.uint8, generator=cluster.random))
        (self.planes,) = planes_of(self._caches(self.arena), self.geometry.axes(), lambda _: self.share)
        self.token_table = endpoint.token_table
        self.token_table[:] = 0
        kv_shares = 1 if shape.era == "mla" else cluster.case.heads
        kv_shares = MAX_TP_SIZE if cluster.case.beside_states else kv_shares
        groups = (GroupMemory((self.planes,), shape.ratio),)
        place = LocalRank(EngineId(engine_id), shape.tp_size, tp_rank, groups, kv_shares)
        self.handshake = RankHandshake(
            engine_id=place.engine_id,
            tp_size=place.tp_size,
            tp_rank=tp_rank,
            agent_metadata=self.metadata,
            device_id=0,
            groups=groups,
            token_table_address=self.token_table.ctypes.data,
            memory_type="DRAM",
            is_staged=False,
            weights=WEIGHTS,
            process=Process(),
        )
        settings = Settings(TransferMode(cluster.case.direction), NEVER_SECONDS, NEVER_SECONDS)
        checksums = digests_over(self.planes, self.arena.view(-1), float(cluster.case.is_verified))
        self.worker = build.assemble(
            build.Rank(self.transport, place, self.token_table, TAG, checksums, Host(Process(), "DRAM")),
            settings,
            cluster.clock,
            Channel(cluster),
            Device(torch.device("cpu")),
            lambda weights: None,
            threading.Event(),
        )
        self.worker.identify(WEIGHTS)
        self.thread = self.worker.thread
        self.done: list[str] = []
        self.over: list[int] = []
        self.failed: list[FailureCause] = []
        self.blocks: list[int] = []
        self.first_token = 0
        self.expected = self.arena.clone()

    @property
    def context(self) -> Any:
        return context_of(self.thread)

    @property
    def registry(self) -> Any:
        return registry_of(self.thread)

    @property
    def receiver(self) -> Any:
        return receiver_of(self.thread)

    def begin(self, **news: Any) -> None:
        port = PORTS[self.context.local.engine_id.startswith("d-")]
        self.worker.begin_step(Step(HOST, port, WakeAddress(HOST, port, "key"), START, **news))
        self.worker.end_step()

    def look(self) -> bool:
        """Take what was reported; whether the end of decode's attempt is part of it."""
        ended = self.worker.take_ended()
        for mark in self.worker.take_marks():
            attempt, cause = failure_of(mark) or (None, FailureCause.DEFECT)
            assert attempt == ATTEMPT
            self.failed.append(cause)
        self.done += ended.sent
        over = finished_attempts_of(ended.received)
        self.over += over
        return bool(over)

    def place(self, token: int) -> tuple[int, int]:
        """The kernel block of a token, and where in it."""
        block, within = divmod(token - self.first_token, self.shape.logical_block_size)
        part, within = divmod(within, self.shape.block_size)
        return self.blocks[block] * self.shape.ratio + part, within

    def cells(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """Per plane, as attention sees it: bytes by block, token and head. Views into ``arena``."""
        planes: list[torch.Tensor] = []
        for cache in self._caches(arena).values():
            if self.shape.era == "kv_apart":
                planes += [cache[:, 0], cache[:, 1]]
            elif self.shape.era == "packed":
                planes.append(cache.transpose(1, 2))
            else:
                planes.append(cache.unsqueeze(2))
        return [plane.view(torch.uint8) for plane in planes]

    def fill(self, arena: torch.Tensor, table: torch.Tensor, tokens: range, copy: int = 0) -> None:
        """Put this rank's heads of ``tokens`` where they belong in ``arena``, as the rank with that copy has them."""
        table = table.clone()
        table[..., 3] += copy << 4
        for plane, cells in enumerate(self.cells(arena)):
            for token in tokens:
                cells[self.place(token)] = table[plane, token, self.heads.start : self.heads.stop]

    def _lay_out(self) -> list[tuple[str, torch.Tensor, int]]:
        """Layer, a tensor of its shape and strides, and at which element of the extent its storage begins."""
        caches, memory = self.geometry.allocate()
        starts: dict[int, int] = {}
        end = GAP_BYTES
        for pool in memory:
            starts[pool.data_ptr()] = end // pool.element_size()
            end += pool.numel() * pool.element_size() + GAP_BYTES
        assert end <= ARENA_BYTES, f"the test's extent is too small: {end} bytes"
        return [
            (layer, cache, starts[cache.untyped_storage().data_ptr()] + cache.storage_offset())
            for layer, cache in caches.items()
        ]

    def _caches(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        """Attention's tensors in ``arena``, narrowed to the planned blocks."""
        return {
            layer: arena.view(like.dtype).as_strided(like.shape, like.stride(), offset)[:NUM_BLOCKS]
            for layer, like, offset in self._places
        }


class Cluster:
    """Both engines of a case, the table that their handshakes are answered from, and one request."""

    def __init__(self, case: Case, endpoints: Sequence[Endpoint]) -> None:
        self.case, self.clock = case, MonotonicClock()
        self.random = torch.Generator().manual_seed(1)
        self.transfer = f"transfer:{uuid.uuid4()}"
        self.engine_ids = (f"p-{self.transfer}", f"d-{self.transfer}")
        free = iter(endpoints)
        self.prefill, self.decode = (
            [Rank(self, engine_id, shape, tp_rank, next(free)) for tp_rank in range(shape.tp_size)]
            for engine_id, shape in zip(self.engine_ids, (case.prefill, case.decode), strict=True)
        )
        self.ranks = [*self.prefill, *self.decode]
        capacity = case.tokens + 2 * case.prefill.logical_block_size
        heads = 1 if case.prefill.era == "mla" else case.heads
        self.kv, self.stale = (
            kv(len(self.prefill[0].planes.bases), capacity, heads, self.prefill[0].planes.cell_bytes, computed=computed)
            for computed in (True, False)
        )
        self._give_blocks(self.prefill, case.prefill_blocks, 0)
        self._give_blocks(self.decode, case.decode_blocks, case.cached_tokens)
        for rank in self.prefill:
            tokens = range(len(rank.blocks) * case.prefill.logical_block_size)
            rank.fill(rank.arena, self.stale, tokens, rank.share.copy)
            rank.expected = rank.arena.clone()

    def _give_blocks(self, ranks: list[Rank], given: Sequence[int], first_token: int) -> None:
        """The same ones on every rank: there is one scheduler."""
        shape = ranks[0].shape
        shuffled = torch.randperm(NUM_BLOCKS // shape.ratio, generator=self.random).tolist()
        needed = -(-(self.case.tokens - first_token) // shape.logical_block_size)
        for rank in ranks:
            rank.blocks = list(given or shuffled[:needed])
            rank.first_token = first_token

    def engine_at(self, port: int) -> list[Rank]:
        return {PORTS[0]: self.prefill, PORTS[1]: self.decode}[port]

    @property
    def pulls(self) -> bool:
        return self.case.direction == "pull"

    @property
    def movers(self) -> list[Rank]:
        """Who posts the transfers."""
        return self.decode if self.pulls else self.prefill

    # ---------------------------------------------------------------------------------------------- what schedulers say

    def manifest(self) -> Manifest:
        case, size = self.case, self.case.prefill.logical_block_size
        groups = KVGroups((KVGroup(size),)).ranges((self.prefill[0].blocks,), (0,), case.tokens)
        return Manifest(PROTOCOL, START, REQUEST, DIGEST, case.tokens, (size,), (1, 1), groups, NEVER_SECONDS, 0)

    def want(self, ranks: Sequence[Rank] | None = None) -> None:
        prefill = RemotePrefill(self.engine_ids[0], HOST, PORTS[0], self.case.prefill.tp_size)
        manifest = self.manifest() if self.pulls else None
        first, end = self.case.cached_tokens, self.case.tokens
        for rank in self.decode if ranks is None else ranks:
            groups = (BlockRange(first, tuple(rank.blocks)),)
            wanted = FetchSpec(ATTEMPT, WANTED, prefill, manifest, self.transfer, DIGEST, end, first, end, groups)
            rank.begin(commands=[wanted])

    def compute(self, tokens: range, ranks: Sequence[Rank] | None = None) -> None:
        """A step of prefill, which has no more blocks than the tokens need; the next one says that it was the last."""
        case, is_last = self.case, tokens.stop == self.case.tokens
        for rank in self.prefill if ranks is None else ranks:
            # Ranks with copies of a head may round their own sums.
            rank.fill(rank.arena, self.kv, tokens, rank.share.copy)
            rank.fill(rank.expected, self.kv, tokens, rank.share.copy)
            blocks = rank.blocks[: -(-tokens.stop // case.prefill.logical_block_size)]
            manifest = self.manifest() if is_last else None
            if is_last or not self.pulls:
                offered = OfferUpdate(REQUEST, self.transfer, DIGEST, case.tokens, grown(blocks), tokens.stop, manifest)
                rank.begin(commands=[offered])
            if is_last:
                rank.begin(commands=[Finish(REQUEST)])

    # --------------------------------------------------------------------------------------------------------- going on

    def turn(self, ranks: Sequence[Rank] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            rank.thread.turn()
            if rank.look() and not rank.failed:
                self.assert_arrived(rank, self.case.tokens)

    def until(self, found: Callable[[], object], ranks: Sequence[Rank] | None = None) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not found():
            assert time.monotonic() < deadline, "nothing came of it"
            self.turn(ranks)
            # Handshakes are answered on threads of their own.
            time.sleep(0)

    def go_on(self, ranks: Sequence[Rank] | None = None) -> None:
        """Long enough for anything that should not happen."""
        for _ in range(FURTHER_TURNS):
            self.turn(ranks)
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        for rank in self.ranks:
            rank.thread.close()

    # ---------------------------------------------------------------------------------------------------------- asserts

    def assert_arrived(self, rank: Rank, end_token: int) -> None:
        """Rank of decode: the tokens up to ``end_token`` are there, and nothing else has changed."""
        case = self.case
        expected = rank.expected.clone()
        sender = next(one for one in self.prefill if case.moves_to(one.tp_rank, rank.tp_rank))
        rank.fill(expected, self.kv, range(case.cached_tokens, end_token), sender.share.copy)
        # What is documented of `pair`: where the prompt ends inside a block on both sides, its rest comes along.
        rest = range(end_token, -(-end_token // case.step) * case.step)
        rank.fill(expected, self.stale, rest, sender.share.copy)
        self.assert_equal(rank, rank.arena, expected)

    def assert_equal(self, rank: Rank, arena: torch.Tensor, expected: torch.Tensor) -> None:
        if torch.equal(arena, expected):
            return
        wrong = [
            (plane, *place)
            for plane, (found, meant) in enumerate(zip(rank.cells(arena), rank.cells(expected), strict=True))
            for place in (found != meant).any(dim=-1).nonzero().tolist()
        ]
        places = {token: rank.place(token) for token in range(rank.first_token, self.case.tokens)}
        raise AssertionError(
            f"rank {rank.tp_rank} of {rank.shape}: wrong at (plane, block, token in block, head) {wrong[:20]} and "
            f"{max(0, len(wrong) - 20)} more, or outside all blocks; tokens are at {places}"
        )

    def assert_ended(self) -> None:
        """Everything was said once, nothing is left, nothing was dropped, and prefill's memory is as it was."""
        assert [rank.over for rank in self.decode] == [[ATTEMPT]] * len(self.decode)
        assert [rank.done for rank in self.prefill] == [[REQUEST]] * len(self.prefill)
        for rank in self.ranks:
            assert (len(rank.registry), len(rank.receiver), rank.transport.unreleased) == (0, 0, 0)
            assert not +rank.thread.dropped
            assert not rank.token_table[:BUCKETS].any()
        for rank in self.prefill:
            self.assert_equal(rank, rank.arena, rank.expected)

    def assert_traffic(self) -> None:
        """For each two ranks: transfers, bytes, at most a descriptor per cell; in a pull one ownership token."""
        case = self.case
        whole = -(-case.tokens // case.step) * case.step
        for sender, receiver in itertools.product(self.prefill, self.decode):
            mover, other = (receiver, sender) if self.pulls else (sender, receiver)
            name = peer_name(mover, other)
            found = [(local, remote) for peer, local, remote in mover.transport.moves if peer == name]
            if not case.moves_to(sender.tp_rank, receiver.tp_rank):
                assert not found
                continue
            heads = set(sender.heads) & set(receiver.heads)
            cells = (whole - case.cached_tokens) * len(heads) * len(self.kv)
            assert len(found) == (1 if self.pulls else case.writes_upto(case.tokens))
            assert sum(len(local) for local, _ in found) <= cells
            assert sum(int(local[:, 1].sum()) for local, _ in found) == cells * sender.planes.cell_bytes
        asked = sum(case.asks(here.tp_rank, there.tp_rank) for here in self.decode for there in self.prefill)
        assert sum(rank.transport.words_read for rank in self.ranks) == (asked if self.pulls else 0)

    @property
    def moves(self) -> int:
        return sum(len(rank.transport.moves) for rank in self.movers)

    @property
    def pairs(self) -> int:
        """Pairs of ranks of which one has bytes for the other."""
        return sum(
            self.case.moves_to(sender.tp_rank, receiver.tp_rank)
            for sender, receiver in itertools.product(self.prefill, self.decode)
        )


def peer_name(of: Rank, rank: Rank) -> str:
    return of.endpoint.transport.add_peer(rank.metadata)


def run(cluster: Cluster) -> None:
    """The whole request. With chunks decode of a push asks first and gets each step's tokens when that has ended."""
    case = cluster.case
    asks_first = bool(case.chunks) and not cluster.pulls
    if asks_first:
        cluster.want()
        cluster.until(lambda: all(len(rank.receiver) for rank in cluster.decode))
    computed = 0
    for ready in (*case.chunks, case.tokens):
        cluster.compute(range(computed, ready))
        computed = ready
        if ready == case.tokens or cluster.pulls:
            continue
        expected = case.writes_upto(ready) * cluster.pairs
        cluster.until(lambda expected=expected: cluster.moves >= expected)  # type: ignore[misc]
        cluster.until(lambda: not any(len(rank.context.transfer_queue) for rank in cluster.prefill))
        assert cluster.moves == expected
        for rank in cluster.decode:
            assert not rank.over
            if expected:
                cluster.assert_arrived(rank, max(case.boundary(ready), case.cached_tokens))
    if not asks_first:
        cluster.want()
    cluster.until(lambda: all(rank.over for rank in cluster.decode) and all(rank.done for rank in cluster.prefill))
    cluster.go_on()
    cluster.assert_ended()
    cluster.assert_traffic()
    for rank in cluster.decode:
        assert not rank.failed
        cluster.assert_arrived(rank, case.tokens)


# --------------------------------------------------------------------------------------------------------- on real NIXL


@pytest.fixture(autouse=True)
def transfers_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WRITE a step and a READ a rank, so that they can be counted; that they are cut at a limit is another test's."""
    budget = transfer_queue.Budget(descriptors=1_000_000)
    monkeypatch.setattr(transfer_queue, "Budget", lambda: budget)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch copies and compares the extents with all the threads it has, which wait for each other if others work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def no_words() -> TokenArray:
    return np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[Endpoint]]:
    """Agents for all cases, each with one extent; a case's engines take the first ones.

    Without NIXL's own threads, which never sleep: the turns of the transfer threads make all the progress there is.
    """
    api = pytest.importorskip("nixl._api", reason="needs an environment: bash experiments/env.sh")
    made: list[Endpoint] = []
    registered: list[tuple[Any, Any]] = []
    for _ in range(MOST_RANKS):
        agent = api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
        extent = agent.get_reg_descs([(arena.data_ptr(), ARENA_BYTES, 0, "")], "DRAM")
        words = no_words()
        registered += [(agent, agent.register_memory(extent, backends=["UCX"]))]
        registered += [(agent, register_host_memory(agent, words, ["UCX"]))]
        made.append(Endpoint(NixlTransport(agent, "DRAM"), arena, words, agent))
    yield made
    for agent, extent in registered:
        agent.deregister_memory(extent)


@pytest.fixture
def make(endpoints: list[Endpoint]) -> Iterator[Callable[[Case], Cluster]]:
    """make(case): its engines."""
    made: list[Cluster] = []

    def one(case: Case) -> Cluster:
        made.append(Cluster(case, endpoints))
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()
    # What a failed test left under way is not for the next one.
    for endpoint in [*endpoints, *endpoints]:
        endpoint.transport.received()


def cases() -> Iterator[Any]:
    """Each pair of sizes with each share of heads; then arrangements, block sizes, chunks and prefixes in turn."""
    sizes = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)]
    chunks = [(), (5, 13, 14, 24), (9,), (3, 8, 16)]
    blocks = [(4, 4), (4, 8), (8, 4), (4, 12), (12, 4)]
    cached = [0, 1, 2]
    eras = [
        (Shape(era="kv_apart"), Shape(era="kv_apart", contiguous=True)),
        (Shape(era="kv_apart", contiguous=True), Shape(era="kv_apart")),
        (Shape(era="packed"), Shape(era="packed", contiguous=True)),
        (Shape(era="packed", head_major=True, contiguous=True), Shape(era="packed", contiguous=True)),
        (Shape(era="packed", ratio=2), Shape(era="packed", head_major=True)),
        (Shape(era="packed", head_major=True), Shape(era="packed", head_major=True, ratio=2)),
        (Shape(era="kv_apart", contiguous=True), Shape(era="kv_apart", contiguous=True)),
        (Shape(era="kv_apart", ratio=3), Shape(era="kv_apart", contiguous=True)),
        (Shape(era="kv_apart"), Shape(era="kv_apart", ratio=2)),
    ]
    turn = itertools.count()
    for (prefill_tp, decode_tp), heads in itertools.product(sizes, (8, 4, 2)):
        if heads == 2 and max(prefill_tp, decode_tp) < 4:
            continue
        number = next(turn)
        for era, block in ((number, number), (number + 4, number + 2)):
            yield make_case(
                (prefill_tp, decode_tp), heads, eras[era % len(eras)], blocks[block % len(blocks)],
                chunks[era % len(chunks)], cached[(number + era) % len(cached)],
            )  # fmt: skip
    for place, tp_sizes in enumerate([(1, 2), (4, 1), (4, 2), (2, 4), (1, 1)]):
        latent = Shape(era="mla", contiguous=place % 2 == 0), Shape(era="mla", contiguous=True, ratio=1 + place % 2)
        yield make_case(tp_sizes, 8, latent, blocks[place], chunks[place % 4], place % 2)
    # Lengths around the ends of blocks and of steps.
    for tokens in (1, 4, 8, 23, 24, 25):
        yield make_case((2, 1), 4, eras[2], (4, 12), (), 0, tokens=tokens)


def make_case(
    tp_sizes: tuple[int, int],
    heads: int,
    eras: tuple[Shape, Shape],
    blocks: tuple[int, int],
    chunks: tuple[int, ...],
    cached_blocks: int,
    tokens: int = 29,
) -> Any:
    prefill, decode = (
        dataclasses.replace(era, tp_size=tp_size, block_size=block)
        for era, tp_size, block in zip(eras, tp_sizes, blocks, strict=True)
    )
    # Less than the prompt, or there is nothing to push.
    cached_blocks = min(cached_blocks, (tokens - 1) // decode.logical_block_size)
    case = Case(prefill, decode, heads, tokens, cached_blocks * decode.logical_block_size, chunks)
    words = [
        f"tp {tp_sizes[0]} to {tp_sizes[1]}, {heads} heads",
        str(prefill),
        str(decode),
        f"{tokens} tokens, {case.cached_tokens} cached, {len(chunks) + 1} steps",
    ]
    return pytest.param(case, id="; ".join(words))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", list(cases()))
def test_every_head_of_every_token_arrives_and_nothing_else_changes(
    case: Case, direction: str, make: Callable[[Case], Cluster]
) -> None:
    """On each rank of decode, by the time it says so; a push has what is whole in blocks there after each step."""
    run(make(dataclasses.replace(case, direction=direction)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transfer_threads_move_between_four_ranks_and_two(direction: str, make: Callable[[Case], Cluster]) -> None:
    """As in a server: nobody turns them."""
    shape = Shape(4, 4, "packed", contiguous=True)
    case = Case(shape, Shape(2, 8, "packed", head_major=True), chunks=(5, 13), direction=direction)
    cluster = make(case)
    for rank in cluster.ranks:
        rank.thread.start()
    if not cluster.pulls:
        cluster.want()
    for tokens in (range(5), range(5, 13), range(13, case.tokens)):
        cluster.compute(tokens)
    if cluster.pulls:
        cluster.want()
    deadline = time.monotonic() + WAIT_SECONDS
    while not (all(rank.over for rank in cluster.decode) and all(rank.done for rank in cluster.prefill)):
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
        for rank in cluster.ranks:
            if rank.look():
                cluster.assert_arrived(rank, case.tokens)
    cluster.close()
    for rank in cluster.ranks:
        rank.look()
    cluster.assert_ended()


# -------------------------------------------------------------------------------------------------------- who ends when


@pytest.mark.parametrize(("tp_sizes", "heads"), [((2, 1), 4), ((4, 1), 8), ((4, 2), 4), ((4, 1), 2)])
def test_a_rank_of_decode_waits_for_all_that_write_into_it(
    tp_sizes: tuple[int, int], heads: int, make: Callable[[Case], Cluster]
) -> None:
    """A push: the ranks of prefill compute one after the other; each is done by itself, decode with the last one."""
    cluster = make(Case(Shape(tp_sizes[0]), Shape(tp_sizes[1], contiguous=True), heads))
    cluster.want()
    share = tp_sizes[0] // tp_sizes[1]
    for number, writer in enumerate(cluster.prefill):
        reader = cluster.decode[number // share]
        arrived = reader.transport.arrived
        cluster.compute(range(cluster.case.tokens), [writer])
        cluster.until(lambda writer=writer: writer.done)  # type: ignore[misc]
        if cluster.case.moves_to(writer.tp_rank, reader.tp_rank):
            cluster.until(lambda reader=reader, arrived=arrived: reader.transport.arrived > arrived)  # type: ignore[misc]
        cluster.go_on()
        assert [len(rank.over) for rank in cluster.decode] == [
            int(not any(cluster.case.moves_to(left, place) for left in range(number + 1, tp_sizes[0])))
            for place in range(tp_sizes[1])
        ]
    cluster.assert_ended()
    cluster.assert_traffic()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("era", "heads"), [("packed", 1), ("packed", 2), ("mla", 8)])
@pytest.mark.parametrize("tp_sizes", [(4, 1), (4, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("is_verified", [False, True])
def test_of_ranks_with_copies_beside_a_state_one_moves_them(
    tp_sizes: tuple[int, int],
    is_verified: bool,
    era: str,
    heads: int,
    direction: str,
    make: Callable[[Case], Cluster],
) -> None:
    """Decode asks all of them, since each has a share of the state; what two have differs in its last bits. The
    checksums, too, are of what a rank has moved."""
    shapes = Shape(tp_sizes[0], era=era), Shape(tp_sizes[1], 8, era=era)
    case = Case(*shapes, heads, chunks=(5, 13), direction=direction, beside_states=True, is_verified=is_verified)
    cluster = make(case)
    run(cluster)


# ---------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("era", ["kv_apart", "packed", "mla"])
def test_equal_engines_take_a_descriptor_for_each_run_of_blocks(
    era: str, contiguous: bool, direction: str, make: Callable[[Case], Cluster]
) -> None:
    """Blocks that follow each other on both sides; in each plane where the layers lie apart."""
    shape, blocks = Shape(1, 4, era, contiguous), ((3, 4, 5, 9, 10), (7, 8, 9, 2, 3))
    case = Case(shape, shape, tokens=19, prefill_blocks=blocks[0], decode_blocks=blocks[1], direction=direction)
    cluster = make(case)
    run(cluster)
    ((_, local, remote),) = cluster.movers[0].transport.moves
    assert len(local) == len(remote) == 2 * (1 if contiguous else len(cluster.prefill[0].planes.bases))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        # (planes, tokens): the heads of a token lie end to end in both.
        (Shape(1), Shape(2), 4 * 20),
        (Shape(2), Shape(1, contiguous=True), 4 * 20),
        # (planes, blocks, heads): the tokens of a head do.
        (Shape(1, era="packed", head_major=True), Shape(1, 8, era="packed", head_major=True), 2 * 5 * 8),
        # (planes, blocks): the heads of a block do.
        (Shape(1, era="packed", head_major=True), Shape(2, era="packed", head_major=True), 2 * 5),
        # (planes, tokens, heads): no two cells do.
        (Shape(1, era="packed"), Shape(1, era="packed", head_major=True), 2 * 20 * 8),
        (Shape(2, era="packed", head_major=True), Shape(1, 8, era="packed"), 2 * 20 * 4),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_unequal_engines_take_a_descriptor_for_each_run_of_cells(
    prefill: Shape, decode: Shape, expected: int, direction: str, make: Callable[[Case], Cluster]
) -> None:
    """Blocks that do not follow each other, so that nothing else is saved; for each two ranks."""
    blocks = ((3, 5, 9, 1, 7), (7, 2, 11, 4, 0))
    case = Case(prefill, decode, tokens=20, prefill_blocks=blocks[0], decode_blocks=blocks[1], direction=direction)
    cluster = make(case)
    run(cluster)
    for rank in cluster.movers:
        assert {len(local) for _, local, _ in rank.transport.moves} == {expected}


# ------------------------------------------------------------------------------------------------------------ in memory


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    era = draw(st.sampled_from(["kv_apart", "packed", "mla"]))

    def shape(tp_size: int, block_size: int) -> Shape:
        ratio = draw(st.integers(1, 3))
        return Shape(tp_size, block_size, era, draw(st.booleans()), draw(st.booleans()), ratio)

    tp_sizes = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1)]))
    sizes = draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (2, 8), (6, 3), (3, 3), (2, 6)]))
    prefill, decode = (shape(*both) for both in zip(tp_sizes, sizes, strict=True))
    tokens = draw(st.integers(1, 40))
    cached = draw(st.integers(0, (tokens - 1) // decode.logical_block_size)) * decode.logical_block_size
    chunks = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=4))) if tokens > 1 else []
    heads, direction = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from(DIRECTIONS))
    return Case(prefill, decode, heads, tokens, cached, tuple(chunks), direction=direction)


ARENAS = [torch.empty(ARENA_BYTES, dtype=torch.uint8) for _ in range(MOST_RANKS)]


@settings(max_examples=40, deadline=None)
@given(drawn_cases())
def test_any_two_engines_in_memory(case: Case) -> None:
    """The same, over the in-memory transport, in as many combinations as there is time for."""
    network = Network(immediate=True)
    cluster = Cluster(
        case, [Endpoint(network.agent(f"agent {n}"), arena, no_words()) for n, arena in enumerate(ARENAS)]
    )
    try:
        run(cluster)
    finally:
        cluster.close()
