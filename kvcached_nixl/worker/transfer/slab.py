# SPDX-License-Identifier: Apache-2.0
"""The slab, and who gets its slots: memory outside kvcached's, registered once, for staging KV where kvcached's pages
must not be registered. Once per worker.

A slab has an area for each region of the KV cache, and blocks with the same bytes in each area as a kernel block has in
the region. So the slab is described to a peer by the same planes at other addresses, with its own block ids. A slot is
one of these blocks; beside states, as many as a logical block is split into.

With sleep mode, vLLM's worker allocates its KV cache and calls its connector inside a memory pool whose pages
``/sleep`` unmaps and ``/wake_up`` replaces: a registration would point at unmapped memory, then at other memory. The
pool applies to the thread that entered it (``torch.cuda.use_mem_pool``), so the slab is allocated on another thread,
and stays mapped.
Sources: ``initialize_from_config`` in ``v1/worker/gpu_worker.py``, ``device_allocator/cumem.py``.

Two engines that wait for each other must never deadlock, so KV that waits for a peer can never take the last slots from
KV that is moving:

    PARKED      holds KV that decode has not asked for yet; for as long as a lease lasts
    SENDING     holds KV that is now written to a peer, or read by it; for as long as that lasts
    RECEIVING   receives KV that a peer has ready, by its WRITE or this rank's READ; for as long as that lasts

A share of the slots is kept for each of the last two. SENDING may wait for a peer's RECEIVING. RECEIVING waits for no
peer: its slots are taken only when the source is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from kvcached_nixl.transport.agent import select_device
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.worker.geometry.layout import Layout, Region

_ALIGNED_BYTES = 4096
_PIECE_BLOCKS = 512


class Slab:
    """See the module.

    Args:
        layout: of the KV cache, whose blocks are copied.
        device: where the slab is. Host memory is pinned if the KV cache is on an accelerator.

    Attributes:
        num_slots, blocks_per_slot: slots, and kernel blocks in a slot (`Layout.blocks_per_slot`).
        extent: (address, bytes) to register.

    Threads: `gather` and `scatter` are called on one thread, the copier's; the rest on any.
    """

    def __init__(self, layout: Layout, num_slots: int, device: torch.device) -> None:
        self.num_slots, self.blocks_per_slot = num_slots, layout.blocks_per_slot
        self._num_blocks = layout.num_blocks
        self._regions = layout.regions
        blocks = [blocks for _, blocks in layout.areas()]
        is_elsewhere = device.type != layout.device.type
        num_blocks = num_slots * layout.blocks_per_slot
        begins = list(_begins(layout.regions, num_blocks))

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            select_device(layout.device.type, layout.device.index or 0)
            return (
                # What was never written must be finite: kernels read behind a request's last token, too.
                torch.zeros(begins[-1] + _ALIGNED_BYTES, dtype=torch.uint8, device=device, pin_memory=is_elsewhere),
                torch.empty(num_blocks, dtype=torch.int64, device=layout.device),
            )

        with ThreadPoolExecutor(1, "kvcached-nixl-slab") as outside:
            # Block ids of the copy under way lie beside the KV cache.
            memory, self._ids = outside.submit(make).result()
        # A copy to the host first makes a second copy of the piece on the device.
        self._most_blocks = _PIECE_BLOCKS if is_elsewhere else num_blocks
        first = -memory.data_ptr() % _ALIGNED_BYTES
        self._areas = [
            memory[first + begin :][: num_blocks * region.block_bytes].view(num_blocks, region.block_bytes)
            for region, begin in zip(layout.regions, begins, strict=False)
        ]
        # (blocks of the cache, blocks of the slab) of each region.
        self._copied = [_in_words(*pair) for pair in zip(blocks, self._areas, strict=True)]
        self.extent = (memory.data_ptr() + first, begins[-1])

    @staticmethod
    def bytes_for(layout: Layout, num_slots: int) -> int:
        return list(_begins(layout.regions, num_slots * layout.blocks_per_slot))[-1]

    def groups(self, groups: Sequence[GroupMemory]) -> tuple[GroupMemory, ...]:
        """Returns the planes of the KV cache's groups at their addresses in the slab."""
        return tuple(
            msgspec.structs.replace(
                group, planes=tuple(map(self._in_slab, group.planes)), parts=tuple(map(self._in_slab, group.parts))
            )
            for group in groups
        )

    def _in_slab(self, planes: Planes) -> Planes:
        # A group with states has a block in a slot, as it has one where the others have several kernel blocks.
        in_slot = self.blocks_per_slot * planes.num_blocks // self._num_blocks
        bases = tuple(map(self._moved, planes.bases))
        return msgspec.structs.replace(planes, bases=bases, num_blocks=self.num_slots * in_slot)

    def gather(self, blocks: Sequence[int], staged: Sequence[int]) -> None:
        """Copy blocks of the cache into those of the slab, pairwise; on an accelerator, in the current stream."""
        for (source, area), ids, run in self._runs(blocks, staged):
            target = area[run]
            if target.device == source.device:
                torch.index_select(source, 0, ids, out=target)
            else:
                target.copy_(source.index_select(0, ids), non_blocking=True)

    def scatter(self, staged: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks of the slab into those of the cache, pairwise; on an accelerator, in the current stream."""
        for (target, area), ids, run in self._runs(blocks, staged):
            target.index_copy_(0, ids, area[run].to(target.device, non_blocking=True))

    @property
    def areas(self) -> list[tuple[int, torch.Tensor]]:
        """Each area's address and its blocks as bytes, (num_blocks, block_bytes)."""
        return [(int(area.data_ptr()), area) for area in self._areas]

    def _runs(
        self, blocks: Sequence[int], staged: Sequence[int]
    ) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, slice]]:
        """Yields (blocks, area), block ids and the run, for each run of the slab's blocks and each region."""
        if len(blocks) != len(staged):
            raise ValueError(f"found {len(blocks)} blocks and {len(staged)} of the slab; expected as many")
        ids = self._ids[: len(blocks)].copy_(torch.tensor(blocks, dtype=torch.int64))
        ends = [i for i in range(1, len(staged)) if staged[i] != staged[i - 1] + 1]
        cuts = sorted({0, *ends, *range(0, len(staged), self._most_blocks), len(staged)})
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                run = slice(staged[begin], staged[begin] + end - begin)
                for pair in self._copied:
                    yield pair, ids[begin:end], run

    def _moved(self, base: int) -> int:
        """Returns a plane's address in the slab: its offset in the area is its offset in the region."""
        for region, area in zip(self._regions, self._areas, strict=True):
            if 0 <= base - region.address < region.block_bytes * self.blocks_per_slot:
                return base - region.address + int(area.data_ptr())
        raise ValueError(f"found a plane at {base:#x}; expected it in the first block of a region")


def _in_words(blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View the same memory as the largest integers that divide it: `index_copy_` costs per element, not per byte."""
    for word in (torch.int64, torch.int32, torch.int16):
        places = (one for tensor in (blocks, slots) for one in (tensor.shape[1], tensor.storage_offset()))
        if not any(place % word.itemsize for place in places):
            return blocks.view(word), slots.view(word)
    return blocks, slots


def _begins(regions: Sequence[Region], num_blocks: int) -> Iterator[int]:
    """Yields the offset of each area, then the end of the last one."""
    begin = 0
    for region in regions:
        yield begin
        begin += -(-num_blocks * region.block_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    yield begin


class Use(Enum):
    """What slots are taken for."""

    PARKED = "parked"
    SENDING = "sending"
    RECEIVING = "receiver"


class SlabUse(NamedTuple):
    """A slab's bytes and slots, how many of them are taken for each `Use`, and how many hand-overs wait for some."""

    num_bytes: int
    num_slots: int
    parked: int
    sending: int
    receiving: int
    waiting: int

    @property
    def is_idle(self) -> bool:
        return not (self.parked or self.sending or self.receiving or self.waiting)


class Slots:
    """Which slots are taken, and for what. On the transfer thread. ``kept``: slots kept for SENDING, and as many for
    RECEIVING; PARKED never gets them. Raises `ValueError`: there are fewer slots than are kept, or none are kept."""

    def __init__(self, count: int, kept: int) -> None:
        if not 0 < 2 * kept <= count:
            raise ValueError(f"found {count} slots; expected at least {2 * kept}, and {kept} to be above 0")
        self.count = count
        self._kept = kept
        self._is_free = np.ones(count, dtype=bool)
        self._used = dict.fromkeys(Use, 0)

    def used(self, use: Use) -> int:
        return self._used[use]

    def most(self, use: Use) -> int:
        """Most slots that may be taken for a use, when none are taken."""
        return self.count - self._kept * sum(other is not use for other in (Use.SENDING, Use.RECEIVING))

    def available(self, use: Use) -> int:
        others = [other for other in (Use.SENDING, Use.RECEIVING) if other is not use]
        spared = sum(max(0, self._kept - self._used[other]) for other in others)
        return max(0, self.count - sum(self._used.values()) - spared)

    def take(self, wanted: int, use: Use, at_least: int = 1) -> list[int]:
        """Take up to ``wanted`` slots, consecutive ones if possible; none if fewer than ``at_least`` are available."""
        number = min(wanted, self.available(use))
        if number < max(1, at_least):
            return []
        free = np.flatnonzero(self._is_free)
        # The first run of so many; without one, those that are free.
        begins = np.flatnonzero(free[number - 1 :] - free[: len(free) - number + 1] == number - 1)
        found = free[begins[0] if len(begins) else 0 :][:number]
        self._is_free[found] = False
        self._used[use] += number
        return [int(slot) for slot in found]

    def give_back(self, slots: list[int], use: Use) -> None:
        """Free slots that no copy or transfer touches any more."""
        wrong = [slot for slot in slots if slot >= self.count or self._is_free[slot]]
        if wrong:
            raise ValueError(f"found the slots {wrong} given back, which were free")
        self._is_free[slots] = True
        self._used[use] -= len(slots)
