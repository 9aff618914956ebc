# SPDX-License-Identifier: Apache-2.0
"""How many slots a slab has, and where it is. Once per worker, before anything is registered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.worker.geometry.layout import Layout
from kvcached_nixl.worker.staging.slab import Slab

__all__ = ["LONGEST_AT_ONCE", "Load", "make_slab", "num_kept", "num_slots"]

LONGEST_AT_ONCE = 4
"""Of the longest requests, for which there is room by default, if as many may run. What does not fit waits, or goes
through range by range."""
_LARGEST_BLOCK_TOKENS = 256
"""Of either side: a range ends where both have a block's end, so a share of the slots holds no less than that."""
_OF_A_DEVICE = 16
"""The part of the cache's blocks for which there are slots by default where both are on an accelerator."""
_SHARES = 4
"""One of them is kept for what is sent now, and one for what is received."""


@dataclass(frozen=True)
class Load:
    """What an engine is made for.

    Attributes:
        longest_tokens: of one request.
        running: requests at a time.
        num_groups: KV-cache groups, each of which has blocks for every token.
        block_size: tokens in a block of the attention kernel.
    """

    longest_tokens: int
    running: int
    num_groups: int
    block_size: int

    @property
    def longest_blocks(self) -> int:
        return -(-self.longest_tokens // self.block_size) * self.num_groups

    @property
    def fewest_slots(self) -> int:
        """With which the hand-over of any block gets through."""
        return _SHARES * -(-_LARGEST_BLOCK_TOKENS // self.block_size) * self.num_groups


def num_slots(layout: Layout, load: Load, staging_gib: float | None, *, is_host: bool) -> int:
    """How many there are; never more than the cache has blocks, unless that is too few for anything.

    Args:
        is_host: beside the cache there is little room on a device, and nobody has reserved it.

    Raises:
        SettingsError: there would be too few for one block of a peer's.
    """
    fewest = load.fewest_slots
    if staging_gib is None:
        wanted = load.longest_blocks * min(load.running, LONGEST_AT_ONCE)
        return max(fewest, min(wanted, layout.num_blocks if is_host else layout.num_blocks // _OF_A_DEVICE))
    slot_bytes = sum(region.block_bytes for region in layout.regions)
    found = int(staging_gib * 2**30) // slot_bytes
    if found < fewest:
        raise SettingsError(
            found=f"staging_gib={staging_gib:g}, which is {found} slots of {slot_bytes:,} bytes",
            expected=f"at least {Slab.bytes_for(layout, fewest) / 2**30:.3g}: {fewest} slots",
            consequence="A block of a peer's might never find room, and its request would wait until it fails.",
            remedy="Raise staging_gib in kv_connector_extra_config, or remove it.",
        )
    return max(fewest, min(found, layout.num_blocks))


def num_kept(slots: int) -> int:
    """Of them, for what is sent now, and as many for what is received."""
    return slots // _SHARES


def make_slab(layout: Layout, path: MemoryPath, load: Load, settings: Settings) -> Slab:
    """The slab of a worker.

    Raises:
        SettingsError: there is no memory for it.
    """
    device = torch.device("cpu") if path is MemoryPath.HOST else layout.device
    count = num_slots(layout, load, settings.staging_gib, is_host=device.type == "cpu")
    try:
        return Slab(layout, count, device)
    except RuntimeError as error:
        # Torch's word for memory that is not there, on every device.
        raise SettingsError(
            found=f"no {Slab.bytes_for(layout, count) / 2**30:.3g} GiB of memory on {device}: {error}",
            expected=f"room for {count} slots, through which KV is staged (memory_path {path.value!r})",
            consequence="Nothing could be handed over; the engine stops.",
            remedy="Lower staging_gib in kv_connector_extra_config, or gpu-memory-utilization.",
        ) from error
