# SPDX-License-Identifier: Apache-2.0
"""Two checksums of a rank's weights in memory: of their layout and of their content. Needs torch.

Two ranks whose weights have the same layout are compared by content, no matter what loaded or changed the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from types import MappingProxyType
from typing import NamedTuple

import torch
import xxhash

__all__ = ["InMemory", "in_memory"]

WHOLE_BYTES = 256 << 20
"""Weights whose total size is larger are sampled."""
SAMPLED = 2048
"""Elements that are sampled of each tensor, evenly spread."""
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class InMemory(NamedTuple):
    """Checksums of weights.

    Attributes:
        layout: of names, types, shapes and place.
        content: of the values; "" if they cannot be read.
        is_whole: False if some weights are known to be kept elsewhere, as vLLM's CPU kernels keep linear layers.
    """

    layout: str
    content: str
    is_whole: bool = True


def in_memory(tensors: Iterable[tuple[str, torch.Tensor]], *, place: str) -> InMemory:
    """Read weights where they are, on the calling thread, in the current stream.

    Args:
        tensors: (name, weights) in any order; none may be asleep (vLLM's sleep mode).
        place: rank and device, on which the layout depends as well.
    """
    named = sorted((name.replace(".base_layer.", "."), tensor.detach()) for name, tensor in tensors)
    shape = [(name, str(one.dtype), tuple(one.shape), one.device.type) for name, one in named]
    layout = hashlib.blake2b(repr((place, shape)).encode(), digest_size=16).hexdigest()
    is_whole = sum(one.numel() * one.element_size() for _, one in named) <= WHOLE_BYTES
    hasher = xxhash.xxh3_128()
    try:
        for group in _by_device(one for _, one in named).values():
            # Samples are small and go to the host in one copy. Whole tensors go one by one, because there may be no
            # memory for a second copy of all of them.
            read = [_bytes_of(one, is_whole) for one in group]
            for part in read if is_whole else [torch.cat(read)]:
                hasher.update(part.cpu().numpy().tobytes())
    except (NotImplementedError, RuntimeError, TypeError, KeyError):
        # The elements of this kind of tensor cannot be read: the files that it came from are compared instead.
        return InMemory(layout, "", False)
    return InMemory(layout, hasher.hexdigest(), all(one.numel() for _, one in named))


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault(one.device, []).append(one)
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


def _bytes_of(tensor: torch.Tensor, is_whole: bool) -> torch.Tensor:
    reason = tensor.view(_INTEGERS[tensor.element_size()])
    count = reason.numel()
    if is_whole or count <= SAMPLED or reason.dim() == 0:
        return reason.reshape(-1).contiguous().view(torch.uint8)
    places = torch.arange(SAMPLED, dtype=torch.int64, device=reason.device) * (count - 1) // (SAMPLED - 1)
    # Not flattened: flattening a tensor that is a view would copy all of it.
    return reason[torch.unravel_index(places, reason.shape)].contiguous().view(torch.uint8)
