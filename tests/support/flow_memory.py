# SPDX-License-Identifier: Apache-2.0
"""A rank's KV memory in which wrong bytes show, and an engine's block pool that behaves like vLLM's.

Every cell has a value that follows from the tokens up to its own, its plane and its head, so wrong bytes show wherever
they come from. Free blocks are poisoned at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcached_nixl.wire.headroom import BlockUsage
from kvcached_nixl.wire.planes import Planes

if TYPE_CHECKING:
    from support.flow_engine import Engine, Request

CELL_BYTES = 8
NUM_PLANES = 2
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
_MASK = 2**64 - 1
_MIX = 0x9E37_79B9_7F4A_7C15
VOCABULARY = 50

Cells = npt.NDArray[np.uint64]


class Sequence64:
    """A prompt and every token generated after it; a 64-bit number per token stands for it and all before it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self._sums: list[int] = []

    def sums(self, end: int) -> Cells:
        """Returns the numbers of the first ``end`` tokens. Draws tokens that do not exist yet."""
        while len(self._sums) < end:
            place = len(self._sums)
            before = self._sums[-1] if self._sums else 1
            if place == len(self.tokens):
                self.tokens.append((before >> 17) % VOCABULARY)
            self._sums.append(((before ^ (self.tokens[place] + 1)) * _MIX + 7) & _MASK)
        return np.array(self._sums[:end], dtype=np.uint64)

    def token(self, place: int) -> int:
        self.sums(place + 1)
        return self.tokens[place]


def kv(sums: Cells, planes: range, heads: range) -> Cells:
    """Returns the cells of tokens, as (planes, tokens, heads)."""
    layers = np.arange(planes.start + 1, planes.stop + 1, dtype=np.uint64)[:, None, None]
    numbers = np.arange(heads.start + 1, heads.stop + 1, dtype=np.uint64)[None, None, :]
    with np.errstate(over="ignore"):
        return sums[None, :, None] * np.uint64(0x2545_F491_4F6C_DD1D) + layers * np.uint64(1 << 40) + numbers


@dataclass(frozen=True)
class Shape:
    """How an engine lays its KV out.

    Attributes:
        block_size: tokens in a logical block.
        ratio: kernel blocks in a logical block.
        total_heads: KV heads of the model.
        is_contiguous: the planes of a block lie side by side, as kvcached's contiguous layout has them.
    """

    tp_size: int = 1
    block_size: int = 4
    ratio: int = 1
    num_blocks: int = 40
    total_heads: int = 2
    is_latent: bool = False
    is_head_major: bool = False
    is_contiguous: bool = False
    pp_size: int = 1

    @property
    def kv_shares(self) -> int:
        return 1 if self.is_latent else self.total_heads

    def planes(self, pp_rank: int) -> range:
        first, end = (stage * NUM_PLANES // self.pp_size for stage in (pp_rank, pp_rank + 1))
        return range(first, end)

    def heads(self, tp_rank: int) -> range:
        if self.is_latent:
            return range(1)
        first = tp_rank * self.total_heads // self.tp_size
        return range(first, first + max(1, self.total_heads // self.tp_size))

    @property
    def copies(self) -> int:
        return max(1, self.tp_size // (1 if self.is_latent else self.total_heads))


class RankMemory:
    """``cells[plane, kernel block, token, head]`` of one rank."""

    def __init__(self, shape: Shape, tp_rank: int, pp_rank: int = 0) -> None:
        self.shape, self.heads, self.layers = shape, shape.heads(tp_rank), shape.planes(pp_rank)
        num_planes = len(self.layers)
        self.tokens = shape.block_size // shape.ratio
        blocks = shape.num_blocks * shape.ratio
        inner = (len(self.heads), self.tokens) if shape.is_head_major else (self.tokens, len(self.heads))
        outer = (blocks, num_planes) if shape.is_contiguous else (num_planes, blocks)
        self.array = np.full((*outer, *inner), POISON, dtype=np.uint64)
        planes = self.array.swapaxes(0, 1) if shape.is_contiguous else self.array
        self.cells = planes.swapaxes(2, 3) if shape.is_head_major else planes
        self.begin = self.array.ctypes.data
        self.end = self.begin + self.array.nbytes
        stride = self.cells.strides
        self.planes = Planes(
            bases=tuple(self.begin + plane * stride[0] for plane in range(num_planes)),
            keys=tuple(self.layers),
            block_stride_bytes=stride[1],
            token_stride_bytes=stride[2],
            head_stride_bytes=stride[3],
            cell_bytes=CELL_BYTES,
            num_blocks=blocks,
            block_size=self.tokens,
            num_heads=len(self.heads),
            first_head=self.heads.start,
            copies=shape.copies,
            copy=tp_rank % shape.copies,
        )

    def _places(self, blocks: Sequence[int], begin: int, end: int) -> tuple[Any, Any]:
        token = np.arange(begin, end)
        logical = np.asarray(blocks)[token // self.shape.block_size]
        return logical * self.shape.ratio + token % self.shape.block_size // self.tokens, token % self.tokens

    def fill(self, blocks: Sequence[int], sums: Cells, begin: int, end: int) -> None:
        kernel, token = self._places(blocks, begin, end)
        self.cells[:, kernel, token] = kv(sums[begin:end], self.layers, self.heads)

    def wrong(self, blocks: Sequence[int], sums: Cells, end: int) -> list[int]:
        """Returns the tokens before ``end`` whose cells are wrong."""
        kernel, token = self._places(blocks, 0, end)
        same = self.cells[:, kernel, token] == kv(sums[:end], self.layers, self.heads)
        return np.flatnonzero(~same.all(axis=(0, 2))).tolist()

    def poison(self, block: int) -> None:
        ratio = self.shape.ratio
        self.cells[:, block * ratio : (block + 1) * ratio] = POISON

    def blocks_at(self, ranges: npt.NDArray[np.int64]) -> set[int]:
        """Returns the logical blocks in which ranges of addresses lie."""
        is_contiguous = self.shape.is_contiguous
        size = self.array.nbytes if is_contiguous else self.array[0].nbytes
        block_bytes = (self.array[0] if is_contiguous else self.array[0, 0]).nbytes * self.shape.ratio
        found = set()
        for address, length in ranges.tolist():
            begin = (address - self.begin) % size
            found.update(range(begin // block_bytes, (begin + length - 1) // block_bytes + 1))
        return found


@dataclass
class Pool:
    """An engine's blocks: who holds each, which are free, and which full blocks are in the prefix cache.

    As in vLLM, a free block in the prefix cache keeps its bytes until it is allocated.

    Attributes:
        newest_first: allocate the block that was freed last (kvcached), not the one that was freed first (vLLM).
        are_shared: another connector may load KV into the blocks, and that load may fail.
        is_copied: another connector copies blocks.
        neighbour_leaves_blocks: how many another engine that waits leaves to this one; None if none waits.
        is_neighbour_stalled: whether that engine runs nothing.
        is_scheduling: a step is being built, in which vLLM may copy blocks that only the prefix cache keeps.
        has_retired: blocks came free since `end_step`, which moves their pages to the reserve.
        has_reserve: pages of blocks that came free are still mapped, until `trim`.
        limit_blocks: as set by ``kvctl limit``; None for no limit. As in kvcached, it counts from the next allocation
            or `apply_limit` on; vLLM tries none that the limit of before does not allow.
        num_looked_at: how many of a request's first blocks were added to the prefix cache, or found there.
    """

    is_producer = False
    most_running = 1000

    engine: Engine = field(repr=False)
    shape: Shape
    memories: list[RankMemory]
    caches_prefixes: bool
    are_shared: bool = False
    newest_first: bool = False
    is_copied: bool = False
    holders: list[list[Request]] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    free: dict[int, None] = field(default_factory=dict)
    sum_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cached: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_looked_at: dict[str, int] = field(default_factory=dict)
    salts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    limit_blocks: int | None = None
    applied_limit_blocks: int | None = None
    neighbour_leaves_blocks: int | None = None
    is_neighbour_stalled: bool = True
    is_scheduling: bool = False
    has_retired: bool = False
    has_reserve: bool = False

    @property
    def stalled(self) -> list[str]:
        return self.engine.next_up()

    @property
    def is_paused(self) -> bool:
        return self.engine.is_paused and not self.engine.running

    def __post_init__(self) -> None:
        self.holders = [[] for _ in range(self.shape.num_blocks)]
        # Block 0 is vLLM's null block.
        self.free = dict.fromkeys(range(1, self.shape.num_blocks))

    def hits(self, request: Request) -> list[int]:
        """Returns cached blocks with a prefix of the request. The last token is always computed."""
        size, found = self.shape.block_size, []
        if self.caches_prefixes:
            sums = request.sums(request.num_tokens)
            for end in range(size, request.num_tokens, size):
                block = self.cached.get((*request.family, int(sums[end - 1])))
                if block is None:
                    break
                found.append(block)
        return found

    def _missing(self, request: Request, hits: Sequence[int], num_tokens: int) -> int:
        table = self.tables.get(request.request_id, [])
        return max(0, -(-num_tokens // self.shape.block_size) - len(table) - len(hits))

    def fits(self, request: Request, hits: Sequence[int], num_tokens: int) -> bool:
        """Whether there are enough free blocks for ``num_tokens`` of a request."""
        return self._missing(request, hits, num_tokens) <= self._num_free(hits)

    def _num_free(self, hits: Sequence[int]) -> int:
        free = len(self.free)
        if self.applied_limit_blocks is not None:
            free = min(free, self.applied_limit_blocks - (self.shape.num_blocks - 1 - free))
        return free - sum(block in self.free for block in hits)

    def allocate(self, request: Request, hits: Sequence[int], num_tokens: int) -> list[int] | None:
        """Allocates blocks for ``num_tokens``. Returns the new ones, or None if there are too few."""
        if not self.fits(request, hits, num_tokens):
            return None
        self.apply_limit()
        if not self.fits(request, hits, num_tokens):
            return None
        missing = self._missing(request, hits, num_tokens)
        for block in hits:
            self.free.pop(block, None)
            self.holders[block].append(request)
        new = list(hits)
        for _ in range(missing):
            block = next(reversed(self.free) if self.newest_first else iter(self.free))
            del self.free[block]
            self._evict(block)
            self.holders[block].append(request)
            new.append(block)
        self.tables.setdefault(request.request_id, []).extend(new)
        return new

    def cache(self, request: Request, num_tokens: int) -> None:
        """Adds the full blocks of a request's first tokens to the prefix cache."""
        if not self.caches_prefixes:
            return
        size, table = self.shape.block_size, self.tables.get(request.request_id, [])
        sums, num_full = request.sums(num_tokens), min(num_tokens // size, len(table))
        for place in range(self.num_looked_at.get(request.request_id, 0), num_full):
            key, block = (*request.family, int(sums[(place + 1) * size - 1])), table[place]
            if block not in self.sum_of and key not in self.cached:
                self.sum_of[block], self.cached[key] = key, block
        self.num_looked_at[request.request_id] = max(num_full, self.num_looked_at.get(request.request_id, 0))

    def empty(self, request: Request) -> None:
        """Frees a request's blocks."""
        self.num_looked_at.pop(request.request_id, None)
        self._give([(block, request) for block in reversed(self.tables.pop(request.request_id, []))])

    def _give(self, blocks: list[tuple[int, Request]]) -> None:
        for block, request in blocks:
            self.holders[block].remove(request)
            if not self.holders[block]:
                assert block not in self.free, "a block was given back twice"
                self.free[block] = None
                if block not in self.sum_of:
                    self.has_retired = True
                    for memory in self.memories:
                        memory.poison(block)

    def _evict(self, block: int) -> None:
        key = self.sum_of.pop(block, None)
        if key is not None:
            del self.cached[key]
        for memory in self.memories:
            memory.poison(block)

    # ----------------------------------------------------------------------------- called by kvcached_nixl

    @property
    def num_running_blocks(self) -> int:
        return len({block for one in self.engine.running for block in self.tables[one.request_id]})

    @property
    def goes_by_priority(self) -> bool:
        return self.engine.kind.goes_by_priority

    @property
    def admits(self) -> bool:
        return self.engine.admits and not self.engine.is_paused

    @property
    def num_free(self) -> int:
        return self._num_free(())

    @property
    def num_used(self) -> int:
        return self.usage().num_used

    def num_needed(self, request_id: str) -> int:
        request = self.engine.requests[request_id]
        return self._missing(request, (), request.num_prompt_tokens)

    def num_cached_tokens(self, request_id: str) -> int:
        return len(self.hits(self.engine.requests[request_id])) * self.shape.block_size

    def hold(self, request_id: str) -> None:
        self.engine.hold(request_id)

    def release(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        self.engine.release(request_id, params)

    def limit_chunks(self, num_tokens: int) -> None:
        self.engine.chunk_tokens = num_tokens if len(self.engine.running) > 1 else 0

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        return any(blocks and one not in request_ids for one, blocks in self.tables.items())

    @property
    def starved(self) -> tuple[str, int] | None:
        head = self.engine.head()
        if head is None:
            return None
        hits = [] if head.num_computed else self.hits(head)
        missing = self._missing(head, hits, head.num_tokens) - self._num_free(hits)
        return (head.request_id, missing) if missing > 0 else None

    @property
    def blocks_over_limit(self) -> int:
        return self._in_use_above(self.limit_blocks)

    def _in_use_above(self, limit_blocks: int | None) -> int:
        used = self.shape.num_blocks - 1 - len(self.free) + self.num_cached
        return 0 if limit_blocks is None else max(0, used - limit_blocks)

    def apply_limit(self) -> None:
        self.applied_limit_blocks = self.limit_blocks

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        return False

    def usage(self) -> BlockUsage:
        return BlockUsage(len(self.free), len(self.holders) - len(self.free), 0, 0)

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        return self._in_use_above(self.neighbour_leaves_blocks), self.is_neighbour_stalled

    def neighbours_served(self) -> None:
        """They say again what they still want."""

    def end_step(self) -> None:
        """As with asynchronous scheduling, where steps in flight may still use the pages."""
        self.has_reserve |= self.has_retired
        self.has_retired = False

    def trim(self) -> int:
        self.has_reserve = False
        return 0

    @property
    def num_cached(self) -> int:
        return sum(block in self.sum_of for block in self.free)

    def drop_cached(self, num_blocks: int) -> int:
        assert not self.is_scheduling, "it may be copied from"
        found = [block for block in self.free if block in self.sum_of][:num_blocks]
        for block in found:
            self._evict(block)
        self.has_retired |= bool(found)
        return len(found)

    def take(self, request_id: str) -> list[Any]:
        taken = []
        self.num_looked_at.pop(request_id, None)
        for block in reversed(self.tables.pop(request_id, [])):
            holder = next(one for one in self.holders[block] if one.request_id == request_id)
            taken.append((block, holder))
        return taken

    def give_back(self, blocks: list[Any]) -> None:
        self._give(blocks)

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        return self.engine.lose(request_id, recomputes)

    def outdate(self, is_meant: Callable[[int, str], bool], *, even_waiting: bool = False) -> set[str]:
        holding = {one.request_id: one for held in self.holders for one in held if one.request_id in self.tables}
        meant = [one for one in holding.values() if is_meant(one.adapter, str(one.adapter))]
        for one in meant:
            one.salt = one.salt or next(self.salts)
        kept = {block for one in holding.values() if one not in meant for block in self.tables[one.request_id]}
        for block in set(self.sum_of) - kept:
            if block in self.free:
                self._evict(block)
            else:
                del self.cached[self.sum_of.pop(block)]
        return {one.request_id for one in meant}

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return (0,)
