# SPDX-License-Identifier: Apache-2.0
"""Chooses and registers the memory that NIXL touches (rule R5): kvcached's, up to the number of blocks vLLM planned, or
a slab of a size that fits the load. Once per process, at start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcached_nixl.errors import LayoutRefused, MemoryRefused, SettingsError, Unproved
from kvcached_nixl.proof.result import Proof
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath, Settings
from kvcached_nixl.wire.handshake import MemoryType
from kvcached_nixl.worker.geometry.layout import Layout, plan
from kvcached_nixl.worker.geometry.planes import Axes
from kvcached_nixl.worker.transfer.slab import Slab

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView

logger = logging.getLogger(SERVER_LOGGER)


def choose(wish: MemoryPath, prove: Callable[[], Proof], staged: MemoryPath = MemoryPath.HOST) -> MemoryPath:
    """Returns ``DIRECT``, ``HOST`` or ``DEVICE``; logs a warning where transports are slow, wrong or not known.

    Args:
        wish: the setting ``memory_path``.
        prove: finds out whether registrations follow kvcached's pages; called only where that matters.
        staged: the path if nobody asked for a slab and the proof fails to run; a slab needs no proof.

    Raises:
        MemoryRefused: ``DIRECT`` is asked for, but a transport that could be chosen does not follow kvcached's pages,
            or it is not known whether it does.
        Unproved: ``DIRECT`` is asked for, but the proof could not be made.
    """
    if wish in (MemoryPath.HOST, MemoryPath.DEVICE):
        return wish
    try:
        proof = prove()
    except Unproved as error:
        if wish is MemoryPath.DIRECT:
            raise
        reason = "python -m kvcached_nixl doctor repeats the proof"
        logger.warning("KV is staged (memory_path %s): %s. %s", staged.value, error.found, reason)
        return staged
    if wish is MemoryPath.DIRECT:
        if proof.why_not:
            raise MemoryRefused(
                found=f"memory_path {wish.value!r}, and " + "; ".join(proof.why_not),
                expected="transports that move the bytes of the currently mapped page, whenever it was mapped",
                consequence="Decode would get other bytes than prefill computed, with HTTP 200; the engine stops.",
                remedy=f"Remove memory_path: KV is then staged through other memory. {proof.remedy}",
            )
        for reason in proof.why_slow:
            logger.warning(
                "A slow transport may be chosen for hand-overs: %s. See python -m kvcached_nixl doctor", reason
            )
        return wish
    if not proof.is_direct:
        reason = "; ".join((*proof.why_not, *proof.why_slow))
        logger.warning("KV is staged (memory_path %s): %s. %s", proof.memory_path.value, reason, proof.remedy)
    return proof.memory_path


LONGEST_AT_ONCE = 4
"""By default there are slots for this many requests of the longest length, or for as many as may run, if fewer. A
request that does not fit waits, or is moved range by range."""
_LARGEST_BLOCK_TOKENS = 256
"""Largest block size of either side. A range ends at a block boundary of both sides, so each share of the slots must
hold at least one such block."""
_OF_A_DEVICE = 16
"""Where slab and cache are on an accelerator, there are by default slots for at most 1/16 of the cache's blocks."""
_SHARES = 4
"""Shares of the slots: one is kept for sending, one for receiving."""


@dataclass(frozen=True)
class SlabLoad:
    """The load that an engine is configured for.

    Attributes:
        longest_tokens: most tokens of one request.
        running: most requests that run at a time.
        slot_tokens: per KV-cache group that has blocks for every token: tokens that fit into a slot.
        num_states: KV-cache groups that keep a state, one block a request.
    """

    longest_tokens: int
    running: int
    slot_tokens: tuple[int, ...]
    num_states: int = 0

    @property
    def fewest_slots(self) -> int:
        """Fewest slots with which a hand-over of blocks of any supported size cannot get stuck."""
        # A peer may have larger blocks in every group, so the first place where all of them end may be later, too.
        largest = _LARGEST_BLOCK_TOKENS * math.lcm(*self.slot_tokens) // min(self.slot_tokens)
        return _SHARES * (sum(-(-largest // size) for size in self.slot_tokens) + self.num_states)


def num_slots(layout: Layout, load: SlabLoad, staging_gib: float | None, *, is_host: bool) -> int:
    """Returns the number of slots; at most the cache's blocks, unless those are fewer than ``load.fewest_slots``.

    ``staging_gib``: the setting; None for the default. ``is_host``: the cache is in host memory. Beside that of a
    device the default is smaller: there is little memory beside it, and vLLM has not reserved any for the slab; nor is
    it known how much the host can pin. Raises `SettingsError`: ``staging_gib`` is too small for one block of a peer.
    """
    fewest, most = load.fewest_slots, layout.num_blocks // layout.blocks_per_slot
    if staging_gib is None:
        longest = sum(-(-load.longest_tokens // size) for size in load.slot_tokens) + load.num_states
        wanted = longest * min(load.running, LONGEST_AT_ONCE)
        return max(fewest, min(wanted, most if is_host else most // _OF_A_DEVICE))
    slot_bytes = sum(region.block_bytes for region in layout.regions) * layout.blocks_per_slot
    found = int(staging_gib * 2**30) // slot_bytes
    if found < fewest:
        raise SettingsError(
            found=f"staging_gib={staging_gib:g}, which is {found} slots of {slot_bytes:,} bytes",
            expected=f"at least {Slab.bytes_for(layout, fewest) / 2**30:.3g}: {fewest} slots",
            consequence="A large block of a peer might never fit, and its request would wait until it fails.",
            remedy="Raise staging_gib in kv_connector_extra_config, or remove it.",
        )
    return max(fewest, min(found, most))


def num_kept(slots: int) -> int:
    """How many of the slots are kept for sending; as many are kept for receiving."""
    return slots // _SHARES


def make_slab(layout: Layout, path: MemoryPath, load: SlabLoad, settings: Settings) -> Slab:
    """Raises `SettingsError`: ``staging_gib`` is too small, or there is not enough memory."""
    device = torch.device("cpu") if path is MemoryPath.HOST else layout.device
    count = num_slots(layout, load, settings.staging_gib, is_host=layout.device.type == "cpu")
    try:
        return Slab(layout, count, device)
    except RuntimeError as error:
        # Torch raises RuntimeError when it is out of memory, on every device.
        raise SettingsError(
            found=f"no {Slab.bytes_for(layout, count) / 2**30:.3g} GiB of memory on {device}: {error}",
            expected=f"room for {count} slots, through which KV is staged (memory_path {path.value!r})",
            consequence="No KV could be handed over; the engine stops.",
            remedy="Lower staging_gib in kv_connector_extra_config, or gpu-memory-utilization.",
        ) from error


@dataclass(frozen=True)
class Registered:
    """The memory that NIXL may touch.

    Attributes:
        layout: of the KV cache.
        layers_of_groups: per KV-cache group, the names of its layers that have a cache of their own.
        slab: registered in place of the KV cache; None where the KV cache itself is registered.
        memory_type: NIXL's name for the slab's memory type; None if it is the same as the KV cache's.
        extents: address and size in bytes of each registered range.
        device_id: NIXL's number of the device that holds the registered memory.
        path: which memory that is.
    """

    layout: Layout
    layers_of_groups: tuple[tuple[str, ...], ...]
    slab: Slab | None = None
    memory_type: MemoryType | None = None
    extents: tuple[tuple[int, int], ...] = ()
    device_id: int = 0
    path: MemoryPath = MemoryPath.DIRECT

    def __str__(self) -> str:
        one = self.layout
        reason = f"{one.arrangement.value}, {one.num_blocks} blocks, {len(one.regions)} descriptors a block"
        if self.slab is None:
            return reason
        return f"{reason}; {self.slab.num_slots} slots of {self.slab.extent[1] / 2**20:,.0f} MiB in all"


def lay_out(worker: WorkerView, kv_caches: Mapping[str, torch.Tensor]) -> tuple[Layout, tuple[tuple[str, ...], ...]]:
    """Find where the blocks are. Arguments and errors as `register`. Returns also `Registered.layers_of_groups`."""
    shape, numbers = worker.probe_cache_shape()
    groups = worker.groups()
    layout = plan(
        kv_caches,
        axes=Axes.from_probe(shape, **numbers),
        pages={layer: page for group in groups for layer, page in group.items()},
        num_blocks=worker.num_blocks,
        num_pools=worker.num_pools,
        split=worker.kernel_blocks_per_block,
    )
    return layout, tuple(tuple(layer for layer in group if layer in layout.device_views) for group in groups)


def register(
    worker: WorkerView, kv_caches: Mapping[str, torch.Tensor], path: MemoryPath, settings: Settings
) -> Registered:
    """Register ``kv_caches``, kvcached's memory, or a slab in their place; layer name -> attention's tensor, or of a
    layer with a state its pages.

    Raises:
        LayoutRefused: the memory cannot be described, or the model is parallelized in a way that is not supported.
        SettingsError: the slab is too small, or there is no memory for it.
    """
    for found, expected in worker.unserved:
        raise LayoutRefused(
            found=found,
            expected=expected,
            consequence="Peers would exchange bytes that have another meaning on the other side; the engine stops",
            remedy=f"serve with {expected}, or without ENABLE_KVCACHED",
        )
    layout, layers_of_groups = lay_out(worker, kv_caches)
    # Torch returns -1 for host memory.
    device_id = max(next(iter(layout.device_views.values())).get_device(), 0)
    if path is MemoryPath.DIRECT:
        extents = tuple((region.address, region.block_bytes * layout.num_blocks) for region in layout.regions)
        worker.register_memory(extents, device_id)
        return Registered(layout, layers_of_groups, extents=extents, device_id=device_id)
    firsts = [layers[0] for layers in layers_of_groups]
    with_kv = [layout.device_views[layer] for layer in firsts if layer not in layout.state_bytes]
    slot_tokens = tuple(view.shape[layout.axes.token] * layout.blocks_per_slot for view in with_kv)
    load = SlabLoad(*worker.load, slot_tokens, len(firsts) - len(with_kv))
    slab = make_slab(layout, path, load, settings)
    is_host = path is MemoryPath.HOST
    where = 0 if is_host else device_id
    worker.register_memory([slab.extent], where, "DRAM" if is_host else None)
    return Registered(layout, layers_of_groups, slab, "DRAM" if is_host else None, (slab.extent,), where, path)
