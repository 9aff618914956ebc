# SPDX-License-Identifier: Apache-2.0
"""Blocks of a KV cache as bytes, and damages to them; for `kv_probe`, in the worker process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import torch

BlockIds: TypeAlias = list[list[int]]
"""Block ids per KV-cache group, outer list in group order."""
Cache: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""What one layer uses: attention's tensor, or the tensors of a state."""


class ProbeError(RuntimeError):
    """The probe found a KV cache or a connector that it does not support, or was not armed."""


def block_view(cache: torch.Tensor, block_id: int) -> torch.Tensor:
    """Return block ``block_id`` of one layer as a writable view of shape (2, heads, tokens, head_dim), K first.

    ``cache`` is the tensor that attention itself uses, in whatever strides:
    (blocks, 2, tokens, heads, head_dim) as a few CUDA backends have it up to vLLM 0.28, or
    (blocks, heads, tokens, 2 * head_dim). In the packed form the CPU kernel keeps all K of a head before all V of it,
    while the CUDA kernels put K and V of a token side by side.
    """
    if cache.dim() == 5 and cache.shape[1] == 2:
        return cache[block_id].transpose(1, 2)
    if cache.dim() == 4:
        heads, tokens, both = cache[block_id].shape
        if cache.device.type == "cpu":
            return cache[block_id].view(heads, 2, tokens, both // 2).transpose(0, 1)
        return cache[block_id].view(heads, tokens, 2, both // 2).permute(2, 0, 1, 3)
    raise ProbeError(
        f"found a KV tensor of shape {tuple(cache.shape)}; expected (N, 2, T, H, D) or (N, H, T, 2D)."
        " No digest of it would mean anything. Teach experiments/common/server_side/kv_probe.py this layout."
    )


def parts(cache: Cache, block_id: int) -> list[torch.Tensor]:
    """Return the block of one layer as writable views: K and V (`block_view`), or each tensor of a state."""
    if isinstance(cache, tuple):
        return [tensor[block_id] for tensor in cache]
    return [block_view(cache, block_id)]


def block_bytes(cache: Cache, block_id: int) -> bytes:
    """Return one layer's block in canonical order: K then V, token, head, element; or the tensors of a state."""
    views = parts(cache, block_id)
    if not isinstance(cache, tuple):
        views = [views[0].permute(0, 2, 1, 3)]
    return b"".join(view.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for view in views)


def digests(groups: list[list[Cache]], block_ids: BlockIds) -> list[list[str]]:
    """Return the SHA-256 (hex) of each block over all caches of its KV-cache group, in layer order."""

    def digest(caches: list[Cache], block_id: int) -> str:
        return hashlib.sha256(b"".join(block_bytes(cache, block_id) for cache in caches)).hexdigest()

    found = zip(groups, block_ids, strict=False)
    return [[digest(caches, block) for block in blocks] for caches, blocks in found]


# ---------------------------------------------------------------------------------------------- planted corruptions
Damage: TypeAlias = Callable[[list[Cache], list[int], int], None]


def _swap(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for here, there in zip(one, other, strict=True):
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)


def _swap_two_blocks(caches: list[Cache], block_ids: list[int], index: int) -> None:
    for cache in caches:
        _swap(parts(cache, block_ids[index]), parts(cache, block_ids[index + 1]))


def _replace_v(make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Damage:
    """Return a damage that puts what is made of K and V in the place of V, in all blocks of attention."""

    def damage(caches: list[Cache], block_ids: list[int], index: int) -> None:
        for cache in (one for one in caches if not isinstance(one, tuple)):
            for block_id in block_ids:
                k, v = block_view(cache, block_id)
                v.copy_(make(k, v))

    return damage


def _older_blocks(caches: list[Cache], block_ids: list[int], index: int) -> None:
    """Each block but the first gets the bytes of the one before it."""
    for cache in caches:
        for earlier, block_id in zip(block_ids[-2::-1], block_ids[:0:-1], strict=True):
            for here, there in zip(parts(cache, block_id), parts(cache, earlier), strict=True):
                here.copy_(there)


def _swap_two_layers(caches: list[Cache], block_ids: list[int], index: int) -> None:
    _swap(parts(caches[0], block_ids[index]), parts(caches[1], block_ids[index]))


def swap_groups(one: list[Cache], block_id: int, other: list[Cache], other_id: int) -> None:
    """A block of each of two groups gets the bytes of the other one's, as far as both reach."""
    for here, there in zip(one, other, strict=False):
        contents = block_bytes(here, block_id), block_bytes(there, other_id)
        _overwrite(parts(here, block_id), contents[1])
        _overwrite(parts(there, other_id), contents[0])


def _overwrite(views: list[torch.Tensor], content: bytes) -> None:
    left = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    for view in views:
        size = view.numel() * view.element_size()
        if len(left) < size:
            return
        view.copy_(left[:size].clone().view(view.dtype).view(view.shape))
        left = left[size:]


def _zero_a_block(caches: list[Cache], block_ids: list[int], index: int) -> None:
    for cache in caches:
        for view in parts(cache, block_ids[index]):
            view.zero_()


DAMAGES: dict[str, Damage] = {
    "swap_two_blocks": _swap_two_blocks,
    "shift_v_by_a_head": _replace_v(lambda k, v: torch.roll(v, shifts=1, dims=0).clone()),
    "send_k_for_v": _replace_v(lambda k, v: k),
    "zero_a_block": _zero_a_block,
    "older_blocks": _older_blocks,
    "swap_two_layers": _swap_two_layers,
}
