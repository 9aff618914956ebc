# SPDX-License-Identifier: Apache-2.0
"""Shapes and sizes of the KV memory: arithmetic and tensor views only, without kvcached and vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import HostvmmError

if TYPE_CHECKING:
    import torch

_KV, _BLOCKS, _HEADS, _TOKENS, _WIDTH = range(5)


def shape_for_kvcached(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Returns the shape to pass to kvcached for the shape that CPU attention asks for.

    CPU attention up to vLLM 0.22 asks for (2, blocks, heads, block_size, head_size). kvcached takes
    (2, blocks, block_size, heads, head_size), which has as many bytes per block. kvcached accepts every other shape,
    such as the packed (blocks, heads, block_size, 2 * head_size) of later versions, so it is returned unchanged.
    """
    if len(shape) != 5 or shape[_KV] != 2:
        return shape
    if shape[_TOKENS] != block_size:
        raise HostvmmError(
            found=f"CPU attention asks for KV memory of shape {shape} with blocks of {block_size} tokens",
            expected=f"(2, blocks, heads, {block_size}, head_size)",
            consequence="kvcached would address the wrong bytes, so the engine is stopped.",
            remedy="Use a vLLM version from the support matrix.",
        )
    return (shape[_KV], shape[_BLOCKS], shape[_TOKENS], shape[_HEADS], shape[_WIDTH])


def view_for_attention(tensor: torch.Tensor) -> torch.Tensor:
    """Returns kvcached's (2, blocks, tokens, heads, width) tensor as CPU attention's (2, blocks, heads, tokens, width).

    Same bytes, any dtype, device cpu. Each block keeps its size and address. Inside a block the kernel expects the
    tokens of a head to be contiguous, so the view reinterprets the block's elements in that order. A transposed view
    would be wrong, because the kernel has no parameter for a token stride.
    """
    kv, blocks, tokens, heads, width = tensor.shape
    if tuple(tensor.stride()[2:]) != (heads * width, width, 1):
        raise HostvmmError(
            found=f"kvcached gave KV memory of shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}",
            expected="contiguous elements within each block",
            consequence="Attention would read other blocks' bytes, so the engine is stopped.",
            remedy="Use kvcached 0.1.6.",
        )
    view = tensor.as_strided(
        (kv, blocks, heads, tokens, width),
        (tensor.stride(_KV), tensor.stride(_BLOCKS), tokens * width, width, 1),
        tensor.storage_offset(),
    )
    copy_view = getattr(tensor, "_kvcached_block_copy_view", None)
    if copy_view is not None:  # kvcached stores its block-copy geometry as an attribute of the tensor
        view._kvcached_block_copy_view = copy_view
    return view


@dataclass(frozen=True)
class Pool:
    """One kvcached pool on one device.

    A page group is one page for each layer and KV buffer: the smallest amount by which the pool grows or shrinks, in
    both layouts.
    """

    device_bytes: int
    page_bytes: int
    layers: int
    kv_buffers: int
    contiguous: bool
    utilization: float
    """kvcached leaves (1 - utilization) of the device unused (KVCACHED_GPU_UTILIZATION)."""

    @property
    def page_group_bytes(self) -> int:
        return self.page_bytes * self.layers * self.kv_buffers

    @property
    def zero_page_bytes(self) -> int:
        """Size of the shared zero page, mapped at every address without memory: one mapping unit of the pool."""
        return self.page_group_bytes if self.contiguous else self.page_bytes

    @property
    def mappings(self) -> int:
        """Number of kernel mappings for the pool's addresses: one for each range of the zero page's size."""
        return self.device_bytes // self.zero_page_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes available for KV blocks: whole page groups, without kvcached's headroom and the zero page."""
        headroom_bytes = int(self.device_bytes * (1.0 - self.utilization))
        spare_bytes = max(self.device_bytes - headroom_bytes - self.zero_page_bytes, 0)
        return spare_bytes // self.page_group_bytes * self.page_group_bytes

    def refuse_if_too_small(self, planned_bytes: int | None = None) -> None:
        """Raises HostvmmError if no page group fits the device or `planned_bytes` (the KV cache that vLLM planned).

        Otherwise kvcached would wait for ever for the first block.
        """
        step = (
            f"{_mib(self.page_group_bytes)}, one page group of kvcached "
            f"({_mib(self.page_bytes)} x {self.layers} layers x {self.kv_buffers} KV buffers)"
        )
        consequence = "No KV block could get memory and the engine would wait for ever, so it is stopped."
        if self.usable_bytes < self.page_group_bytes:
            least_bytes = (self.page_group_bytes + self.zero_page_bytes) / self.utilization
            least_gib = math.ceil(least_bytes / 2**20 + 2) / 1024
            raise HostvmmError(
                found=f"an emulated device of {_mib(self.device_bytes)} (KVCACHED_HOSTVMM_GIB)",
                expected=f"{step}, and a zero page of {_mib(self.zero_page_bytes)}, in {self.utilization:.0%} of it",
                consequence=consequence,
                remedy=f"Set KVCACHED_HOSTVMM_GIB to {least_gib:.4f} or more; room for three page groups is useful.",
            )
        if planned_bytes is not None and planned_bytes < self.page_group_bytes:
            raise HostvmmError(
                found=f"a planned KV cache of {_mib(planned_bytes)}",
                expected=f"at least {step}",
                consequence=consequence,
                remedy="Raise VLLM_CPU_KVCACHE_SPACE, --kv-cache-memory-bytes or --num-gpu-blocks-override.",
            )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
