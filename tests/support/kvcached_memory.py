# SPDX-License-Identifier: Apache-2.0
"""KV caches laid out as kvcached 0.1.6 lays them out, over ordinary memory.

One :class:`Geometry` yields the tensors, the backend's shape and the sizes, so a test varies one value and the
three cannot drift apart. ``tests/contract/test_kvcached_layouts.py`` compares it with the real kvcached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from kvcached_nixl.worker.geometry.layout import Layout, Page, plan
from kvcached_nixl.worker.geometry.planes import Axes


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache as kvcached reserves it.

    Attributes:
        era: ``kv_apart`` (N, 2, bs, H, D), ``packed`` (N, H, bs, 2D), ``mla`` (N, bs, C)
            or, since vLLM 0.29, ``latent`` (N, 1, bs, C).
        contiguous: all layers of a block are adjacent; otherwise each layer is separate.
        num_blocks: planned blocks. ``reserved_blocks``, which is larger: blocks for which kvcached reserves addresses.
        groups: KV-cache groups that share the pools; layer ``g.i`` of each group g uses pool i.
        wide: groups whose blocks have twice as many tokens of half as many heads, and so the same bytes.
        states: groups that keep a state in each block.
        split: kernel blocks in a block of such a group; all other numbers here are of kernel blocks.
    """

    era: str = "kv_apart"
    contiguous: bool = False
    num_pools: int = 4
    num_kv_heads: int = 4
    head_size: int = 8
    block_size: int = 4
    num_blocks: int = 5
    reserved_blocks: int = 13
    groups: int = 1
    wide: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    split: int = 1
    head_major: bool = False
    dtype: torch.dtype = field(default=torch.bfloat16)

    @property
    def is_latent(self) -> bool:
        return self.era in ("mla", "latent")

    @property
    def half_elements(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size

    @property
    def page_elements(self) -> int:
        return self.half_elements * (1 if self.is_latent else 2)

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.dtype.itemsize

    def page(self) -> Page:
        """Bytes of a block of one layer, as vLLM computes them."""
        return Page(self.page_bytes, self.block_size, 1 if self.is_latent else self.num_kv_heads)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the backend's logical shape of one layer."""
        heads, size, width = self.num_kv_heads, self.block_size, self.head_size
        return {
            "kv_apart": (num_blocks, 2, size, heads, width),
            "packed": (num_blocks, heads, size, 2 * width),
            "mla": (num_blocks, size, heads * width),
            "latent": (num_blocks, 1, size, heads * width),
        }[self.era]

    def of_group(self, group: int) -> Geometry:
        """Returns the geometry of a group's blocks."""
        if group not in self.wide:
            return self
        return replace(self, block_size=2 * self.block_size, num_kv_heads=self.num_kv_heads // 2)

    def layers_of_groups(self) -> tuple[tuple[str, ...], ...]:
        """Per KV-cache group, the names of its layers."""
        layers, pools = self.layer_names(), self.num_pools
        return tuple(tuple(layers[group * pools : (group + 1) * pools]) for group in range(self.groups))

    def layout(self, caches: dict[str, torch.Tensor], **changed: Any) -> Layout:
        """The layout of these tensors of all layers. ``changed``: arguments of `plan`."""
        if "pages" not in changed:
            changed["pages"] = dict.fromkeys(caches, self.page())
        planned = {"axes": self.axes(), "num_blocks": self.num_blocks, "num_pools": self.num_pools}
        return plan(caches, **(planned | changed))

    def axes(self) -> Axes:
        """Returns what each dimension of the backend's shape stands for."""
        numbers = {"num_blocks": 1_000_003, "block_size": 48, "num_heads": 7}
        probed = replace(self, block_size=numbers["block_size"], num_kv_heads=numbers["num_heads"], head_size=80)
        return Axes.from_probe(probed.shape(numbers["num_blocks"]), **numbers)

    def layer_names(self) -> list[str]:
        return [
            f"model.layers.{g * self.num_pools + i}.attn" for g in range(self.groups) for i in range(self.num_pools)
        ]

    def allocate(self) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Returns layer name -> attention's view, and the memory behind the views."""
        count, pools = self.reserved_blocks, self.num_pools
        page = self.page_elements
        if self.contiguous:
            memory = [torch.zeros(count * pools * page, dtype=self.dtype)]
            places = [(memory[0], pool * page, pools * page) for pool in range(pools)]
        else:
            memory = [torch.zeros(count * page, dtype=self.dtype) for _ in range(pools)]
            places = [(pool, 0, page) for pool in memory]
        return {
            name: self._pages(*place) if group in self.states else self.of_group(group)._view(*place)
            for group, names in enumerate(self.layers_of_groups())
            for name, place in zip(names, places, strict=True)
        }, memory

    def _pages(self, memory: torch.Tensor, offset: int, block_stride: int) -> torch.Tensor:
        """Returns a layer's blocks as bytes, as vLLM registers those of a layer with a state since 0.27."""
        size, page = self.dtype.itemsize * self.split, self.page_bytes * self.split
        shape = (self.reserved_blocks // self.split, 1, 1, page)
        return memory.view(torch.int8).as_strided(shape, (block_stride * size, page, page, 1), offset * size)

    def _view(self, memory: torch.Tensor, offset: int, block_stride: int) -> torch.Tensor:
        heads, size, width = self.num_kv_heads, self.block_size, self.head_size
        half = self.half_elements
        kv_stride = half
        if not self.contiguous and self.era == "kv_apart":
            block_stride, kv_stride = half, self.reserved_blocks * half
        if self.era == "packed":
            inner = (size * 2 * width, 2 * width, 1) if self.head_major else (2 * width, heads * 2 * width, 1)
            strides: tuple[int, ...] = (block_stride, *inner)
        elif self.era == "mla":
            strides = (block_stride, heads * width, 1)
        elif self.era == "latent":
            strides = (block_stride, size * heads * width, heads * width, 1)
        else:
            strides = (block_stride, kv_stride, heads * width, width, 1)
        return memory.as_strided(self.shape(self.reserved_blocks), strides, offset)

    def expected_regions(self) -> int:
        """Returns how many regions a transfer of one block must touch."""
        if self.contiguous and self.num_pools > 1:
            return 1
        split = self.era == "kv_apart" and not self.contiguous
        return self.num_pools * (2 if split else 1)

    def block_bytes_of_all_layers(self) -> int:
        return math.prod((self.num_pools, self.page_bytes))


def geometries(**changed: Any) -> st.SearchStrategy[Geometry]:
    """Small geometries in each of kvcached's arrangements. ``changed``: strategies of other values."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "era": st.sampled_from(["kv_apart", "packed", "mla", "latent"]),
        "contiguous": st.booleans(),
        "num_pools": st.integers(1, 3),
        "num_kv_heads": st.sampled_from([1, 2, 3]),
        "block_size": st.sampled_from([2, 4]),
        "head_size": st.just(4),
        "num_blocks": st.integers(1, 6),
        "reserved_blocks": st.integers(6, 9),
        "groups": st.integers(1, 2),
        "head_major": st.booleans(),
    }
    return st.builds(Geometry, **(drawn | changed))
