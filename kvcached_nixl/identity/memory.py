# SPDX-License-Identifier: Apache-2.0
"""What the weights of a rank are in memory, as two checksums: what there is, and what it holds. Needs torch.

Two ranks whose weights lie alike are compared by what they hold, whoever has loaded it, whatever has changed it since.
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
"""Weights that are larger together are sampled."""
SAMPLED = 2048
"""Elements of each tensor, evenly spread."""
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class InMemory(NamedTuple):
    """What is known of weights.

    Attributes:
        layout: names, types, shapes.
        content: of what they hold; "" if that cannot be read.
        is_whole: nothing of them is known to be kept elsewhere, as vLLM's kernels for CPUs keep linear layers.
    """

    layout: str
    content: str
    is_whole: bool = True


def in_memory(tensors: Iterable[tuple[str, torch.Tensor]], *, place: str) -> InMemory:
    """Read weights where they are, on the calling thread, in the current stream.

    Args:
        tensors: (name, weights) in any order; none may be asleep (vLLM's sleep mode).
        place: what else makes them lie as they do: rank, device.
    """
    named = sorted((name.replace(".base_layer.", "."), tensor.detach()) for name, tensor in tensors)
    shape = [(name, str(one.dtype), tuple(one.shape), one.device.type) for name, one in named]
    layout = hashlib.blake2b(repr((place, shape)).encode(), digest_size=16).hexdigest()
    is_whole = sum(one.numel() * one.element_size() for _, one in named) <= WHOLE_BYTES
    hasher = xxhash.xxh3_128()
    try:
        for group in _by_device(one for _, one in named).values():
            # In one copy where little of each is read, else one by one: there may be no room for all of it twice.
            read = [_bytes_of(one, is_whole) for one in group]
            for part in read if is_whole else [torch.cat(read)]:
                hasher.update(part.cpu().numpy().tobytes())
    except (NotImplementedError, RuntimeError, TypeError, KeyError):
        # A kind of tensor whose elements cannot be picked out: the files it came from are compared instead.
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
    # Not flattened: that would copy all of a tensor that is a view.
    return reason[torch.unravel_index(places, reason.shape)].contiguous().view(torch.uint8)
