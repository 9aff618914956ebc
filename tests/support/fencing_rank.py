# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine as a process: the worker's half of a hand-over over real NIXL, without vLLM.

Usage:

    python fencing_rank.py prefill FOLDER
    python fencing_rank.py decode FOLDER OPERATION ENDING FAULT

Prefill writes into decode's memory, or decode reads prefill's (OPERATION: WRITE, READ). Decode stops prefill in the
middle (SIGSTOP) and gets no answer from it afterwards: prefill's side channel accepts connections and sends nothing.
Decode's request fails. When its blocks are free, other requests get them and write OTHERS into them, and prefill
continues (SIGCONT) or is killed (SIGKILL). Decode prints what it found as JSON, after "FOUND ".

ENDING: "fenced" (the blocks become free while prefill is stopped), "goes on" or "killed" (they become free after that).
FAULT: "none"; "reused" (other requests get the blocks as soon as the request has failed); "left open" (the write gate
counts as closed, but is open); "taken down" (what NIXL calls failed when its peer is removed counts as ended).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from experiments.common.server_side.sitecustomize import wait_for_events
from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.processes import Host
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.transport.agent import Transport, WriteGate, make_agent, open_gate, register
from kvcached_nixl.wire.handshake import Answer, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.wire.step import FetchSpec, OfferUpdate, WakeAddress, Withdraw
from kvcached_nixl.worker import transfer_thread
from kvcached_nixl.worker.background import Background
from kvcached_nixl.worker.decode import fencing
from kvcached_nixl.worker.decode import receiver as receiver
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.facade import Device, assemble
from kvcached_nixl.worker.transfer.checksums import Checksums, Content
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET
from kvcached_nixl.worker.transfer.topology import LocalRank
from support.internals import num_open

BACKENDS = ["UCX"]
BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 1 << 16, 8192
TOKENS = BLOCK_SIZE * NUM_BLOCKS
BEFORE, WRITTEN, OTHERS = 1, 7, 99
DIGEST, START, TAG, NAME = "0" * 32, "0" * 15 + "a", "fencing", "t"
ATTEMPT = 17
WEIGHTS = Weights(Tensors("1" * 32, "2" * 32))
ARRIVING_SECONDS, FREE_SECONDS, HELD_SECONDS, LATE_SECONDS = 60.0, 30.0, 4.0, 4.0


class Channel:
    """Stands in for the side channel: answers are files that the other rank has written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_silent = False

    def ask(self, host: str, port: int, tp_rank: int, pp_rank: int = 0) -> Future[tuple[str, bytes]]:
        future: Future[tuple[str, bytes]] = Future()
        if self.is_silent:
            future.set_exception(TimeoutError("it accepts, and says nothing"))
        else:
            future.set_result((TAG, (self.folder / host).read_bytes()))
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        """No engine sleeps here."""

    def close(self) -> None:
        """No socket is open."""


class Rank:
    """One rank: agent, memory, write gates and transfer thread. See the module docstring."""

    def __init__(self, role: str, folder: Path, mode: TransferMode = TransferMode.PUSH) -> None:
        self.role = role
        self.memory = np.full((NUM_BLOCKS, BLOCK_BYTES), WRITTEN if role == "prefill" else BEFORE, dtype=np.uint8)
        self.token_table = np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)
        self.agent = make_agent(BACKENDS)
        self.registered = [
            register(self.agent, [(one.ctypes.data, one.nbytes)], BACKENDS) for one in (self.memory, self.token_table)
        ]
        address, cell = self.memory.ctypes.data, BLOCK_BYTES // BLOCK_SIZE
        planes = Planes((address,), (0,), BLOCK_BYTES, cell, cell, cell, NUM_BLOCKS, BLOCK_SIZE, 1, 0)
        transport, clock = Transport(self.agent, "DRAM"), Clock()
        host = Host.here("DRAM", os.environ)
        group = GroupMemory((planes,))
        place = LocalRank(EngineId(role), 1, 0, (group,), kv_shares=1)
        metadata, words = transport.metadata(), int(self.token_table.ctypes.data)
        rank = RankHandshake(
            place.engine_id,
            1,
            0,
            metadata,
            0,
            place.groups,
            words,
            "DRAM",
            is_staged=False,
            weights=WEIGHTS,
            process=host.own,
            pp_size=1,
            pp_rank=0,
        )
        background = Background("gates", torch.device("cpu"), lambda: None)
        self.channel = Channel(folder)
        self.gates = WriteGates(lambda: open_gate(BACKENDS, [(address, self.memory.nbytes)], "DRAM"), background, clock)
        nothing = Content((), ())
        settings = Settings(mode, kv_lease_duration_seconds=300.0, handover_timeout_seconds=300.0)
        context = WorkerContext(
            settings,
            clock,
            self.channel,
            threading.Event(),
            transport,
            place,
            self.token_table,
            TAG,
            Checksums(nothing, nothing, background, 0.0),
            host,
        )
        self.side = assemble(context, Device(torch.device("cpu")), lambda weights: None, self.gates)
        self.thread = self.side.thread
        self.own = Peer(place.engine_id, role, 1, 1, 0)
        self.thread.submit(transfer_thread.LocalIdentity(self.own, WakeAddress(role, 1, "key"), START))
        self.side.identify(WEIGHTS)
        self.thread.start()
        made = msgspec.msgpack.encode(Answer(START, msgspec.msgpack.encode(rank)))
        unfinished = folder / f"{role}.unfinished"
        unfinished.write_bytes(made)
        unfinished.rename(folder / role)

    def is_over(self) -> bool:
        self.over = getattr(self, "over", False) or bool(self.thread.take_outcome()[1].ended)
        return self.over


def until(found: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found():
            return True
        time.sleep(0.001)
    return False


BLOCKS = tuple(reversed(range(NUM_BLOCKS)))
"""Prefill's. Reversed, so that each block is a separate descriptor."""


def made_by_prefill(groups: tuple[BlockRange, ...]) -> Manifest:
    return Manifest(PROTOCOL, START, "p", DIGEST, TOKENS, (BLOCK_SIZE,), (1, 1), groups, 300.0, 0)


def prefill(folder: Path) -> None:
    rank = Rank("prefill", folder)
    groups = (BlockRange(0, BLOCKS),)
    rank.thread.submit(OfferUpdate(PrefillRequestId("p"), NAME, DIGEST, TOKENS, groups, TOKENS, made_by_prefill(())))
    time.sleep(600)


def decode(folder: Path, operation: str, ending: str, fault: str) -> None:
    for module, name, value in (
        (fencing, "UNHEARD_SECONDS", 1.0),
        (fencing, "LOOK_SECONDS", 0.5),
        (fencing, "DEAD_SECONDS", 0.5),
        (receiver, "REPEAT_SECONDS", 0.5),
        (fencing, "DRAIN_SECONDS", 1.0),
    ):
        setattr(module, name, value)
    reads = operation == "READ"
    rank = Rank("decode", folder, TransferMode.PULL if reads else TransferMode.PUSH)
    if fault == "left open":
        WriteGate.close = lambda self: True  # type: ignore[method-assign]
        Host.is_behind_network = lambda self, process: True  # type: ignore[method-assign]
    if fault == "taken down":
        Transport._in_flight = property(lambda self: {}, lambda self, value: None)  # type: ignore[assignment]
    pid = int((folder / "pid").read_text())
    target = rank.memory[:, 0]
    groups = (BlockRange(0, tuple(range(NUM_BLOCKS))),)
    where = RemotePrefill("prefill", "prefill", 1, 1)
    manifest = made_by_prefill((BlockRange(0, BLOCKS),)) if reads else None
    wanted = FetchSpec(ATTEMPT, DecodeRequestId("d"), where, manifest, NAME, DIGEST, TOKENS, 0, TOKENS, groups)
    rank.thread.submit(wanted, transfer_thread.Reached(transfer_thread.BlocksWritable((ATTEMPT,))))
    end = time.monotonic() + ARRIVING_SECONDS
    sampled = target[:: NUM_BLOCKS // 64]
    while (sampled == BEFORE).all() and time.monotonic() < end:
        pass
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    rank.channel.is_silent = True
    arrived = int((target == WRITTEN).sum())
    begun = time.monotonic()
    rank.thread.submit(Withdraw(ATTEMPT, "late"))
    if fault == "reused":
        time.sleep(0.3)
        is_free = True
    else:
        is_free = until(rank.is_over, FREE_SECONDS if ending == "fenced" else HELD_SECONDS)
    found = {"arrived": arrived, "freed_while_it_stood_still": is_free, "seconds": time.monotonic() - begun}
    if ending in ("goes on", "killed"):
        os.kill(pid, signal.SIGCONT if ending == "goes on" else signal.SIGKILL)
        found["freed_afterwards"] = is_free or until(rank.is_over, FREE_SECONDS)
    rank.memory[:] = OTHERS
    if ending == "fenced":
        os.kill(pid, signal.SIGCONT)
    time.sleep(LATE_SECONDS)
    found["changed"] = int((rank.memory != OTHERS).any(axis=1).sum())
    found["gates"] = num_open(rank.gates)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    import nixl._bindings

    wait_for_events(nixl._bindings)
    if sys.argv[1] == "prefill":
        prefill(Path(sys.argv[2]))
    else:
        decode(Path(sys.argv[2]), *sys.argv[3:])
    os._exit(0)
