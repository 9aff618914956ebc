# SPDX-License-Identifier: Apache-2.0
"""Describes layers that keep a state (Mamba, linear attention) instead of KV. Once per process, byte arithmetic only.

A state has several tensors, such as those of a convolution and of a recurrence, side by side at the beginning of a page
of its block; the rest of the page is padding. vLLM registers whole pages from 0.27 on, the tensors before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import Planes

__all__ = ["pages_of_state", "state_planes"]


def pages_of_state(
    layer: str, cache: torch.Tensor | Sequence[torch.Tensor], page_bytes: int, state_bytes: int
) -> torch.Tensor:
    """View a layer's blocks as bytes, (num_blocks, page_bytes), with the block stride that they have.

    Args:
        cache: the pages, or the tensors of the state.

    Raises:
        LayoutRefused: they are neither.
    """
    tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    first, end = tensors[0], tensors[0].data_ptr()
    stride_bytes = first.stride(0) * first.element_size()
    for one in tensors:
        is_next = one.data_ptr() == end and one.stride(0) * one.element_size() == stride_bytes
        if not is_next or one.shape[0] != first.shape[0] or not one[0].is_contiguous():
            break
        end += one[0].numel() * one.element_size()
    if end - first.data_ptr() != (page_bytes if len(tensors) == 1 and tensors[0].element_size() == 1 else state_bytes):
        found = "; ".join(f"shape {tuple(one.shape)}, strides {one.stride()}, {one.dtype}" for one in tensors)
        raise LayoutRefused(
            found=f"layer {layer!r}, which keeps a state: {found}",
            expected=f"pages of {page_bytes} bytes, or tensors of {state_bytes} bytes in all, side by side in a block",
            consequence="A transfer would move other bytes than those of the state; the engine stops.",
            remedy="Serve this model without ENABLE_KVCACHED, or without a KV connector.",
        )
    storage = first.untyped_storage()
    offset = first.data_ptr() - storage.data_ptr()
    size, stride = (first.shape[0], page_bytes), (stride_bytes, 1)
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, offset, size, stride)


def state_planes(
    pages: Mapping[str, torch.Tensor], state_bytes: Mapping[str, int], first_head: int
) -> tuple[Planes, ...]:
    """Describe the layers of a group that keeps states; returns one entry for each size of a state.

    Args:
        pages: layer name -> its blocks, as `pages_of_state`, narrowed to the planned blocks.
        state_bytes: layer name -> bytes of its state.
        first_head: identifies this rank's share of the states.
    """
    kinds: dict[int, dict[int, None]] = {}
    for layer, view in pages.items():
        kinds.setdefault(state_bytes[layer], {})[view.data_ptr()] = None
    view = next(iter(pages.values()))
    return tuple(
        Planes(
            bases=tuple(bases),
            block_stride_bytes=view.stride(0),
            token_stride_bytes=view.shape[1],
            head_stride_bytes=view.shape[1],
            cell_bytes=size,
            num_blocks=view.shape[0],
            block_size=1,
            num_heads=1,
            first_head=first_head,
            padded_bytes=view.shape[1],
        )
        for size, bases in kinds.items()
    )
