# SPDX-License-Identifier: Apache-2.0
"""Named access to a rank's KV cache, as the worker half of vLLM's NIXL connector knows it: blocks, layers, heads.

Every name is checked when it is used: a missing name is a refusal and never replaced by a default.
Source: ``v1/nixl/base_worker.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.series import COUNTS_EXTERNAL_WEIGHTS, LOADS_BEHIND
from kvcached_nixl.vllm.adapter.specs import (
    dims_first,
    groups_of_states,
    is_state,
    kv_heads_of,
    odd_cells,
    parts_of_state,
    specs_of,
    state_bytes,
    without_states,
)
from kvcached_nixl.vllm.adapter.versions import installed_has
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.planes import HeadShare
from kvcached_nixl.worker.geometry.layout import Page
from kvcached_nixl.worker.geometry.states import StatePart

_PROBED = MappingProxyType({"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009})
"""Sizes that no other dimension of a cache has, so that each dimension of a shape can be identified by its size."""

_UNKNOWN_HEAD = 2**20
"""Above the heads of every model. Times the tensor-parallel size, so that ranks of two sizes have none in common."""


@dataclasses.dataclass(frozen=True)
class KVCacheView:
    """See the module. ``connector`` is the worker half of a NIXL connector."""

    connector: Any

    @property
    def worker(self) -> Any:
        return private(self.connector, "connector_worker")

    @property
    def vllm_config(self) -> Any:
        return private(self.worker, "vllm_config")

    @property
    def tp_size(self) -> int:
        return int(private(self.worker, "world_size"))

    @property
    def tp_rank(self) -> int:
        return int(private(self.worker, "tp_rank"))

    @property
    def kv_cache_groups(self) -> Any:
        return private(self.worker, "kv_cache_config").kv_cache_groups

    @property
    def attention_groups(self) -> list[Any]:
        return without_states(self.kv_cache_groups)

    @property
    def has_states(self) -> bool:
        return len(self.attention_groups) < len(self.kv_cache_groups)

    @property
    def attention_backends(self) -> list[Any]:
        """The attention backends, without those of layers that keep a state."""
        if not self.has_states:
            return list(private(self.worker, "attn_backends"))
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        layers = [layer for one in self.attention_groups for layer in one.layer_names]
        return list(get_current_attn_backends(self.vllm_config, layers))

    @property
    def num_blocks(self) -> int:
        """The number of blocks that vLLM planned, in kernel blocks."""
        return int(private(self.worker, "num_blocks"))

    @property
    def num_pools(self) -> int:
        """The number of memory pools behind the KV cache. Layers of different groups may share a pool."""
        tensors = private(self.worker, "kv_cache_config").kv_cache_tensors
        if not installed_has(LOADS_BEHIND):
            return len(tensors)
        return len({one.offset + number * one.layer_stride for one in tensors for number in range(len(one.layers))})

    def groups(self) -> list[dict[str, Page]]:
        """Per KV-cache group: layer name -> the size of one of its kernel blocks.

        Raises:
            LayoutRefused: a layer has cells that are not one token of one head.
        """
        return [self._pages(group.layer_names, group.kv_cache_spec) for group in self.kv_cache_groups]

    def _pages(self, layers: Sequence[str], spec: Any) -> dict[str, Page]:
        ratio = self.kernel_blocks_per_block
        pages: dict[str, Page] = {}
        for layer in layers:
            own = spec.kv_cache_specs[layer] if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
            if is_state(own):
                pages[layer] = Page(own.page_size_bytes, 1, 1, state_bytes(own), self._parts_of_state(own))
                continue
            if reason := odd_cells(own):
                raise LayoutRefused(
                    found=f"layer {layer!r} with {reason}",
                    expected="cells of one token and one head, with K and V together or apart",
                    consequence="peers with other block sizes or heads would mix cells up; the engine stops",
                    remedy="choose another --attention-backend or --kv-cache-dtype, or run without ENABLE_KVCACHED",
                )
            heads = int(private(own, "num_kv_heads"))
            pages[layer] = Page(own.page_size_bytes // ratio, own.block_size // ratio, heads)
        return pages

    def _parts_of_state(self, spec: Any) -> tuple[StatePart, ...]:
        groups = groups_of_states(private(self.worker, "model_config").hf_text_config)
        return parts_of_state(spec, self.tp_rank, self.tp_size, groups, dim_first=dims_first())

    def probe_cache_shape(self) -> tuple[tuple[int, ...], Mapping[str, int]]:
        """The shape of a layer's cache for distinctive numbers of blocks, tokens and heads, and those numbers."""
        if installed_has(LOADS_BEHIND):
            # With any backend, with one head for a latent.
            heads = 1 if self.use_mla else _PROBED["num_heads"]
            return (_PROBED["num_blocks"], heads, _PROBED["block_size"], 1), _PROBED
        backend = self.attention_backends[0]
        shape = backend.get_kv_cache_shape(
            num_blocks=_PROBED["num_blocks"],
            block_size=_PROBED["block_size"],
            num_kv_heads=_PROBED["num_heads"],
            head_size=1,
        )
        return tuple(shape), _PROBED

    @property
    def kernel_blocks_per_block(self) -> int:
        """Kernel blocks per logical block, in every KV-cache group (see `unserved`)."""
        return int(private(self.worker, "_physical_blocks_per_logical_kv_block"))

    def kernel_blocks_in(self, group: Any) -> int:
        """Kernel blocks in a logical block of a group with attention. vLLM's worker knows it for one group only."""
        block_size = int(group.kv_cache_spec.block_size)
        if installed_has(COUNTS_EXTERNAL_WEIGHTS):
            return block_size // self._kernel_block_size_by_spec(group)
        if block_size == self.vllm_config.cache_config.block_size:
            return self.kernel_blocks_per_block
        from vllm.v1.worker.utils import select_common_block_size

        return block_size // int(select_common_block_size(block_size, self.attention_backends))

    def _kernel_block_size_by_spec(self, group: Any) -> int:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends_and_specs
        from vllm.v1.worker.utils import select_common_block_size

        alone = dataclasses.replace(private(self.worker, "kv_cache_config"), kv_cache_groups=[group])
        found = get_current_attn_backends_and_specs(self.vllm_config, alone, self.attention_backends)
        return int(select_common_block_size(int(group.kv_cache_spec.block_size), *found))

    # ----------------------------------------------------------------------------------------------------- its heads

    @property
    def use_mla(self) -> bool:
        return bool(private(self.worker, "use_mla"))

    @property
    def kv_shares(self) -> int:
        """How many ranks hold KV of their own, at most: one for latents, one for each KV head."""
        if self.has_states:
            # Every rank has a share of its own.
            return MAX_TP_SIZE
        specs = [spec for group in self.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
        return max(self._shares_of_layer(int(private(spec, "num_kv_heads"))) for spec in specs)

    def _shares_of_layer(self, num_heads: int) -> int:
        if num_heads > 1:
            return num_heads * self.tp_size
        if self.use_mla:
            return 1
        return max((total for total in self._numbers_of_heads if total <= self.tp_size), default=self.tp_size)

    @property
    def _numbers_of_heads(self) -> set[int]:
        """The numbers of KV heads in layers of the model and its drafter, on all ranks together."""
        model = private(self.worker, "model_config")
        drafter = optional(self.vllm_config.speculative_config, "draft_model_config")
        configs = [one.hf_text_config for one in (model, drafter) if one is not None]
        return kv_heads_of(*configs) | {int(model.get_total_num_kv_heads())}

    def share_of(self, num_heads: int) -> HeadShare:
        """Returns which of the model's KV heads this rank has in layers with ``num_heads`` on a rank; 0 stands for
        layers that keep a state, of which a rank has a share of its own.

        With more ranks than heads, vLLM gives neighbours copies of a head. Which one a rank's only head is, may not be
        known if layers have different numbers of heads; then no rank of another tensor-parallel size has the head that
        is returned.
        """
        unknown = HeadShare(_UNKNOWN_HEAD * self.tp_size + self.tp_rank)
        if not num_heads:
            return unknown
        if num_heads > 1 or self.tp_size == 1:
            return HeadShare(self.tp_rank * num_heads)
        totals = {1} if self.use_mla else {total for total in self._numbers_of_heads if total <= self.tp_size}
        found = {self.tp_rank * total // self.tp_size for total in totals}
        if len(found) != 1 or self.tp_size % max(totals):
            return unknown
        # If several numbers of heads are possible, the largest leaves the fewest copies.
        copies = self.tp_size // max(totals)
        return HeadShare(found.pop(), copies, self.tp_rank % copies)
