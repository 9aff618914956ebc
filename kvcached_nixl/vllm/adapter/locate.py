# SPDX-License-Identifier: Apache-2.0
"""Where each supported vLLM defines the classes and functions that we patch. The NIXL connector is the package
``v1/nixl/``, with a base, a pull and a push class of the connector, of its scheduler and of its worker.

Nothing here imports vLLM. A class that moved is found in its new module. A class that is only re-exported under its old
name is patched where it is defined.
"""

from __future__ import annotations

from kvcached_nixl.patching import Target
from kvcached_nixl.vllm import KV_TRANSFER, KVCACHED_NIXL_COMPAT, NIXL_PREFIX

# ------------------------------------------------------------------------------------------------------- the connector

CONNECTOR_BASE = Target("connector base", f"{KV_TRANSFER}.v1.base", "KVConnectorBase_V1")
"""The base class of every KV connector, not only NIXL's."""
FACADE = Target("connector", f"{NIXL_PREFIX}.connector", "NixlBaseConnector")
"""The base class of the pull and the push connector."""
PULL_FACADE = Target("pull connector", f"{NIXL_PREFIX}.connector", "NixlPullConnector")
"""The class that the name ``NixlConnector`` refers to."""
FACADE_CLASS_NAMES = frozenset({"NixlBaseConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"})
PUSH_CLASS_NAMES = frozenset({"NixlPushConnector"})
WORKER = Target("worker", f"{NIXL_PREFIX}.base_worker", "NixlBaseConnectorWorker")
"""The worker half of the connector, which kvcached's own patch changes."""
METADATA_MODULE = f"{NIXL_PREFIX}.metadata"
"""Where the message class of the connector's handshake is."""
STATS_MODULE = f"{NIXL_PREFIX}.stats"
"""Where the classes of the connector's metrics are."""
FACTORY = Target("factory", f"{KV_TRANSFER}.factory", "KVConnectorFactory")
TRANSFER_CONFIG = Target("transfer config", "vllm.config.kv_transfer", "KVTransferConfig")
"""``--kv-transfer-config``."""

# ---------------------------------------------------------------------------------------------------------- the engine

ENGINE_SCHEDULER = Target("engine scheduler", "vllm.v1.core.sched.scheduler", "Scheduler")
ENGINE_CORE = Target("engine core", "vllm.v1.engine.core", "EngineCoreProc")
"""The engine core process with the loop around the scheduler."""
ENGINE_CORE_BASE = Target("engine core base", "vllm.v1.engine.core", "EngineCore")
"""The engine core's interface to clients, in any process."""
EXECUTOR = Target("executor", "vllm.v1.executor.abstract", "Executor")
"""Starts the workers of an engine core, in any kind of process."""
WORKER_BASE = Target("worker base", "vllm.v1.worker.worker_base", "WorkerBase")
"""The base class of every worker, on every device and under every executor."""
WORKER_PROCESS = Target("worker process", "vllm.v1.worker.gpu_worker", "Worker")
"""One rank of an engine, on any kind of device."""
MODEL_LOADER = Target("model loader", "vllm.model_executor.model_loader.default_loader", "DefaultModelLoader")
STREAMING_LOADER = Target(
    "streaming model loader", "vllm.model_executor.model_loader.runai_streamer_loader", "RunaiModelStreamerLoader"
)
"""Streams weights from a file system or an object store."""
LOADER_BASE = Target("model loader base", "vllm.model_executor.model_loader.base_loader", "BaseModelLoader")
"""The base class of every loader of weights."""

# ------------------------------------------------------------------------------------------------------ the API server

INPUT_PROCESSOR = Target("input processor", "vllm.v1.engine.input_processor", "InputProcessor")
OUTPUT_PROCESSOR = Target("output processor", "vllm.v1.engine.output_processor", "OutputProcessor")
RENDERER = Target("renderer", "vllm.renderers.base", "BaseRenderer")
MEDIA_PROCESSING = Target("media processing", "vllm.multimodal.processing.context", "BaseProcessingInfo")
"""Computes the identifiers of images, sounds, ..."""
ENGINE_CLIENT = Target("engine client", "vllm.v1.engine.async_llm", "AsyncLLM")
API_ROUTES = Target("API routes", "vllm.entrypoints.scale_out.factories")
"""Adds routes to the API server of a model that generates."""
HTTP_MIDDLEWARE = Target("HTTP middleware", "vllm.entrypoints.serve.elastic_ep.middleware", "ScalingMiddleware")
"""Gets each HTTP request of the API server first."""
HTTP_SERVER = Target("HTTP server", "vllm.entrypoints.launchers.launcher", "NoSignalServer")
"""Of which one of several API servers accepts connections by itself, from 0.32 on."""

# ------------------------------------------------------------------------------------------------------------ kvcached

_PATCHES = "kvcached.integration.vllm.patches"
KVCACHED_PATCH = Target("kvcached", KVCACHED_NIXL_COMPAT, "NixlConnectorPatch")
KVCACHED_VERSION_RANGE = Target("kvcached's version range", "kvcached.integration.version_utils", "VersionRange")
KVCACHED_PATCH_MANAGER = Target("kvcached's patch manager", "kvcached.integration.patch_base", "PatchManager")
KVCACHED_ALLOCATION = Target("kvcached's patch of the allocation", _PATCHES, "KVCacheManagerAllocateSlotsPatch")
KVCACHED_COORDINATOR = Target("kvcached's patch of the coordinator", _PATCHES, "KVCacheCoordinatorPatch")
KVCACHED_GPU_WORKER = Target("kvcached's patch of the GPU worker", _PATCHES, "GPUWorkerPatch")
KVCACHED_INTERFACES = Target("kvcached's engine", "kvcached.integration.vllm.interfaces")
"""The functions that kvcached's patches of vLLM call."""
KVCACHED_MANAGER = Target("kvcached's manager", "kvcached.kv_cache_manager", "KVCacheManager")
"""Which blocks of an engine are allocated, and in which pages."""
