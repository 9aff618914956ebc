# SPDX-License-Identifier: Apache-2.0
"""The layout of a running engine's KV memory, and how fast it can be read from this host. Nothing is written to it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvcached_nixl.current_device import select
from kvcached_nixl.proof.result import Question
from kvcached_nixl.transport.agent import Ranges, Transport, TransportError, make_agent, register
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.handshake import read_answer, read_rank
from kvcached_nixl.wire.planes import Planes

BYTES = 8 << 20
SMALL_BYTES = 4096
MOST_ROWS = 4096
READ_SECONDS = 30.0
TRIES = 3


class PeerFound(msgspec.Struct, frozen=True):
    """A rank of a running engine.

    Attributes:
        compatibility: the tag that a peer of this rank must match.
        memory: its planes, of all KV-cache groups.
        read: bytes per second, with one descriptor per block of a plane.
        descriptors: descriptors per second, of at most 4 KiB each.
    """

    compatibility: str
    engine_id: str
    tp_rank: int
    tp_size: int
    memory: tuple[Planes, ...]
    read: float
    descriptors: float


def read_from(channel: SideChannel, host: str, port: int, tp_rank: int, question: Question) -> PeerFound:
    """Handshake with a rank as decode does, and read some of its blocks, whatever they contain.

    Args:
        question: the device, memory type and NIXL backends of this side.

    Raises:
        OSError, TimeoutError, ValueError, TransportError: the rank does not answer, its answer is invalid, or it cannot
            be read from.
    """
    compatibility, metadata = channel.ask(host, port, tp_rank).result()
    if not metadata:
        raise ValueError(f"{host}:{port} answers: {compatibility:.500}")
    rank = read_rank(read_answer(metadata).rank)
    import torch

    select(question.device, question.device_index)
    landing = torch.zeros(BYTES, dtype=torch.uint8, device=question.torch_device)
    extent = [(landing.data_ptr(), BYTES)]
    try:
        agent = make_agent(question.backends)
        register(agent, extent, question.backends, question.memory_type, question.device_index)
    except Exception as error:
        # NIXL's exceptions have no common base.
        raise TransportError(f"memory could not be registered here: {type(error).__name__}: {error}") from error
    transport = Transport(agent, question.memory_type, question.device_index)
    peer = transport.add_peer(rank.agent_metadata, rank.device_id, rank.memory_type)
    planes = tuple(planes for group in rank.groups for planes in group.planes)
    whole = _ranges(planes)
    small = np.concatenate([_cut(row) for row in whole])[: BYTES // SMALL_BYTES]

    def seconds(remote: Ranges) -> float:
        begins = landing.data_ptr() + np.concatenate(([0], np.cumsum(remote[:-1, 1])))
        local = np.stack((begins, remote[:, 1]), axis=1)
        return min(transport.move("READ", peer, local, remote, READ_SECONDS) for _ in range(TRIES))

    rates = int(whole[:, 1].sum()) / seconds(whole), len(small) / seconds(small)
    transport.remove_peer(peer)
    return PeerFound(compatibility, rank.engine_id, rank.tp_rank, rank.tp_size, planes, *rates)


def _ranges(kinds: Sequence[Planes]) -> Ranges:
    """(address, bytes) of blocks of the first plane of each kind; of a block, the part whose cells are contiguous."""
    rows: list[tuple[int, int]] = []
    for planes in kinds:
        dense = planes.cell_bytes * planes.num_heads * planes.block_size
        length = min(dense, planes.block_stride_bytes, BYTES // len(kinds))
        if length <= 0:
            raise ValueError(
                f"found blocks {planes.block_stride_bytes} bytes apart; expected blocks that are not empty"
            )
        count = min(planes.num_blocks, BYTES // len(kinds) // length, MOST_ROWS // len(kinds))
        rows += [(planes.bases[0] + block * planes.block_stride_bytes, length) for block in range(count)]
    return np.array(rows, np.int64)


def _cut(row: Sequence[int]) -> Ranges:
    begins = np.arange(row[0], row[0] + row[1], SMALL_BYTES)
    return np.stack((begins, np.minimum(SMALL_BYTES, row[0] + row[1] - begins)), axis=1)
