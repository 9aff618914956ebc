# SPDX-License-Identifier: Apache-2.0
"""Describes layers that keep a state (Mamba, linear attention) instead of KV. Once per process, byte arithmetic only.

A state has several tensors, such as those of a convolution and of a recurrence, side by side at the beginning of a page
of its block; the rest of the page is padding. vLLM registers whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import Planes

__all__ = ["StatePart", "pages_of_state", "part_planes", "state_planes"]


class StatePart(NamedTuple):
    """Cells of a rank's state that follow one another: channels of a projection of a convolution, or heads.

    Attributes:
        offset_bytes: of the first cell in the page.
        num_rows, row_stride_bytes: the same cells again, as often, and so far apart.
        cell_bytes: of a channel or a head, in a row.
        num_cells: on this rank.
        first_cell: index in the model of the first of them.
        copies, copy: as in `Planes`.
    """

    offset_bytes: int
    num_rows: int
    row_stride_bytes: int
    cell_bytes: int
    num_cells: int
    first_cell: int
    copies: int = 1
    copy: int = 0


def pages_of_state(layer: str, cache: torch.Tensor, page_bytes: int, state_bytes: int) -> torch.Tensor:
    """View a layer's blocks as bytes, (num_blocks, page_bytes), with the block stride that they have.

    Args:
        cache: the pages, as vLLM registers them; with or without the padding behind a state.

    Raises:
        LayoutRefused: they are not pages with such a state.
    """
    num_bytes = cache[0].numel()
    if cache.element_size() != 1 or not state_bytes <= num_bytes <= page_bytes or not cache[0].is_contiguous():
        raise LayoutRefused(
            found=f"layer {layer!r}, which keeps a state: shape {tuple(cache.shape)}, strides {cache.stride()}, "
            f"{cache.dtype}",
            expected=f"one page of {state_bytes} to {page_bytes} bytes in a block",
            consequence="A transfer would move other bytes than those of the state; the engine stops.",
            remedy="Serve this model without ENABLE_KVCACHED, or without a KV connector.",
        )
    size, stride = (cache.shape[0], page_bytes), (cache.stride(0), 1)
    return cache.view(torch.uint8).as_strided(size, stride, cache.storage_offset())


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
    page_bytes = view.shape[1]
    return tuple(
        _planes(view, bases, page_bytes, cell_bytes=size, num_heads=1, first_head=first_head, padded_bytes=page_bytes)
        for size, bases in kinds.items()
    )


def part_planes(pages: Mapping[str, torch.Tensor], parts: Mapping[str, Sequence[StatePart]]) -> tuple[Planes, ...]:
    """Describe the same layers by channel and head, as `state_planes`; () if it is not known for all of them.

    Args:
        parts: layer name -> parts of its state, in the same order on all ranks.
    """
    if not all(parts[layer] for layer in pages):
        return ()
    kinds: dict[tuple[int, StatePart], dict[int, None]] = {}
    for layer, view in pages.items():
        for place, part in enumerate(parts[layer]):
            # Bases in the same order on both sides, whatever their offsets are.
            rows = kinds.setdefault((place, part._replace(offset_bytes=0, row_stride_bytes=0)), {})
            first = view.data_ptr() + part.offset_bytes
            rows.update(dict.fromkeys(first + row * part.row_stride_bytes for row in range(part.num_rows)))
    view = next(iter(pages.values()))
    return tuple(
        _planes(
            view,
            bases,
            part.cell_bytes,
            cell_bytes=part.cell_bytes,
            num_heads=part.num_cells,
            first_head=part.first_cell,
            copies=part.copies,
            copy=part.copy,
        )
        for (_, part), bases in kinds.items()
    )


def _planes(view: torch.Tensor, bases: Iterable[int], head_stride_bytes: int, **cells: int) -> Planes:
    """Planes of pages, each of which is a block of one token."""
    return Planes(
        bases=tuple(bases),
        block_stride_bytes=view.stride(0),
        token_stride_bytes=view.shape[1],
        head_stride_bytes=head_stride_bytes,
        num_blocks=view.shape[0],
        block_size=1,
        **cells,
    )
