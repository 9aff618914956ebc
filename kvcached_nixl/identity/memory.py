# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors in memory, each of all its bytes, on the device that they are on. Needs torch.

A rank of 80 GB is read at a tenth of its memory's bandwidth, in pieces of `_PIECE_BYTES`, so that an engine that uses
nearly all of its device has room for it. Nothing is sampled: a change of one element is another checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from kvcached_nixl.wire.handshake import MOST_NAMED_TENSORS, Tensors


class Read(NamedTuple):
    """A tensor that was read.

    Attributes:
        order: its dimensions in the order in which they lie in memory, outer to inner.
        checksum: of its bytes in this order; None if they cannot be read.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    checksum: int | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


Reading: TypeAlias = Mapping[str, Read]
"""By name."""

_PIECE_BYTES = 8 << 20
# Odd 64-bit numbers, as torch's integers wrap around.
_PLACE, _MIX, _MIX_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685


def read(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Read]:
    """Read tensors on the calling thread, in the current stream; none may be asleep (vLLM's sleep mode)."""
    found: dict[str, Read] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        try:
            found[name] = Read(tensor.dtype, tuple(tensor.shape), _order(tensor), None)
            checksum = _sum_of(tensor.detach())
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError, TypeError):
            # A kind of tensor without plain bytes.
            found.setdefault(name, Read(tensor.dtype, (), (), None))
            continue
        sums.setdefault(tensor.device, []).append((name, checksum))
    # One copy to the host for each device.
    for summed in sums.values():
        for (name, _), value in zip(summed, torch.stack([one for _, one in summed]).tolist(), strict=True):
            found[name] = found[name]._replace(checksum=value)
    return found


def described(reading: Reading, place: str) -> Tensors:
    """What peers are told of tensors. Without content if one of them could not be read. The layout depends on
    ``place``, too: the rank's among those that share the model."""
    names = sorted(reading)
    forms = [(name, *map(str, reading[name][:3])) for name in names]
    layout = hashlib.blake2b(repr((place, forms)).encode(), digest_size=16)
    sums = [one for name in names if (one := reading[name].checksum) is not None]
    if not names or len(sums) < len(names):
        return Tensors(layout.hexdigest())
    each = [value.to_bytes(8, "little", signed=True) for value in sums]
    content = hashlib.blake2b(b"".join(each), digest_size=16).hexdigest()
    named = b"".join(value[:4] for value in each) if len(each) <= MOST_NAMED_TENSORS else b""
    return Tensors(layout.hexdigest(), content, named)


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor's bytes, as a tensor of one int64 on its device."""
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise NotImplementedError("a tensor without memory, or with more than its elements")
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    begin = 0
    for part in _pieces(tensor):
        missing = -part.numel() % 8
        if missing or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, missing)) if missing else part.clone()
        words = part.view(torch.int64)
        mixed = torch.arange(begin, begin + words.numel(), dtype=torch.int64, device=tensor.device)
        mixed.mul_(_PLACE).bitwise_xor_(words)
        mixed.bitwise_xor_(mixed >> 32).mul_(_MIX)
        mixed.bitwise_xor_(mixed >> 29).mul_(_MIX_AGAIN)
        total += mixed.bitwise_xor_(mixed >> 32).sum()
        begin += words.numel()
    return total


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Its bytes in order, in pieces: of a dense tensor, whatever its strides, without a copy of the whole."""
    if not tensor.numel():
        return
    # The same bytes in the order of memory, as a transposed weight lies.
    dense = tensor.permute(_order(tensor))
    if dense.is_contiguous():
        yield from dense.reshape(-1).view(torch.uint8).split(_PIECE_BYTES)
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    size = max(1, _PIECE_BYTES * tensor.shape[longest] // (tensor.numel() * tensor.element_size()))
    for part in tensor.split(size, longest):
        yield part.contiguous().reshape(-1).view(torch.uint8)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
