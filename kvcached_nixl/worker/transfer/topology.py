# SPDX-License-Identifier: Apache-2.0
"""This rank's place and memory, which ranks of prefill contribute to it, and the byte ranges between it and a peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.handshake import Process, RankHandshake, differences, read_answer, read_rank
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import KernelBlockRange, Peer
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, exchanged, moves, named_planes, spacing
from kvcached_nixl.worker.geometry.descriptors import Descriptors, Route, misfit, split

GroupRoutes: TypeAlias = tuple[tuple[Route, ...], ...]
"""Per KV-cache group, one route per kind of planes."""


@dataclass(frozen=True)
class LocalRank:
    """A worker's place in its engine, and how its blocks are counted.

    Attributes:
        groups: where it keeps each KV-cache group.
        kv_shares: how many ranks hold KV of their own, at most. If there are more ranks, each of them has copies.
        pp_size, pp_rank: its pipeline stage, which keeps some of the layers.
        needs_equal_blocks: it copies whole slots of a slab into blocks that vLLM has zeroed, so what a peer with
            smaller blocks has not written would be there in place of zeroes.
    """

    engine_id: EngineId
    tp_size: int
    tp_rank: int
    groups: tuple[GroupMemory, ...]
    kv_shares: int
    needs_equal_blocks: bool = False
    pp_size: int = 1
    pp_rank: int = 0

    @property
    def rank(self) -> int:
        """Its number among all workers of its engine, as vLLM counts them."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def kernel_block_sizes(self) -> tuple[int, ...]:
        """Per KV-cache group, tokens in a kernel block."""
        return tuple(group.kernel_block_size for group in self.groups)

    def contributors(self, prefill: RemotePrefill) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
        """Returns the ranks of prefill whose bytes this rank of decode needs, and the ranks it only has to release.
        Raises `ValueError` as `contributors`."""
        if self.pp_size > 1:
            raise ValueError("decode has pipeline stages; expected --pipeline-parallel-size 1 on decode servers")
        found = contributors(prefill.tp_size, self.tp_rank, self.tp_size, self.kv_shares)
        where, stages = (EngineId(prefill.engine_id), prefill.host, prefill.port), range(prefill.pp_size)
        writers, others = (
            tuple(Peer(*where, prefill.tp_size, rank, prefill.pp_size, stage) for stage in stages for rank in ranks)
            for ranks in found
        )
        return writers, others

    def step_tokens(self, block_sizes: Sequence[int]) -> int:
        """Ranges of a request that is moved in several parts end at multiples of this many tokens: where blocks of all
        KV-cache groups of both sides end. ``block_sizes``: tokens in the peer's kernel blocks, per group."""
        return math.lcm(*self.kernel_block_sizes, *block_sizes)


@dataclass(eq=False)
class ConnectedPeer:
    """A rank after its handshake.

    Attributes:
        agent: its name in the transport, which changes whenever the rank restarts.
        process: its own, if it is one of this host whose end is visible.
    """

    agent: str
    incarnation: str
    rank: RankHandshake
    process: Process | None = None
    _routes: dict[bool, GroupRoutes] = field(default_factory=dict)

    def routes(self, local: LocalRank, *, is_prefill: bool) -> GroupRoutes:
        """As `routes`, computed once."""
        if is_prefill not in self._routes:
            self._routes[is_prefill] = routes(local.groups, self.rank.groups, is_prefill=is_prefill)
        return self._routes[is_prefill]


def routes(local: Sequence[GroupMemory], remote: Sequence[GroupMemory], *, is_prefill: bool) -> GroupRoutes:
    """Returns, per KV-cache group, one route per kind of planes that prefill's rank moves to decode's. ``is_prefill``:
    the local rank is prefill's. Raises `ValueError`: the two sides do not fit."""
    if reason := _misfit(local, remote):
        raise ValueError(reason)
    return tuple(
        tuple(
            Route(here, there)
            for here, there in zip(*exchanged(ours, theirs), strict=True)
            if moves(here, there, is_prefill=is_prefill)
        )
        for ours, theirs in zip(local, remote, strict=True)
    )


def ranges(
    of_groups: GroupRoutes, groups: Sequence[tuple[KernelBlockRange, KernelBlockRange, int]], end_token: int
) -> Descriptors:
    """Returns the descriptors of a transfer of tokens before ``end_token``; none if other ranks move all of it.

    ``groups``: per KV-cache group its local and remote blocks, and the first token to move. Raises `ValueError` as
    `Route.descriptors`; or there is no token to move, or other groups than the routes are for.
    """
    if all(first >= end_token for _, _, first in groups):
        raise ValueError(f"found no token before {end_token}; expected at least one to move")
    found = [
        route.descriptors(here, there, first, end_token)
        for (here, there, first), of_group in zip(groups, of_groups, strict=True)
        if first < end_token
        for route in of_group
    ]
    if not found:
        return Descriptors.none()
    return Descriptors(*(np.concatenate([getattr(one, side) for one in found]) for side in ("local", "remote")))


def kernel_blocks_of(ranges: Sequence[BlockRange], groups: Sequence[GroupMemory]) -> tuple[KernelBlockRange, ...]:
    """Returns the kernel blocks that make up the logical blocks of a manifest or of a `FetchSpec`. The only place that
    converts them. ``groups``: on the rank that owns the blocks. Raises `ValueError`: there are not as many as ranges.
    """
    return tuple(
        KernelBlockRange(one.first_token, split(one.block_ids, group.kernel_blocks_per_block))
        for one, group in zip(ranges, groups, strict=True)
    )


def contributors(
    prefill_size: int, tp_rank: int, tp_size: int, kv_shares: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `LocalRank.contributors`, by number.

    Every rank of prefill is in the result for at least one rank of decode, so that it learns when it is done. Of ranks
    that hold copies of the same KV, which lie side by side, one is enough: the bytes of two may differ in their last
    bits, where each rank rounds its own sums. Raises `ValueError`: neither tensor-parallel size divides the other.
    """
    if prefill_size <= tp_size and tp_size % prefill_size == 0:
        return (tp_rank // (tp_size // prefill_size),), ()
    if prefill_size % tp_size or prefill_size > MAX_TP_SIZE:
        raise ValueError(f"prefill's tensor-parallel size {prefill_size} and decode's {tp_size} do not divide")
    part = prefill_size // tp_size
    ranks = range(tp_rank * part, (tp_rank + 1) * part)
    copies = 1 if prefill_size % kv_shares else prefill_size // kv_shares
    writers = tuple(rank for rank in ranks if rank == ranks.start or rank % copies == 0)
    return writers, tuple(rank for rank in ranks if rank not in writers)


def examine(
    local: LocalRank, expected: str, address: Peer, compatibility: str, metadata: bytes
) -> tuple[str, RankHandshake]:
    """Check the handshake answer from an address. Returns the engine's incarnation and what the rank is. ``expected``:
    this rank's compatibility string.

    Raises:
        HandOverFailed: this rank and that one must not exchange KV, or another rank or engine answered.
        ValueError: the answer cannot be read.
    """
    where = f"engine {address.engine_id} at {address.host}:{address.port}"
    if compatibility != expected:
        raise HandOverFailed(
            FailureCause.REFUSED,
            f"{where} is another kind of engine: {differences(compatibility, expected)}. Run the same vLLM, kvcached, "
            "kvcached_nixl and model with the same dtype and transfer_mode on both sides; `python -m kvcached_nixl` "
            "prints what each has.",
        )
    answer = read_answer(metadata)
    rank = read_rank(answer.rank)
    if _place_of(rank) != _place_of(address):
        raise HandOverFailed(
            FailureCause.UNREACHABLE if rank.engine_id != address.engine_id else FailureCause.REFUSED,
            f"engine {rank.engine_id} ({_shown(rank)}) answers at {address.host}:{address.port}; expected "
            f"{_shown(address)} of engine {address.engine_id}",
        )
    misfit = fits(local, rank)
    if misfit:
        raise HandOverFailed(FailureCause.REFUSED, f"{where} does not fit: {misfit}")
    return answer.incarnation, rank


def _place_of(one: RankHandshake | Peer) -> tuple[EngineId, int, int, int, int]:
    return one.engine_id, one.tp_size, one.tp_rank, one.pp_size, one.pp_rank


def _shown(one: RankHandshake | Peer) -> str:
    stage = "" if one.pp_size == 1 else f" in stage {one.pp_rank} of {one.pp_size}"
    return f"rank {one.tp_rank} of {one.tp_size}{stage}"


def fits(local: LocalRank, rank: RankHandshake) -> str:
    """Returns why a peer's rank cannot exchange KV with this one; "" if it can."""
    sizes = (local.tp_size, rank.tp_size)
    if max(sizes) % min(sizes):
        return f"tensor parallel {rank.tp_size}; expected a multiple or a divisor of {local.tp_size}"
    theirs = tuple(group.kernel_block_size for group in rank.groups)
    if local.needs_equal_blocks and theirs != local.kernel_block_sizes:
        return f"kernel blocks of {theirs} tokens; expected {local.kernel_block_sizes}, as KV is staged beside states"
    if min(local.pp_size, rank.pp_size) > 1:
        return f"{rank.pp_size} pipeline stages; expected 1, since this engine has {local.pp_size}"
    misfit = _misfit(local.groups, rank.groups) or _uncovered(local, rank)
    if not misfit and local.pp_size == rank.pp_size and named_planes(local.groups) != named_planes(rank.groups):
        misfit = "other layers, or they are in other KV-cache groups; expected those that this rank has"
    return misfit


def _uncovered(local: LocalRank, rank: RankHandshake) -> str:
    """Returns in which group two ranks count copies as no model has them, so that decode would wait for heads that no
    rank moves; or the ranks of a peer with more ranks do not hold all that this rank needs. "" if in none."""
    writers: tuple[int, ...] = ()
    if rank.tp_size > local.tp_size:
        writers, _ = contributors(rank.tp_size, local.tp_rank, local.tp_size, local.kv_shares)
    for place, groups in enumerate(zip(local.groups, rank.groups, strict=True)):
        for here, there in zip(*exchanged(*groups), strict=True):
            # The engine with more ranks has as many copies, or more.
            fewer, more = (here, there) if local.tp_size <= rank.tp_size else (there, here)
            if fewer.copies > more.copies or (local.tp_size == rank.tp_size and here.copies != there.copies):
                return f"in KV-cache group {place} {there.copies} copies of each head; expected another number"
            differing = sum(writer % spacing(there, here) == 0 for writer in writers)
            if writers and differing * there.num_heads < here.num_heads:
                return (
                    f"in KV-cache group {place} {there.num_heads} heads on each of {differing} ranks that differ; "
                    f"expected {here.num_heads} together"
                )
    return ""


def _misfit(local: Sequence[GroupMemory], remote: Sequence[GroupMemory]) -> str:
    """Returns why two ranks cannot exchange the KV of their groups; "" if they can."""
    if len(local) != len(remote):
        return f"{len(remote)} KV-cache groups; expected {len(local)}"
    for place, (here, there) in enumerate(zip(local, remote, strict=True)):
        if reason := misfit(*exchanged(here, there)):
            return f"in KV-cache group {place} {reason}"
    return ""
