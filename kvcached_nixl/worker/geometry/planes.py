# SPDX-License-Identifier: Apache-2.0
"""Describes the tensors of layers as planes: attention's from their strides, states by channel and head. Once per
process, byte arithmetic only.

A state (Mamba, linear attention) has several tensors, such as those of a convolution and of a recurrence, side by side
at the beginning of a page of its block; the rest of the page is padding. vLLM registers whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import HeadShare, Planes, plane_key


@dataclass(frozen=True)
class Axes:
    """The meaning of each dimension of a backend's KV cache shape, by index.

    Attributes:
        kv: the dimension of size 2 that separates K from V; None where they are packed, or there is no V.
        head: None for a latent, which all heads share.
        ndim: number of dimensions of one layer's cache.
    """

    token: int
    head: int | None
    kv: int | None
    ndim: int

    @classmethod
    def from_probe(cls, shape: Sequence[int], *, num_blocks: int, block_size: int, num_heads: int) -> Axes:
        """Read the axes from the shape that a backend returned for three sizes that no other dimension can have. Raises
        `LayoutRefused`: blocks do not come first, tokens are not found, or a dimension is left that is not K/V."""
        left = dict(enumerate(shape))
        found: list[int | None] = []
        for number in (num_blocks, block_size, num_heads):
            places = [place for place, size in left.items() if size == number]
            found.append(places[0] if len(places) == 1 else None)
            for place in places[:1]:
                del left[place]
        block, token, head = found
        # The last dimension is the elements of a cell; one of size 1 has no meaning.
        left.pop(len(shape) - 1, None)
        left = {place: size for place, size in left.items() if size != 1}
        kv = next(iter(left), None)
        if block != 0 or token is None or len(left) > 1 or (kv is not None and (left[kv] != 2 or head is None)):
            raise LayoutRefused(
                found=f"an attention backend with the KV cache shape {tuple(shape)} for {num_blocks} blocks of "
                f"{block_size} tokens and {num_heads} heads",
                expected="blocks first, one dimension each for tokens, heads, and K/V if they are separate, and the "
                "head size last",
                consequence="Blocks, K and V, tokens or heads cannot be told apart, so no transfer would be right; the "
                "engine stops.",
                remedy="Choose another attention backend (--attention-backend), or run without ENABLE_KVCACHED.",
            )
        return cls(token=token, head=head, kv=kv, ndim=len(shape))


def planes_of(
    caches: Mapping[str, torch.Tensor], axes: Axes, share_of: Callable[[int], HeadShare]
) -> tuple[Planes, ...]:
    """Describe the tensors of a group's layers; returns one entry for each kind of layer.

    ``caches``: layer name -> the tensor attention uses, narrowed to the planned blocks; layers in the model's order.
    Those that share memory make one plane. ``share_of``: as in `group_memory`. Raises `LayoutRefused`: a cell has gaps,
    or layers that share memory differ.
    """
    kinds: dict[tuple[tuple[str, int], ...], dict[int, int]] = {}
    kind_at: dict[int, tuple[tuple[str, int], ...]] = {}
    for layer, cache in caches.items():
        kind = tuple(_kind(cache, axes, share_of).items())
        for number, half in enumerate((cache,) if axes.kv is None else cache.unbind(axes.kv)):
            if cache.stride(-1) != 1 or kind_at.setdefault(half.data_ptr(), kind) != kind:
                raise LayoutRefused(
                    found=f"layer {layer!r}: shape {tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype}",
                    expected="contiguous elements of a head, and layers in the same memory to be of one kind",
                    consequence="A transfer would move other bytes than those of the token; the engine stops.",
                    remedy="Serve this model without ENABLE_KVCACHED, or without a KV connector.",
                )
            kinds.setdefault(kind, {}).setdefault(half.data_ptr(), plane_key(layer, number))
    return tuple(Planes(tuple(found), tuple(found.values()), **dict(kind)) for kind, found in kinds.items())


def _kind(cache: torch.Tensor, axes: Axes, share_of: Callable[[int], HeadShare]) -> dict[str, Any]:
    element = cache.element_size()
    cell_bytes = int(cache.shape[-1] * element)
    num_heads = 1 if axes.head is None else cache.shape[axes.head]
    return {
        "block_stride_bytes": cache.stride(0) * element,
        "token_stride_bytes": cache.stride(axes.token) * element,
        "head_stride_bytes": cell_bytes if axes.head is None else cache.stride(axes.head) * element,
        "cell_bytes": cell_bytes,
        "num_blocks": cache.shape[0],
        "block_size": cache.shape[axes.token],
        "num_heads": num_heads,
        **share_of(num_heads)._asdict(),
    }


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
    """View a layer's blocks as bytes, (num_blocks, page_bytes), with the block stride that they have. ``cache``: as
    vLLM registers it, with or without the padding behind a state. Raises `LayoutRefused`: it has no such pages."""
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
    """Describe the layers of a group that keeps states; returns one entry for each size of a state. ``pages``: layer
    name -> its blocks, as `pages_of_state`, narrowed to the planned blocks. ``first_head``: this rank's share of them.
    """
    kinds: dict[int, dict[int, int]] = {}
    for layer, view in pages.items():
        kinds.setdefault(state_bytes[layer], {}).setdefault(view.data_ptr(), plane_key(layer))
    view = next(iter(pages.values()))
    page_bytes = view.shape[1]
    return tuple(
        _planes(view, found, page_bytes, cell_bytes=size, num_heads=1, first_head=first_head, padded_bytes=page_bytes)
        for size, found in kinds.items()
    )


def part_planes(pages: Mapping[str, torch.Tensor], parts: Mapping[str, Sequence[StatePart]]) -> tuple[Planes, ...]:
    """Describe the same layers by channel and head, as `state_planes`; () if it is not known for all of them.
    ``parts``: layer name -> parts of its state, in the same order on all ranks."""
    if not all(parts[layer] for layer in pages):
        return ()
    kinds: dict[tuple[int, StatePart], dict[int, int]] = {}
    for layer, view in pages.items():
        for place, part in enumerate(parts[layer]):
            rows = kinds.setdefault((place, part._replace(offset_bytes=0, row_stride_bytes=0)), {})
            first = view.data_ptr() + part.offset_bytes
            for row in range(part.num_rows):
                rows.setdefault(first + row * part.row_stride_bytes, plane_key(layer, place, row))
    view = next(iter(pages.values()))
    return tuple(
        _planes(
            view,
            found,
            part.cell_bytes,
            cell_bytes=part.cell_bytes,
            num_heads=part.num_cells,
            first_head=part.first_cell,
            copies=part.copies,
            copy=part.copy,
        )
        for (_, part), found in kinds.items()
    )


def _planes(view: torch.Tensor, found: Mapping[int, int], head_stride_bytes: int, **cells: int) -> Planes:
    """Planes of pages, each of which is a block of one token."""
    return Planes(
        bases=tuple(found),
        keys=tuple(found.values()),
        block_stride_bytes=view.stride(0),
        token_stride_bytes=view.shape[1],
        head_stride_bytes=head_stride_bytes,
        num_blocks=view.shape[0],
        block_size=1,
        **cells,
    )
