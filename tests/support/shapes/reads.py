# SPDX-License-Identifier: Apache-2.0
"""Which names this package reads from which of vLLM's classes and modules, for the tests.

`private` refuses a missing name when it is used. ``tests/shapes`` looks for all of them in a vLLM that is not
installed. ``tests/unit/adapter/test_shapes.py`` compares this table with the code: it must have every name given to
`private` and every import from vLLM, and no name that is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcached_nixl.patching import Target
from kvcached_nixl.vllm import KV_TRANSFER
from kvcached_nixl.vllm.adapter.locate import (
    ENGINE_CLIENT,
    ENGINE_CORE,
    ENGINE_CORE_BASE,
    ENGINE_SCHEDULER,
    FACADE,
    FACTORY,
    LOADER_BASE,
    MEDIA_PROCESSING,
    METADATA_MODULE,
    MODEL_LOADER,
    RENDERER,
    STATS_MODULE,
    WORKER,
    WORKER_PROCESS,
)
from kvcached_nixl.vllm.adapter.versions import (
    ASKS_FOR_RESULTS,
    BEYOND_KVCACHED,
    COUNTS_EXTERNAL_WEIGHTS,
    HASHES_AHEAD,
    HITS_DIVERGE,
    LOADS_BEHIND,
)

__all__ = ["READS", "Reads"]


@dataclass(frozen=True)
class Reads:
    """Names that a class or its bases must store or define, or that a module must bind.

    Attributes:
        also: where it is in other versions.
        versions: vLLM versions with which they are read; empty for all.
        sometimes: names that are read with a default, where they are missing -> the vLLM versions that have them.
    """

    target: Target
    names: tuple[str, ...]
    versions: str = ""
    sometimes: Mapping[str, str] = field(default_factory=dict)
    also: tuple[Target, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        return (self.target, *self.also)

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, *self.sometimes)


def _at(target: Target, names: str = "", *, versions: str = "", **sometimes: str) -> Reads:
    return Reads(target, tuple(names.split()), versions, sometimes)


def _of(module: str, qualname: str, names: str = "", *, versions: str = "", **sometimes: str) -> Reads:
    name = f"{module}.{qualname}" if qualname else module
    return _at(Target(name, module, qualname), names, versions=versions, **sometimes)


def _first_of(modules: tuple[str, ...], qualname: str) -> Reads:
    first, *others = (Target(qualname, module, qualname) for module in modules)
    return Reads(first, (), also=tuple(others))


_OFFLOADING = f"{KV_TRANSFER}.v1.offloading"
_TIERS = HITS_DIVERGE.later
"""With which vLLM an OffloadingConnector may be beside ours."""
_ROPE = "vllm.model_executor.layers.rotary_embedding"
_CONFIG = "vllm.config"
_CACHE_INTERFACE = "vllm.v1.kv_cache_interface"
_OUTPUT = "vllm.v1.core.sched.output"

READS = (
    # The NIXL connector.
    _at(FACTORY, "get_connector_class"),
    _at(FACADE, "connector_worker _connector_metadata"),
    _at(
        WORKER,
        "vllm_config kv_transfer_config kv_cache_config model_config engine_id world_size tp_rank device_id "
        "num_blocks use_mla attn_backends _physical_blocks_per_logical_kv_block nixl_memory_type nixl_wrapper "
        "nixl_backends _registered_descs xfer_handshake_metadata xfer_stats",
    ),
    _of(METADATA_MODULE, "NixlHandshakePayload", "compatibility_hash agent_metadata_bytes"),
    _of(
        STATS_MODULE,
        "NixlKVConnectorStats",
        "data reset is_empty record_transfer record_failed_transfer record_kv_expired_req",
    ),
    _of(STATS_MODULE, "NixlPromMetrics", "observe _counter_cls _gauge_cls _histogram_cls"),
    _of(f"{KV_TRANSFER}.v1.multi_connector", "MultiConnector", "_connectors"),
    _of(f"{KV_TRANSFER}.v1.multi_connector", "MultiKVConnectorWorkerMetadata", "metadata"),
    # vLLM's OffloadingConnector beside it.
    _of(
        f"{KV_TRANSFER}.v1.offloading_connector",
        "OffloadingConnector",
        "connector_scheduler connector_worker",
        versions=_TIERS,
    ),
    _of(
        f"{_OFFLOADING}.scheduler",
        "OffloadingConnectorScheduler",
        "_current_batch_jobs_to_flush _jobs _req_status",
        versions=_TIERS,
    ),
    _of(
        f"{_OFFLOADING}.scheduler",
        "TransferJobStatus",
        "req_id pending_count is_store deferred_fence_block_ids",
        versions=_TIERS,
    ),
    _of(f"{_OFFLOADING}.scheduler", "RequestOffloadState", "group_states max_offload_tokens req", versions=_TIERS),
    _of(f"{_OFFLOADING}.scheduler", "RequestGroupState", "block_ids offload_keys", versions=_TIERS),
    _of(f"{_OFFLOADING}.worker", "OffloadingConnectorWorker", "_init_worker", versions=_TIERS),
    _of(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", "completed_jobs", versions=_TIERS),
    _of("vllm.v1.kv_offload.base", "CanonicalKVCaches", versions=_TIERS),
    _of("vllm.v1.kv_offload.base", "CanonicalKVCacheTensor", versions=_TIERS),
    _of("vllm.v1.kv_offload.base", "CanonicalKVCacheRef", versions=_TIERS),
    _of(f"{KV_TRANSFER}.v1.base", "SupportsHMA", "request_finished_all_groups"),
    _of(f"{KV_TRANSFER}.v1.base", "KVConnectorWorkerMetadata", "aggregate"),
    _of(
        f"{KV_TRANSFER}.v1.base",
        "KVConnectorTransferResults",
        "finished_sending finished_recving",
        versions=ASKS_FOR_RESULTS.later,
    ),
    _of("vllm.v1.attention.backend", "AttentionBackend", "get_kv_cache_shape", versions=LOADS_BEHIND.earlier),
    # The engine's scheduler and its loop.
    _at(
        ENGINE_SCHEDULER,
        "connector vllm_config kv_cache_manager requests running waiting pause_state finished_req_ids "
        "failed_recving_kv_req_ids recompute_kv_load_failures finish_requests "
        "max_num_running_reqs _inflight_prefills need_mamba_block_aligned_split scheduler_config "
        "encoder_cache_manager "
        "deferred_frees connector_prefix_cache_stats dynamic_sd_lookup num_spec_tokens",
        kv_holding_waiting=BEYOND_KVCACHED.later,
        skipped_waiting=BEYOND_KVCACHED.earlier,
    ),
    _at(
        ENGINE_CORE,
        "scheduler vllm_config input_queue batch_queue engines_running shutdown_state request_block_hasher "
        "_idle_state_callbacks process_input_queue_block _process_engine_step _send_error_outputs_to_client has_work",
        reject_new_requests=HASHES_AHEAD.later,
    ),
    _at(ENGINE_CORE_BASE, "scheduler model_executor"),
    _of("vllm.v1.executor.abstract", "Executor", "is_sleeping get_kv_connector_handshake_metadata"),
    _of("vllm.v1.core.sched.interface", "PauseState", "PAUSED_ALL"),
    # The worker and its model runner.
    _at(WORKER_PROCESS, "vllm_config model_runner"),
    _of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "get_model drafter"),
    _of("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "get_model speculator"),
    _at(LOADER_BASE, "load_weights load_model"),
    _at(MODEL_LOADER, "get_all_weights"),
    _of("vllm.distributed.parallel_state", "", "get_pp_group get_tensor_model_parallel_rank"),
    _of("vllm.distributed.kv_transfer", "", "get_kv_transfer_group has_kv_transfer_group"),
    _of("vllm.platforms", "", "current_platform"),
    _of("vllm.utils.network_utils", "", "get_ip"),
    _of("vllm.lora.utils", "", "get_adapter_absolute_path"),
    _of("vllm.v1.worker.utils", "", "select_common_block_size"),
    _of(
        "vllm.distributed.kv_transfer.kv_connector.utils",
        "",
        "get_current_attn_backends",
        get_current_attn_backends_and_specs=COUNTS_EXTERNAL_WEIGHTS.later,
    ),
    # Preparation of prompts in the API server.
    _at(RENDERER, "model_config config _mm_executor mm_processor_cache get_mm_processor"),
    _at(MEDIA_PROCESSING, "validate_num_items"),
    _of(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "block_pool coordinator enable_caching get_block_ids evict_blocks free allocate_slots",
    ),
    _of("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", "get_block_ids"),
    _of(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        "single_type_managers find_longest_cache_hit allocate_new_computed_blocks get_num_blocks_to_allocate",
    ),
    _of(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "req_to_blocks free block_size get_num_skipped_tokens",
    ),
    _of(
        "vllm.v1.core.block_pool",
        "BlockPool",
        "blocks cached_block_hash_to_block free_blocks get_num_free_blocks num_gpu_blocks",
    ),
    _at(
        Target("events of the block pool", "vllm.v1.core.block_pool", "BlockPool"),
        "take_events _remove_cached_block_hashes _emit_block_removed_events",
    ),
    _of("vllm.v1.core.block_pool", "", "MEDIUM_GPU"),
    _of("vllm.distributed.kv_events", "", "AllBlocksCleared"),
    _of("vllm.v1.core.kv_cache_utils", "KVCacheBlock", "block_hash is_null"),
    _of("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager", "cached freed"),
    _of("vllm.v1.attention.backends.cpu_attn", "", "_get_attn_isa"),
    _of(f"{_ROPE}.phi3_long_rope_scaled_rope", "Phi3LongRoPEScaledRotaryEmbedding", "use_long_rope"),
    _of(f"{_ROPE}.dynamic_ntk_scaling_rope", "DynamicNTKScalingRotaryEmbedding", "max_trained_positions"),
    _of("vllm.model_executor.models.llama4", "Llama4Attention", "attn_temperature_tuning"),
    # Requests and the outputs of a step.
    _of(
        "vllm.v1.request",
        "Request",
        "request_id client_index status num_prompt_tokens num_computed_tokens prompt_token_ids prompt_embeds "
        "mm_features lora_request block_hashes _block_hasher cache_salt kv_transfer_params skip_reading_prefix_cache "
        "num_preemptions resumable streaming_queue trace_headers is_finished get_finished_reason prefill_stats "
        "prompt_is_token_ids abort_immediately structured_output_request",
    ),
    _of("vllm.v1.structured_output.request", "StructuredOutputRequest", "_grammar"),
    _of(
        "vllm.v1.request",
        "RequestStatus",
        "WAITING PREEMPTED WAITING_FOR_REMOTE_KVS FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED "
        "FINISHED_REPETITION FINISHED_ERROR",
    ),
    _of("vllm.lora.request", "LoRARequest", "lora_int_id lora_name lora_path load_inplace is_3d_lora_weight"),
    _of(
        f"{_CONFIG}.lora", "LoRAConfig", "lora_dtype target_modules enable_tower_connector_lora enable_moe_shared_loras"
    ),
    _of(
        _OUTPUT,
        "SchedulerOutput",
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs "
        "new_block_ids_to_zero preempted_req_ids",
    ),
    _of(_OUTPUT, "NewRequestData", "req_id block_ids num_computed_tokens"),
    _of(_OUTPUT, "CachedRequestData", "req_ids new_block_ids num_computed_tokens resumed_req_ids"),
    _of("vllm.v1.outputs", "ModelRunnerOutput", "kv_connector_output"),
    _of(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        "finished_sending finished_recving invalid_block_ids kv_connector_stats kv_connector_worker_meta",
    ),
    _of(
        "vllm.v1.engine",
        "EngineCoreRequest",
        "request_id cache_salt data_parallel_rank priority sampling_params prompt_token_ids prompt_embeds mm_features "
        "resumable prompt_is_token_ids abort_immediately reasoning_parser_kwargs",
        session_id=HITS_DIVERGE.later,
    ),
    _of(
        "vllm.sampling_params",
        "SamplingParams",
        "all_stop_token_ids stop_token_ids extra_args max_tokens min_tokens prompt_logprobs",
        prompt_logprob_token_ids=BEYOND_KVCACHED.later,
    ),
    _of("vllm.exceptions", "VLLMValidationError"),
    _of("vllm.v1.engine", "EngineCoreOutput", "request_id finish_reason new_token_ids trace_headers"),
    _of("vllm.v1.engine", "FinishReason", "ERROR ABORT"),
    _of("vllm.v1.engine", "EngineCoreOutputs", "outputs"),
    _of(
        "vllm.v1.engine.output_processor",
        "RequestState",
        "queue detokenizer stats parent_req streaming_input output_kind",
    ),
    _of("vllm.v1.engine.output_processor", "OutputProcessorOutput", "reqs_to_abort"),
    _of("vllm.v1.engine.parallel_sampling", "ParentRequest", "output_aggregator"),
    _of("vllm.v1.metrics.stats", "PrefillStats", "num_cached_tokens num_local_cached_tokens num_prompt_tokens"),
    _of("vllm.v1.metrics.stats", "RequestStateStats", "arrival_time queued_ts first_token_ts first_token_latency"),
    _of("vllm.tracing", "", "extract_trace_context instrument_manual"),
    _of("vllm.v1.engine.output_processor", "RequestOutputCollector", "put output"),
    _of("vllm.outputs", "RequestOutput", "outputs"),
    _of("vllm.outputs", "CompletionOutput", "stop_reason"),
    _of("vllm.v1.engine.async_llm", "InputStreamError", "cause"),
    _first_of(("vllm.exceptions", "vllm.entrypoints.openai.engine.protocol"), "GenerationError"),
    _of("vllm.v1.engine", "EngineCoreRequestType", "WAKEUP"),
    # The API server while it shuts down.
    _at(
        ENGINE_CLIENT,
        "vllm_config output_processor output_handler renderer model_config generate is_tracing_enabled engine_core "
        "abort",
    ),
    _of("vllm.v1.engine.core_client", "AsyncMPClient", "_call_utility_async core_engine"),
    # Its endpoint for prompts with images, ...
    _of("vllm.entrypoints.openai.models.serving", "OpenAIServingModels", "lora_requests resolve_lora"),
    _of("vllm.entrypoints.serve.utils.api_utils", "", "load_aware_call with_cancellation"),
    _of("vllm.inputs", "", "embeds_input mm_input"),
    _of("vllm.multimodal.cache", "", "MultiModalProcessorOnlyCache"),
    _of(
        "vllm.multimodal.inputs",
        "",
        "MultiModalFieldConfig MultiModalFieldElem MultiModalKwargsItem MultiModalKwargsItems PlaceholderRange",
    ),
    _of("vllm.multimodal.inputs", "BaseMultiModalField", "keep_on_cpu"),
    _of("vllm.multimodal.inputs", "MultiModalFlatField", "dim"),
    _of("vllm.multimodal.inputs", "MultiModalSharedField", "batch_size"),
    _of(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        "request_states has_unfinished_requests propagate_error",
    ),
    _of("vllm.v1.engine.exceptions", "", "EngineDeadError EngineGenerateError"),
    # Configuration.
    _of(
        f"{_CONFIG}.vllm",
        "VllmConfig",
        "cache_config model_config parallel_config scheduler_config speculative_config kv_transfer_config "
        "diffusion_config ec_transfer_config lora_config observability_config shutdown_timeout use_v2_model_runner",
        aux_output_config=HASHES_AHEAD.later,
    ),
    _of(f"{_CONFIG}.aux_output", "AuxOutputConfig", "enable_return_routed_experts", versions=HASHES_AHEAD.later),
    _of(f"{_CONFIG}.observability", "ObservabilityConfig", "otlp_traces_endpoint"),
    _of(
        f"{_CONFIG}.cache",
        "CacheConfig",
        "block_size cache_dtype kv_offloading_size",
        calculate_kv_scales=HITS_DIVERGE.earlier,
        use_replayssm=HITS_DIVERGE.later,
    ),
    _of(
        f"{_CONFIG}.multimodal",
        "MultiModalConfig",
        "mm_processor_cache_type video_pruning_rate mm_encoder_fp8_scale_path",
    ),
    _of(
        f"{_CONFIG}.model",
        "ModelConfig",
        "model revision dtype quantization hf_config hf_text_config is_multimodal_model uses_mrope "
        "multimodal_config trust_remote_code max_model_len get_head_size get_hidden_size enable_prompt_embeds "
        "get_total_num_kv_heads get_total_num_hidden_layers model_impl disable_sliding_window quantization_config",
    ),
    _of(
        f"{_CONFIG}.parallel",
        "ParallelConfig",
        "_api_process_rank tensor_parallel_size worker_cls pipeline_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size data_parallel_size data_parallel_rank_local data_parallel_index "
        "assigned_physical_gpu_ids "
        "distributed_executor_backend enable_eplb enable_expert_parallel expert_placement_strategy eplb_config "
        "nnodes_within_dp world_size all2all_backend",
        enable_fault_tolerance=HITS_DIVERGE.later,
    ),
    _of(f"{_CONFIG}.scheduler", "SchedulerConfig", "max_num_seqs get_scheduler_cls"),
    _of(f"{_CONFIG}.speculative", "SpeculativeConfig", "method draft_model_config num_speculative_tokens"),
    _of(
        f"{_CONFIG}.kv_transfer",
        "KVTransferConfig",
        "engine_id kv_connector kv_connector_module_path is_kv_consumer is_kv_producer kv_buffer_device "
        "kv_load_failure_policy kv_connector_extra_config",
    ),
    _of(_CACHE_INTERFACE, "KVCacheConfig", "kv_cache_groups kv_cache_tensors needs_kv_cache_zeroing"),
    _of(_CACHE_INTERFACE, "KVCacheTensor", "layers layer_stride offset", versions=LOADS_BEHIND.later),
    _of(_CACHE_INTERFACE, "KVCacheGroupSpec", "kv_cache_spec"),
    _of(_CACHE_INTERFACE, "UniformTypeKVCacheSpecs", "kv_cache_specs"),
    _of(_CACHE_INTERFACE, "FullAttentionSpec", "block_size page_size_bytes num_kv_heads non_causal"),
    _of("vllm.model_executor.layers.mamba.mamba_utils", "", "is_conv_state_dim_first", versions=HITS_DIVERGE.later),
    _of(
        _CACHE_INTERFACE,
        "MambaSpec",
        "shapes dtypes mamba_type mamba_cache_mode page_size_bytes",
        tp_replicated=LOADS_BEHIND.later,
        num_prefill_checkpoint_blocks=LOADS_BEHIND.later,
    ),
    _of(
        "vllm.envs",
        "",
        "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT "
        "VLLM_VIDEO_LOADER_BACKEND",
        VLLM_RAISE_ON_LOGIT_NANS=HITS_DIVERGE.later,
    ),
    _of("vllm.platforms.interface", "Platform", "device_type get_nixl_memory_type is_rocm"),
)
"""Left out: what is this package's own, and attributes of other libraries' objects."""
