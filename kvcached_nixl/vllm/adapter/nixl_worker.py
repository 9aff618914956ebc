# SPDX-License-Identifier: Apache-2.0
"""Named access to the private state of the worker half of vLLM's NIXL connector.

Every name is checked when it is used: a missing name is a refusal and never replaced by a default.
Source: ``v1/nixl/base_worker.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.proof.result import Question
from kvcached_nixl.vllm.adapter.attributes import optional, private
from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE
from kvcached_nixl.vllm.adapter.specs import (
    dims_first,
    groups_of_states,
    is_state,
    keeps_draft_kv,
    kind_of,
    kv_heads_of,
    odd_cells,
    parts_of_state,
    specs_of,
    state_bytes,
    unserved_states,
    without_states,
)
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, LOADS_BEHIND, found_version, installed_has
from kvcached_nixl.vllm.adapter.weights import model_facts
from kvcached_nixl.wire.checked import MAX_TP_SIZE
from kvcached_nixl.wire.handshake import MemoryType
from kvcached_nixl.wire.planes import HeadShare
from kvcached_nixl.worker.geometry.layout import Page

_PROBED = MappingProxyType({"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009})
"""Sizes that no other dimension of a cache has, so that each dimension of a shape can be identified by its size."""

_UNKNOWN_HEAD = 2**20
"""Above the heads of every model. Times the tensor-parallel size, so that ranks of two sizes have none in common."""


def _is_rocm() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


class WorkerView:
    """The worker half of a NIXL connector that is constructed.

    Attributes:
        worker: vLLM's own.
        num_blocks: the number of blocks that vLLM planned, in kernel blocks.
        kernel_blocks_per_block: kernel blocks per logical block, in every KV-cache group (see `unserved`).
        attention_groups: the KV-cache groups without those of layers that keep a state.
        zeroes_blocks: whether vLLM zeroes new blocks on the device at the beginning of a step.
    """

    def __init__(self, connector: Any) -> None:
        # Not the connector, whose facade keeps this view: in a reference cycle an agent may be freed before the worker
        # releases its handles, which aborts the process.
        worker = self.worker = private(connector, "connector_worker")
        self.vllm_config = private(worker, "vllm_config")
        self.extra_config: Mapping[str, Any] = private(worker, "kv_transfer_config").kv_connector_extra_config
        self.engine_id = str(private(worker, "engine_id"))
        self.tp_size, self.tp_rank = int(private(worker, "world_size")), int(private(worker, "tp_rank"))
        self.pp_size = int(private(self.vllm_config, "parallel_config").pipeline_parallel_size)
        self._model = private(worker, "model_config")
        self._kv_cache_config = private(worker, "kv_cache_config")
        self.kv_cache_groups = self._kv_cache_config.kv_cache_groups
        self._specs = [spec for group in self.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
        self.attention_groups = without_states(self.kv_cache_groups)
        self.has_states = len(self.attention_groups) < len(self.kv_cache_groups)
        self.use_mla = bool(private(worker, "use_mla"))
        self.num_blocks = int(private(worker, "num_blocks"))
        self.kernel_blocks_per_block = int(private(worker, "_physical_blocks_per_logical_kv_block"))
        self.zeroes_blocks = bool(private(self._kv_cache_config, "needs_kv_cache_zeroing"))
        self.memory_type = msgspec.convert(private(worker, "nixl_memory_type"), MemoryType)
        self.agent = private(worker, "nixl_wrapper")
        self.backends = list(private(worker, "nixl_backends"))

    @property
    def pp_rank(self) -> int:
        from vllm.distributed.parallel_state import get_pp_group

        return int(get_pp_group().rank_in_group) if self.pp_size > 1 else 0

    @property
    def attention_backends(self) -> list[Any]:
        """The attention backends, without those of layers that keep a state."""
        if not self.has_states:
            return list(private(self.worker, "attn_backends"))
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        layers = [layer for one in self.attention_groups for layer in one.layer_names]
        return list(get_current_attn_backends(self.vllm_config, layers))

    @property
    def num_pools(self) -> int:
        """The number of memory pools behind the KV cache. Layers of different groups may share a pool."""
        tensors = self._kv_cache_config.kv_cache_tensors
        if not installed_has(LOADS_BEHIND):
            return len(tensors)
        return len({one.offset + number * one.layer_stride for one in tensors for number in range(len(one.layers))})

    def groups(self) -> list[dict[str, Page]]:
        """Per KV-cache group: layer name -> the size of one of its kernel blocks.

        Raises:
            LayoutRefused: a layer has cells that are not one token of one head.
        """
        ratio, found = self.kernel_blocks_per_block, []
        for group in self.kv_cache_groups:
            pages: dict[str, Page] = {}
            for layer in group.layer_names:
                spec = group.kv_cache_spec
                own = spec.kv_cache_specs[layer] if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
                if is_state(own):
                    groups = groups_of_states(self._model.hf_text_config)
                    parts = parts_of_state(own, self.tp_rank, self.tp_size, groups, dim_first=dims_first())
                    pages[layer] = Page(own.page_size_bytes, 1, 1, state_bytes(own), parts)
                    continue
                # Sliding windows of vLLM 0.26 do not say so.
                dtype = self._cache_dtype if "turboquant" in self._cache_dtype else ""
                if reason := odd_cells(own) or dtype:
                    raise LayoutRefused(
                        found=f"layer {layer!r} with {reason}",
                        expected="cells of one token and one head, with K and V together or apart",
                        consequence="peers with other block sizes or heads would mix cells up; the engine stops",
                        remedy="choose another --attention-backend or --kv-cache-dtype, or run without ENABLE_KVCACHED",
                    )
                heads = int(private(own, "num_kv_heads"))
                pages[layer] = Page(own.page_size_bytes // ratio, own.block_size // ratio, heads)
            found.append(pages)
        return found

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

    def kernel_blocks_in(self, group: Any) -> int:
        """Kernel blocks in a logical block of a group with attention. vLLM's worker knows it for one group only."""
        block_size, by_spec = int(group.kv_cache_spec.block_size), installed_has(COUNTS_EXTERNAL_WEIGHTS)
        if not by_spec and block_size == self.vllm_config.cache_config.block_size:
            return self.kernel_blocks_per_block
        from vllm.v1.worker.utils import select_common_block_size

        found: Any = [self.attention_backends]
        if by_spec:
            from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends_and_specs

            alone = dataclasses.replace(self._kv_cache_config, kv_cache_groups=[group])
            found = get_current_attn_backends_and_specs(self.vllm_config, alone, self.attention_backends)
        return block_size // int(select_common_block_size(block_size, *found))

    # ----------------------------------------------------------------------------------------------------- its heads

    @property
    def kv_shares(self) -> int:
        """How many ranks hold KV of their own, at most: one for latents, one for each KV head."""
        if self.has_states:
            # Every rank has a share of its own.
            return MAX_TP_SIZE
        most = 0
        for num_heads in {int(private(spec, "num_kv_heads")) for spec in self._specs}:
            if num_heads > 1:
                shares = num_heads * self.tp_size
            elif self.use_mla:
                shares = 1
            else:
                shares = max((one for one in self._numbers_of_heads if one <= self.tp_size), default=self.tp_size)
            most = max(most, shares)
        return most

    @property
    def _numbers_of_heads(self) -> set[int]:
        """The numbers of KV heads in layers of the model and its drafter, on all ranks together."""
        drafter = optional(self.vllm_config.speculative_config, "draft_model_config")
        configs = [one.hf_text_config for one in (self._model, drafter) if one is not None]
        return kv_heads_of(*configs) | {int(self._model.get_total_num_kv_heads())}

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

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def unserved(self) -> Sequence[tuple[str, str]]:
        """Settings of this engine with which no hand-over is possible: (found, expected)."""
        from vllm import envs

        parallel = self.vllm_config.parallel_config
        found = [
            (name, getattr(parallel, name.replace("-", "_")))
            for name in ("decode-context-parallel-size", "prefill-context-parallel-size")
        ]
        if len(self.kv_cache_groups) > 1:
            # vLLM's constructor refuses these, and decode servers, in the supported series.
            found.append(("pipeline-parallel-size", self.pp_size))
        refused = [(f"--{name} {size}", f"--{name} 1") for name, size in found if size > 1]
        if self.pp_size > 1 and keeps_draft_kv(self.vllm_config.speculative_config):
            # Only the last stage has it: the others' weights are compared with decode's as if they had it, too.
            refused.append(("--pipeline-parallel-size with a draft model that has KV", "one of the two"))
        for group in self.kv_cache_groups:
            sizes = {spec.block_size for spec in specs_of(group.kv_cache_spec)}
            if len(sizes) > 1:
                shown = ", ".join(map(str, sorted(sizes)))
                refused.append((f"a KV-cache group with blocks of {shown} tokens", "blocks of one size in each group"))
        ratios = {self.kernel_blocks_in(group) for group in self.attention_groups}
        if len(ratios) > 1:
            shown = ", ".join(map(str, sorted(ratios)))
            refused.append((f"KV-cache groups with {shown} kernel blocks in a block", "the same in every group"))
        refused += unserved_states(self._specs, self.vllm_config)
        shuffles = _is_rocm() and optional(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")
        if shuffles or "ROCM_ATTN" in {one.get_name() for one in self.attention_backends}:
            what = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1" if shuffles else "the attention backend ROCM_ATTN"
            refused.append((f"{what}, which interleaves the tokens of a block", "another attention backend"))
        pruned = optional(self._model.multimodal_config, "video_pruning_rate")
        if pruned and private(self._model, "uses_mrope"):
            # The encoder computes the token positions, and decode does not run it for what prefill has computed.
            refused.append((f"--video-pruning-rate {pruned} of a model with spatial token positions", "no pruning"))
        others = {
            # Each engine computes the scales of an fp8 cache for itself. vLLM 0.28 has removed them.
            ("--calculate-kv-scales", "scales that come with the model"): optional(
                self.vllm_config.cache_config, "calculate_kv_scales"
            ),
            # vLLM hands nothing over for it, and its API server ends with the first request that an engine ends.
            ("--runner pooling", "a model that generates"): self._model.runner_type == "pooling",
            # KV of a prompt is none of a longer one's beginning. vLLM's engine turns its prefix cache off for them.
            ("a Prefix LM (non-causal attention)", "a causal model"): any(
                optional(spec, "non_causal") for spec in self._specs
            ),
            # What is decoded is written again and again, with bidirectional attention: nobody has shown such KV equal.
            ("a diffusion model", "a model that generates one token after the other"): optional(
                self.vllm_config, "diffusion_config"
            ),
        }
        return refused + [one for one, is_used in others.items() if is_used]

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Everything besides the weights that determines the bytes of KV. Must be equal on both sides."""
        model = self._model
        facts = {
            "vLLM": found_version("vllm"),
            **model_facts(self.vllm_config),
            "cache dtype": self._cache_dtype,
            "heads": f"{model.get_total_num_kv_heads()} of {model.get_head_size()}",
            "layers": model.get_total_num_hidden_layers(),
            "attention": self._attention,
            "groups": "; ".join(
                f"{index}: {kind_of(one.kv_cache_spec)}" for index, one in enumerate(self.kv_cache_groups)
            ),
        }
        if self.has_states:
            facts["states of convolutions"] = "channels first" if dims_first() else "channels last"
        # As vLLM compares settings, too: their order says nothing, and the tag is text.
        return tuple(sorted((name, str(value)) for name, value in facts.items()))

    @property
    def _cache_dtype(self) -> str:
        found = str(self.vllm_config.cache_config.cache_dtype)
        if "fp8" not in found:
            return found
        from vllm.platforms import current_platform

        # Some processors have a format of their own.
        return f"{found} {current_platform.fp8_dtype()}"

    @property
    def _attention(self) -> str:
        names = [str(one.get_name()) for one in self.attention_backends]
        # CPU_ATTN stores a block's keys, and on some processors its values, in an order in which no part is one
        # token's, and that depends on the processor. Indexers store a block's scales behind all of its keys.
        indexers = sorted({name for name in names if "INDEXER" in name})
        if names[0] != "CPU_ATTN" and not indexers:
            return names[0]
        sizes = [str(group.kv_cache_spec.block_size) for group in self.attention_groups]
        shown = sizes[0] if len(set(sizes)) == 1 else "+".join(sizes)
        parts = f" in {self.kernel_blocks_per_block}" if self.kernel_blocks_per_block > 1 else ""
        found = f"{'+'.join([names[0], *indexers])}, whole blocks of {shown} tokens{parts}"
        return found if indexers else f"{found}, for {self._instructions}"

    @property
    def _instructions(self) -> str:
        """Which of the processor's instructions vLLM's attention on a CPU uses."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        specs = [spec for group in self.attention_groups for spec in specs_of(group.kv_cache_spec)]
        found = {str(_get_attn_isa(self._model.dtype, one.block_size, one.head_size)) for one in specs}
        return "+".join(sorted(found))

    @property
    def answers_before_drafts(self) -> bool:
        """Whether prefill may answer before its device has computed the draft model's KV of the prompt.

        Model runner V2 copies a step's tokens to the host before the draft model runs. V1 does so after it, or before
        it if the drafter needs them on the host (disable_padded_drafter_batch). Sources: ``sample_tokens`` of
        ``v1/worker/gpu/model_runner.py`` and ``v1/worker/gpu_model_runner.py``.
        """
        speculative = self.vllm_config.speculative_config
        if not keeps_draft_kv(speculative):
            return False
        is_v2 = private(self.vllm_config, "use_v2_model_runner")
        return bool(is_v2 or speculative.disable_padded_drafter_batch)

    # ---------------------------------------------------------------------------------------------------- its memory

    @property
    def load(self) -> tuple[int, int]:
        """Tokens of the longest request, and most requests that run at a time."""
        return int(self._model.max_model_len), int(self.vllm_config.scheduler_config.max_num_seqs)

    def question(self, caches: Mapping[str, Any]) -> Question:
        """The question that a proof has to answer before these tensors are registered."""
        cache = next(iter(caches.values()))
        # Torch returns -1 as the device index of host memory.
        index = max(int(cache.get_device()), 0)
        return Question(str(cache.device.type), index, self.memory_type, tuple(self.backends))

    @property
    def device_id(self) -> int:
        return int(private(self.worker, "device_id"))

    def register_memory(
        self, extents: Sequence[tuple[int, int]], device_id: int, memory_type: MemoryType | None = None
    ) -> None:
        """Register KV memory, (address, bytes) each, with the agent; by default with the cache's memory type."""
        self.worker.device_id = device_id
        rows = [(address, length, device_id, "") for address, length in extents]
        descriptors = self.agent.get_reg_descs(rows, memory_type or self.memory_type)
        self.agent.register_memory(descriptors, backends=self.backends)
        self.keep_registered(descriptors)

    def keep_registered(self, descriptors: Any) -> None:
        """Have the stock worker deregister these when it shuts down."""
        private(self.worker, "_registered_descs").append(descriptors)

    def offer_handshake(self, compatibility: str, metadata: bytes) -> None:
        """Set this rank's handshake answer, in vLLM's own message class."""
        envelope = private(importlib.import_module(METADATA_MODULE), "NixlHandshakePayload")
        private(self.worker, "xfer_handshake_metadata")
        self.worker.xfer_handshake_metadata = envelope(compatibility_hash=compatibility, agent_metadata_bytes=metadata)
