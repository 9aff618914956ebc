# SPDX-License-Identifier: Apache-2.0
"""Parts of a worker over the in-memory transport, and peers whose answers and ownership tokens a test makes up."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.processes import Host
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.transport.agent import TransferState
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.handshake import Answer, Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.messages import KernelBlockRange, Message, Peer, Reading, Registration, decode, encode
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.wire.step import FetchSpec
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET, TokenArray, TokenTable
from kvcached_nixl.worker.transfer.slab import Slots
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.topology import LocalRank
from support.clocks import ManualClock
from support.digest_fakes import Copy, InTurn, StubSlab, as_bytes, content_of
from support.memory_transport import MemoryTransport, Network, Posted

BLOCK_SIZE = 4
NUM_BLOCKS = 32
CELL_BYTES = 8
TAG = "kvcached_nixl/6 pull [test]"
WEIGHTS = Weights(Tensors("1" * 32, "2" * 32), files="3" * 32)
START, OTHER_START = "00000000000000aa", "00000000000000bb"
DIGEST, OTHER_DIGEST = "0" * 32, "1" * 32
TOKENS = 10


class Memory:
    """A rank's KV: ``cells[plane, block, token, head]`` of 8 bytes, and the planes that describe it."""

    def __init__(self, num_heads: int = 1) -> None:
        self.cells = np.zeros((2, NUM_BLOCKS, BLOCK_SIZE, num_heads), dtype=np.int64)
        strides = self.cells.strides
        self.planes = Planes(
            bases=tuple(int(self.cells.ctypes.data) + plane * strides[0] for plane in range(2)),
            keys=(0, 1),
            block_stride_bytes=strides[1],
            token_stride_bytes=strides[2],
            head_stride_bytes=strides[3],
            cell_bytes=CELL_BYTES,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_heads=num_heads,
            first_head=0,
        )


class Asking:
    """Stands in for the side channel. A handshake without an entry in ``answers`` stays open until the test answers it.

    Attributes:
        asked: (host, port, rank) of each handshake, in order.
        answers: (host, port, rank) -> what is answered at once: a compatibility string and metadata, or an error.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.open: list[Future[tuple[str, bytes]]] = []
        self.answers: dict[tuple[str, int, int], tuple[str, bytes] | Exception] = {}
        self.woken: list[tuple[str, int, str]] = []
        self.is_closed = False

    def ask(self, host: str, port: int, tp_rank: int, pp_rank: int = 0) -> Future[tuple[str, bytes]]:
        self.asked.append((host, port, tp_rank))
        future: Future[tuple[str, bytes]] = Future()
        found = self.answers.get((host, port, tp_rank))
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        else:
            self.open.append(future)
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        self.woken.append((host, port, key))

    def close(self) -> None:
        self.is_closed = True


class KnownHost(Host):
    """A host whose processes the test chooses.

    Attributes:
        living: live processes of this host, which it can see.
        local: processes that can be reached without a network.
    """

    living: set[Process]
    local: set[Process]

    def __init__(self) -> None:
        super().__init__(Process("here", "", 1, 1), "DRAM")
        vars(self).update(living=set(), local=set())

    def sees(self, process: Process) -> bool:
        return process in self.living

    def is_dead(self, process: Process) -> bool:
        return process not in self.living

    def is_behind_network(self, process: Process) -> bool:
        return process not in self.local


@dataclass
class Remote:
    """A rank of another engine as its peers see it: an address, an agent, memory, ownership tokens."""

    address: Peer
    transport: MemoryTransport
    memory: Memory = field(default_factory=Memory)
    incarnation: str = START
    process: Process = Process()

    def __post_init__(self) -> None:
        self.tokens: TokenArray = np.zeros((BUCKETS, TOKENS_PER_BUCKET), dtype=np.uint64)
        self.table = TokenTable(self.tokens)

    def handshake(self, **changed: Any) -> RankHandshake:
        rank = RankHandshake(
            engine_id=self.address.engine_id,
            tp_size=self.address.tp_size,
            tp_rank=self.address.tp_rank,
            agent_metadata=self.transport.metadata(),
            device_id=0,
            groups=(GroupMemory((self.memory.planes,)),),
            token_table_address=int(self.tokens.ctypes.data),
            memory_type="DRAM",
            is_staged=False,
            weights=WEIGHTS,
            process=self.process,
            pp_size=1,
            pp_rank=0,
        )
        return msgspec.structs.replace(rank, **changed)

    def answer(self, compatibility: str = TAG, incarnation: str | None = None, **changed: Any) -> tuple[str, bytes]:
        rank = msgspec.msgpack.encode(self.handshake(**changed))
        return compatibility, msgspec.msgpack.encode(
            Answer(self.incarnation if incarnation is None else incarnation, rank)
        )

    @property
    def place(self) -> tuple[str, int, int]:
        return self.address.host, self.address.port, self.address.tp_rank

    def say(self, agent: str, message: Message) -> None:
        self.transport.add_peer(agent.encode())
        self.transport.send(agent, encode(message))

    def heard(self) -> list[Message]:
        """Returns the messages since the last call, without those that blocks are read."""
        found = [decode(notification) for _, notification in self.transport.received()]
        return [one for one in found if not isinstance(one, Reading)]


class HeldCopies:
    """Stands in for the copier: a copy moves nothing, and ends when the test says so."""

    def __init__(self) -> None:
        self.asked: deque[Copy] = deque()

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each copy that has not ended."""
        return [list(copy.blocks) for copy in self.asked]

    @property
    def slots(self) -> list[list[int]]:
        """The slots of each copy that has not ended."""
        return [list(copy.staged) for copy in self.asked]

    def end(self, failed: str = "") -> None:
        """Ends the oldest copy."""
        self.asked.popleft().ended(failed)

    def submit(self, work: Work[None]) -> None:
        self.asked.append(Copy.of(work))

    def turn(self) -> None:
        """Copies end in `end`."""

    def close(self) -> None:
        """There is no thread to stop."""


def staging_over(slots: Slots, copier: Any, *sizes: Any) -> Staging:
    """Returns the `Staging` over a slab that holds nothing."""
    return Staging(slots, StubSlab(), copier, *sizes)  # type: ignore[arg-type]


def address(engine_id: str = "remote", *, port: int = 5601) -> Peer:
    return Peer(EngineId(engine_id), "10.0.0.2", port, 1, 0)


class Listener:
    """Receives what `Peers` of a `Local` reports, and forwards it to ``role`` if that is set."""

    def __init__(self, local: Local) -> None:
        self.local = local
        self.role: Any = None
        self.may_write: Any = lambda agent: False

    def is_used(self, agent: str) -> bool:
        return False

    def dead(self, agent: str) -> None:
        self.local.dead.append(agent)
        if self.role is not None:
            self.role.dead(agent)

    def unreachable(self, agent: str) -> None:
        self.local.unreachable.append(agent)
        if self.role is not None:
            self.role.unreachable(agent)

    def disconnected(self, agent: str) -> None:
        self.local.gate_connections.disconnected(agent)


class Local:
    """One rank's `WorkerContext`, and everything that it needs. ``clock``: in place of the one that the test moves."""

    def __init__(
        self,
        *,
        mode: TransferMode = TransferMode.PULL,
        clock: Clock | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        memory: Memory | None = None,
    ) -> None:
        self.remotes: list[Remote] = []
        self.network = Network()
        self.clock = ManualClock(1000.0)
        self.transport = self.network.agent("local")
        self.asking = Asking()
        self.memory = Memory() if memory is None else memory
        groups = (GroupMemory((self.memory.planes,)),)
        self.dead: list[str] = []
        self.unreachable: list[str] = []
        self.host = KnownHost()
        tokens: TokenArray = np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)
        self.awaiting_checksum = InTurn()
        content = content_of(self.memory.planes, as_bytes(self.memory.cells))
        used: Any = self.clock if clock is None else clock
        self.gates = WriteGates(lambda: self.network.open_gate("local"), self.awaiting_checksum, used)
        self.side = WorkerContext(
            Settings(mode),
            used,
            self.asking,
            threading.Event(),
            self.transport,
            LocalRank(EngineId("local"), tp_size, tp_rank, groups, MAX_TP_SIZE),
            tokens,
            TAG,
            Checksums(content, content, self.awaiting_checksum, 0.0),
            self.host,
            own=Peer(EngineId("local"), "10.0.0.1", 5600, tp_size, tp_rank),
        )
        self.peers, self.gate_connections = self.side.peers, self.side.gate_connections
        self.transfer_queue = self.side.transfer_queue
        self.listener = Listener(self)
        self.peers.listen(self.listener)
        self.side.incarnation, self.side.weights = START, WEIGHTS

    def remote(self, name: str = "remote", *, is_answering: bool = True, **more: Any) -> Remote:
        """Creates a rank of another engine. Unless ``is_answering`` is False it answers handshakes at once."""
        where = more.pop("address", None) or address(name)
        made = Remote(where, self.network.agent(f"{name}-{where.tp_rank}"), **more)
        # Transfers touch its memory by address, after the test has forgotten it.
        self.remotes.append(made)
        if is_answering:
            self.asking.answers[made.place] = made.answer()
        return made

    def turn(self) -> None:
        self.peers.turn()
        self.side.checksums.background.turn()
        self.transfer_queue.turn()
        self.peers.turn()

    def deliver(self) -> None:
        """Delivers messages and transfers, and runs turns, until nothing is in flight."""
        self.turn()
        while [one for one in self.network.pending if not self.network.is_stuck(one)]:
            self.network.deliver_all()
            self.turn()
        self.turn()

    @property
    def in_flight(self) -> list[Posted]:
        return [one for one in self.network.pending if one.is_transfer]

    def unreleased(self) -> list[Posted]:
        return [one for one in self.transport.unreleased() if one.state is not TransferState.IN_FLIGHT]


def manifest(
    *block_ids: int, request_id: str = "p-1", num_tokens: int = TOKENS, block_size: int = BLOCK_SIZE, **changed: Any
) -> Manifest:
    groups = (BlockRange(0, block_ids),) if block_ids else ()
    made = Manifest(
        PROTOCOL, START, request_id, DIGEST, num_tokens, (block_size,) * max(1, len(groups)), (1, 1), groups, 30.0, 0
    )
    return msgspec.structs.replace(made, **changed)


def wanted(attempt: int = 1, made: Manifest | None = None, *, engine_id: str = "remote") -> FetchSpec:
    return FetchSpec(
        attempt,
        DecodeRequestId(f"d{attempt}"),
        RemotePrefill(engine_id, "10.0.0.2", 5601, 1),
        made,
        "transfer:t",
        DIGEST,
        TOKENS if made is None else made.num_tokens,
        0,
        TOKENS,
        (BlockRange(0, (7, 3, 9)),),
    )


def registration(attempt: int = 1, decode: Peer | None = None, **changed: Any) -> Registration:
    made = Registration(
        attempt=attempt,
        decode=address() if decode is None else decode,
        incarnation=START,
        name="transfer:t",
        request_id="",
        digest=DIGEST,
        num_tokens=TOKENS,
        first_token=0,
        end_token=TOKENS,
        block_sizes=(BLOCK_SIZE,),
        groups=(KernelBlockRange(0, (17, 13, 19)),),
    )
    if "block_ids" in changed:
        first_token = changed.get("first_token", 0)
        changed["groups"] = tuple(KernelBlockRange(first_token, group) for group in changed.pop("block_ids"))
    if "groups" in changed:
        changed.setdefault("block_sizes", (BLOCK_SIZE,) * len(changed["groups"]))
    return msgspec.structs.replace(made, **changed)
