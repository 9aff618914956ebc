# SPDX-License-Identifier: Apache-2.0
"""This rank's place and memory, which ranks of prefill contribute to it, and the byte ranges between it and a peer.

Once per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from kvcached_nixl.ids import EngineId, KernelBlock, LogicalBlock
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.handshake import RankHandshake
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.geometry.descriptors import Descriptors, KernelBlocks, Route, misfit

__all__ = ["LocalRank", "PeerRoutes", "contributors", "kernel_blocks", "kernel_blocks_of", "peers_of"]


@dataclass(frozen=True)
class LocalRank:
    """A worker's place in its engine, and how its blocks are counted.

    Attributes:
        memory: the kinds of planes in which it keeps KV.
        kernel_blocks_per_block: kernel blocks in one logical block (the scheduler's).
        is_latent: all ranks hold the same KV (multi-latent attention).
    """

    engine_id: EngineId
    tp_size: int
    tp_rank: int
    memory: tuple[Planes, ...]
    kernel_blocks_per_block: int
    is_latent: bool

    @property
    def kernel_block_size(self) -> int:
        """Tokens in a kernel block."""
        return self.memory[0].block_size

    @property
    def block_size(self) -> int:
        """Tokens in a logical block (the scheduler's)."""
        return self.kernel_block_size * self.kernel_blocks_per_block


@dataclass
class PeerRoutes:
    """How this rank's memory maps to that of each peer, computed once per peer.

    `forget` is called when a peer's agent is dead. Any address may name any agent, so `of` compares the memory it is
    given, too: what one address says about its memory is not used for another address.
    """

    local: LocalRank
    _found: dict[str, tuple[tuple[Planes, ...], tuple[Route, ...]]] = field(default_factory=dict)

    def of(self, agent: str, memory: Sequence[Planes]) -> tuple[Route, ...]:
        """Returns one route per kind of planes; raises ValueError if the two memories do not fit."""
        before, routes = self._found.get(agent, ((), ()))
        if before is not memory and before != tuple(memory):
            reason = misfit(self.local.memory, memory)
            if reason:
                raise ValueError(reason)
            pairs = zip(self.local.memory, memory, strict=True)
            routes = tuple(Route(here, there) for here, there in pairs)
            self._found[agent] = tuple(memory), routes
        return routes

    def forget(self, agent: str) -> None:
        self._found.pop(agent, None)

    def __len__(self) -> int:
        return len(self._found)

    @staticmethod
    def ranges(
        routes: tuple[Route, ...], groups: Sequence[tuple[KernelBlocks, KernelBlocks, int]], end_token: int
    ) -> Descriptors:
        """Returns the descriptors of a transfer.

        Args:
            groups: per KV-cache group its local and remote blocks, and the first token to move.
            end_token: one past the last token to move.

        Raises:
            ValueError: as `Route.descriptors`, or there is no token to move.
        """
        found = [
            route.descriptors(here, there, first, end_token)
            for here, there, first in groups
            if first < end_token
            for route in routes
        ]
        if not found:
            raise ValueError(f"found no token before {end_token}; expected at least one to move")
        return Descriptors(*(np.concatenate([getattr(one, side) for one in found]) for side in ("local", "remote")))


def kernel_blocks(blocks: Sequence[LogicalBlock], kernel_blocks_per_block: int) -> Sequence[KernelBlock]:
    """Returns the kernel blocks that make up these logical blocks. The only place that converts them; called on the
    transfer thread.

    Args:
        kernel_blocks_per_block: of the rank that owns the blocks.
    """
    if kernel_blocks_per_block == 1:
        return cast("Sequence[KernelBlock]", blocks)
    numbers = np.asarray(blocks, np.int64)[:, None] * kernel_blocks_per_block + np.arange(kernel_blocks_per_block)
    found: list[KernelBlock] = numbers.reshape(-1).tolist()
    return found


def kernel_blocks_of(group: BlockRange, kernel_blocks_per_block: int) -> KernelBlocks:
    """Convert a block range of a manifest or of a `FetchSpec`, as `kernel_blocks`."""
    return KernelBlocks(kernel_blocks(group.block_ids, kernel_blocks_per_block), group.first_token)


def contributors(
    prefill: RemotePrefill, *, tp_rank: int, tp_size: int, is_latent: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ranks of prefill whose bytes a rank of decode needs, and the ranks it only has to release.

    Every rank of prefill is in the result for at least one rank of decode, so that it learns when it is done. A latent
    is the same on all ranks, so one rank that has it is enough.

    Raises:
        ValueError: neither tensor-parallel size divides the other.
    """
    if prefill.tp_size <= tp_size and tp_size % prefill.tp_size == 0:
        return (tp_rank // (tp_size // prefill.tp_size),), ()
    if prefill.tp_size % tp_size or prefill.tp_size > MAX_TP_SIZE:
        raise ValueError(f"prefill's tensor-parallel size {prefill.tp_size} and decode's {tp_size} do not divide")
    part = prefill.tp_size // tp_size
    ranks = tuple(range(tp_rank * part, (tp_rank + 1) * part))
    return (ranks[:1], ranks[1:]) if is_latent else (ranks, ())


def peers_of(prefill: RemotePrefill, ranks: Sequence[int]) -> tuple[Peer, ...]:
    """Returns the addresses of some ranks of an engine."""
    engine_id = EngineId(prefill.engine_id)
    return tuple(Peer(engine_id, prefill.host, prefill.port, prefill.tp_size, rank) for rank in ranks)


def fits(local: LocalRank, rank: RankHandshake) -> str:
    """Returns why a peer's rank cannot exchange KV with this one; "" if it can."""
    sizes = (local.tp_size, rank.tp_size)
    if max(sizes) % min(sizes):
        return f"tensor parallel {rank.tp_size}; expected a multiple or a divisor of {local.tp_size}"
    return misfit(local.memory, rank.memory)
