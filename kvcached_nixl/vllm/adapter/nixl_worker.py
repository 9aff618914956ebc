# SPDX-License-Identifier: Apache-2.0
"""Named access to the private state of the worker half of vLLM's NIXL connector.

Every name is checked when it is used: a missing name is a refusal and never replaced by a default.
Source: ``v1/nixl/base_worker.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcached_nixl.proof.result import Question
from kvcached_nixl.vllm.adapter.attributes import envs, is_rocm, optional, private
from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE
from kvcached_nixl.vllm.adapter.nixl_kv_cache import KVCacheView
from kvcached_nixl.vllm.adapter.platform import runner_of
from kvcached_nixl.vllm.adapter.specs import dims_first, keeps_draft_kv, kind_of, specs_of, unserved_states
from kvcached_nixl.vllm.adapter.versions import found_version
from kvcached_nixl.vllm.adapter.weights import model_facts
from kvcached_nixl.wire.handshake import MemoryType


@dataclasses.dataclass(frozen=True)
class WorkerView(KVCacheView):
    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def engine_id(self) -> str:
        return str(private(self.worker, "engine_id"))

    @property
    def extra_config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = private(self.worker, "kv_transfer_config").kv_connector_extra_config
        return found

    @property
    def unserved(self) -> Sequence[tuple[str, str]]:
        """Settings of this engine with which no hand-over is possible: (found, expected)."""
        parallel = self.vllm_config.parallel_config
        found = [
            (name, getattr(parallel, name.replace("-", "_")))
            for name in ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")
        ]
        refused = [(f"--{name} {size}", f"--{name} 1") for name, size in found if size > 1]
        for group in self.kv_cache_groups:
            sizes = {spec.block_size for spec in specs_of(group.kv_cache_spec)}
            if len(sizes) > 1:
                shown = ", ".join(map(str, sorted(sizes)))
                refused.append((f"a KV-cache group with blocks of {shown} tokens", "blocks of one size in each group"))
        ratios = {self.kernel_blocks_in(group) for group in self.attention_groups}
        if len(ratios) > 1:
            shown = ", ".join(map(str, sorted(ratios)))
            refused.append((f"KV-cache groups with {shown} kernel blocks in a block", "the same in every group"))
        specs = [spec for one in self.kv_cache_groups for spec in specs_of(one.kv_cache_spec)]
        refused += unserved_states(specs, self.vllm_config.speculative_config)
        shuffles = is_rocm() and optional(envs(), "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")
        if shuffles or "ROCM_ATTN" in {one.get_name() for one in self.attention_backends}:
            what = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1" if shuffles else "the attention backend ROCM_ATTN"
            refused.append((f"{what}, which interleaves the tokens of a block", "another attention backend"))
        model = private(self.worker, "model_config")
        pruned = optional(model.multimodal_config, "video_pruning_rate")
        if pruned and private(model, "uses_mrope"):
            # The encoder computes the token positions, and decode does not run it for what prefill has computed.
            refused.append((f"--video-pruning-rate {pruned} of a model with spatial token positions", "no pruning"))
        # Each engine computes the scales of an fp8 cache for itself. vLLM 0.28 has removed them.
        if optional(self.vllm_config.cache_config, "calculate_kv_scales"):
            refused.append(("--calculate-kv-scales", "scales that come with the model"))
        return refused

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Everything besides the weights that determines the bytes of KV. Must be equal on both sides."""
        model, cache = private(self.worker, "model_config"), self.vllm_config.cache_config
        facts = {
            "vLLM": found_version("vllm"),
            **model_facts(self.vllm_config),
            "cache dtype": cache.cache_dtype,
            "heads": f"{model.get_total_num_kv_heads()} of {model.get_head_size()}",
            "layers": model.get_total_num_hidden_layers(),
            "attention": self._attention,
            "groups": "; ".join(
                f"{index}: {kind_of(one.kv_cache_spec)}" for index, one in enumerate(self.kv_cache_groups)
            ),
        }
        if self.has_states:
            facts["states of convolutions"] = "channels first" if dims_first() else "channels last"
        return tuple((name, str(value)) for name, value in facts.items())

    @property
    def _attention(self) -> str:
        names = [str(one.get_name()) for one in self.attention_backends]
        # CPU_ATTN stores a block's keys, and on some processors its values, in an order in which no part is one
        # token's. Indexers store a block's scales behind all of its keys.
        indexers = sorted({name for name in names if "INDEXER" in name})
        if names[0] != "CPU_ATTN" and not indexers:
            return names[0]
        sizes = [str(group.kv_cache_spec.block_size) for group in self.attention_groups]
        shown = sizes[0] if len(set(sizes)) == 1 else "+".join(sizes)
        parts = f" in {self.kernel_blocks_per_block}" if self.kernel_blocks_per_block > 1 else ""
        return f"{'+'.join([names[0], *indexers])}, whole blocks of {shown} tokens{parts}"

    @property
    def zeroes_blocks(self) -> bool:
        """Whether vLLM zeroes new blocks on the device at the beginning of a step."""
        return bool(private(private(self.worker, "kv_cache_config"), "needs_kv_cache_zeroing"))

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
        return runner_of(self.vllm_config) == "V2" or bool(speculative.disable_padded_drafter_batch)

    # ---------------------------------------------------------------------------------------------------- its memory

    @property
    def load(self) -> tuple[int, int]:
        """Tokens of the longest request, and most requests that run at a time."""
        config = self.vllm_config
        return int(config.model_config.max_model_len), int(config.scheduler_config.max_num_seqs)

    @property
    def memory_type(self) -> MemoryType:
        return msgspec.convert(private(self.worker, "nixl_memory_type"), MemoryType)

    def question(self, caches: Mapping[str, Any]) -> Question:
        """The question that a proof has to answer before these tensors are registered."""
        cache = next(iter(caches.values()))
        # Torch returns -1 as the device index of host memory.
        index = max(int(cache.get_device()), 0)
        return Question(str(cache.device.type), index, self.memory_type, tuple(self.backends))

    @property
    def device_id(self) -> int:
        return int(private(self.worker, "device_id"))

    # ----------------------------------------------------------------------------------------------------- its agent

    @property
    def agent(self) -> Any:
        return private(self.worker, "nixl_wrapper")

    @property
    def backends(self) -> list[str]:
        return list(private(self.worker, "nixl_backends"))

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

    # --------------------------------------------------------------------------------------------------- its metrics

    def use_stats(self, stats: Any) -> None:
        """Use ``stats`` as the worker's stats object; vLLM takes its data with each step."""
        private(self.worker, "xfer_stats")
        self.worker.xfer_stats = stats

    @property
    def stats(self) -> Any:
        return private(self.worker, "xfer_stats")
