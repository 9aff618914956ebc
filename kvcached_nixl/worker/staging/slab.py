# SPDX-License-Identifier: Apache-2.0
"""Memory outside kvcached's, registered once, through which KV travels where kvcached's pages must not be registered.

A slab has an area for each region of the KV cache, and a slot is in each area what a block is in its region, byte for
byte. So a slab is described to a peer by the same planes, at other addresses, and slots are its block ids. Once per
worker.

With sleep mode vLLM has a worker allocate its KV cache, and call its connector, within a memory pool whose pages
``/sleep`` unmaps and ``/wake_up`` replaces: a registration would point at memory that is gone, then at other memory.
The pool is of the thread that entered it (``torch.cuda.use_mem_pool``), so the slab is made on another one, and stays.
Sources: ``initialize_from_config`` in ``v1/worker/gpu_worker.py``, ``device_allocator/cumem.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from kvcached_nixl.current_device import select
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.geometry.layout import Layout, Region

__all__ = ["Slab"]

_ALIGNED_BYTES = 4096
_PIECE_BLOCKS = 512


class Slab:
    """See the module.

    Args:
        layout: of the KV cache, whose blocks are copied.
        num_slots: at the granularity of the attention kernel, as the layout's blocks.
        device: where the slab is. Host memory is pinned where the KV cache is on an accelerator.

    Attributes:
        extent: (address, bytes) to register.

    Threads: `gather` and `scatter` are one thread's; the rest anybody's.
    """

    def __init__(self, layout: Layout, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._regions = layout.regions
        blocks = [blocks for _, blocks in layout.areas()]
        is_pinned = device.type == "cpu" and layout.device.type != "cpu"
        begins = list(_begins(layout.regions, num_slots))

        def make() -> torch.Tensor:
            select(layout.device.type, layout.device.index or 0)
            return torch.empty(begins[-1] + _ALIGNED_BYTES, dtype=torch.uint8, device=device, pin_memory=is_pinned)

        with ThreadPoolExecutor(1, "kvcached-nixl-slab") as outside:
            memory = outside.submit(make).result()
        first = -memory.data_ptr() % _ALIGNED_BYTES
        self._areas = [
            memory[first + begin :][: num_slots * region.block_bytes].view(num_slots, region.block_bytes)
            for region, begin in zip(layout.regions, begins, strict=False)
        ]
        # Blocks and slots, region by region.
        self._copied = [_in_words(*pair) for pair in zip(blocks, self._areas, strict=True)]
        self.extent = (memory.data_ptr() + first, begins[-1])

    @staticmethod
    def bytes_for(layout: Layout, num_slots: int) -> int:
        """What so many slots take."""
        return list(_begins(layout.regions, num_slots))[-1]

    def planes(self, memory: Sequence[Planes]) -> tuple[Planes, ...]:
        """The same planes in the slab.

        Args:
            memory: the planes of the KV cache.
        """
        return tuple(
            msgspec.structs.replace(planes, bases=tuple(map(self._moved, planes.bases)), num_blocks=self.num_slots)
            for planes in memory
        )

    def gather(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots, one for one; on an accelerator, in the current stream."""
        for (source, area), ids, run in self._runs(blocks, slots):
            target = area[run]
            if target.device == source.device:
                torch.index_select(source, 0, ids, out=target)
            else:
                target.copy_(source.index_select(0, ids), non_blocking=True)

    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots into blocks, one for one; on an accelerator, in the current stream."""
        for (target, area), ids, run in self._runs(blocks, slots):
            target.index_copy_(0, ids, area[run].to(target.device, non_blocking=True))

    @property
    def areas(self) -> list[tuple[int, torch.Tensor]]:
        """Each area's address and its slots as bytes, (num_slots, block_bytes)."""
        return [(int(area.data_ptr()), area) for area in self._areas]

    def _runs(
        self, blocks: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, slice]]:
        """For each region and its area, and each run of slots that follow each other: the blocks, and the slots."""
        if len(blocks) != len(slots):
            raise ValueError(f"found {len(blocks)} blocks and {len(slots)} slots; expected one for one")
        ids = torch.tensor(blocks, dtype=torch.int64, device=self._copied[0][0].device)
        ends = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
        # In pieces: on its way to the host, a piece is on the device twice.
        cuts = sorted({0, *ends, *range(0, len(slots), _PIECE_BLOCKS), len(slots)})
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                run = slice(slots[begin], slots[begin] + end - begin)
                for pair in self._copied:
                    yield pair, ids[begin:end], run

    def _moved(self, base: int) -> int:
        """Where a plane begins in the slab: as far from its area's beginning as it is from its region's."""
        for region, area in zip(self._regions, self._areas, strict=True):
            if 0 <= base - region.address < region.block_bytes:
                return base - region.address + int(area.data_ptr())
        raise ValueError(f"found a plane at {base:#x}; expected it in the first block of a region")


def _in_words(blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory in the largest words that it divides into: `index_copy_` costs by the word, not by the byte."""
    for word in (torch.int64, torch.int32, torch.int16):
        places = (one for tensor in (blocks, slots) for one in (tensor.shape[1], tensor.storage_offset()))
        if not any(place % word.itemsize for place in places):
            return blocks.view(word), slots.view(word)
    return blocks, slots


def _begins(regions: Sequence[Region], num_slots: int) -> Iterator[int]:
    """Where each area begins, and the last one's end."""
    begin = 0
    for region in regions:
        yield begin
        begin += -(-num_slots * region.block_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    yield begin
