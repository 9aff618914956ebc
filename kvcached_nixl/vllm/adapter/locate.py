# SPDX-License-Identifier: Apache-2.0
"""Where each supported vLLM defines the classes and functions that we patch. The NIXL connector is the package
``v1/nixl/``, with a base, a pull and a push class of the connector, of its scheduler and of its worker.

Nothing here imports vLLM. A class that moved is found in its new module. A class that is only re-exported under its old
name is patched where it is defined.
"""

from __future__ import annotations

from kvcached_nixl.patching import Place, Target
from kvcached_nixl.vllm import KV_TRANSFER, KVCACHED_NIXL_COMPAT, NIXL_PREFIX

__all__ = [
    "API_ROUTES",
    "CONNECTOR_BASE",
    "ENGINE_CLIENT",
    "ENGINE_CORE",
    "ENGINE_CORE_BASE",
    "ENGINE_SCHEDULER",
    "ERROR_MODULES",
    "EXECUTOR",
    "FACADE",
    "FACADE_CLASS_NAMES",
    "FACTORY",
    "HTTP_MIDDLEWARE",
    "INPUT_PROCESSOR",
    "KVCACHED_ALLOCATION",
    "KVCACHED_COORDINATOR",
    "KVCACHED_GPU_WORKER",
    "KVCACHED_INTERFACES",
    "KVCACHED_PATCH",
    "KVCACHED_PATCH_MANAGER",
    "KVCACHED_VERSION_RANGE",
    "LOADER_BASE",
    "MEDIA_PROCESSING",
    "METADATA_MODULE",
    "MODEL_LOADER",
    "OUTPUT_PROCESSOR",
    "PULL_FACADE",
    "PUSH_CLASS_NAMES",
    "RENDERER",
    "STATS_MODULE",
    "STREAMING_LOADER",
    "TRANSFER_CONFIG",
    "WORKER",
    "WORKER_BASE",
    "WORKER_PROCESS",
]

CONNECTOR_BASE = Target(name="connector base", places=(Place(f"{KV_TRANSFER}.v1.base", "KVConnectorBase_V1"),))
"""The base class of every KV connector, not only NIXL's."""

FACADE = Target(name="connector", places=(Place(f"{NIXL_PREFIX}.connector", "NixlBaseConnector"),), scope=NIXL_PREFIX)
"""The base class of the pull and the push connector."""

PULL_FACADE = Target(
    name="pull connector", places=(Place(f"{NIXL_PREFIX}.connector", "NixlPullConnector"),), scope=NIXL_PREFIX
)
"""The class that the name ``NixlConnector`` refers to."""

FACADE_CLASS_NAMES = frozenset({"NixlBaseConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"})
PUSH_CLASS_NAMES = frozenset({"NixlPushConnector"})

WORKER = Target(
    name="worker", places=(Place(f"{NIXL_PREFIX}.base_worker", "NixlBaseConnectorWorker"),), scope=NIXL_PREFIX
)
"""The worker half of the connector, which kvcached's own patch changes."""

METADATA_MODULE = f"{NIXL_PREFIX}.metadata"
"""Where the message class of the connector's handshake is."""

ERROR_MODULES = ("vllm.exceptions", "vllm.entrypoints.openai.engine.protocol")
"""Where the errors of vLLM's API server are: since 0.29, and before."""

STATS_MODULE = f"{NIXL_PREFIX}.stats"
"""Where the classes of the connector's metrics are."""

ENGINE_SCHEDULER = Target(name="engine scheduler", places=(Place("vllm.v1.core.sched.scheduler", "Scheduler"),))
"""vLLM's own scheduler."""

ENGINE_CORE = Target(name="engine core", places=(Place("vllm.v1.engine.core", "EngineCoreProc"),))
"""The engine core process with the loop around the scheduler."""

ENGINE_CORE_BASE = Target(name="engine core base", places=(Place("vllm.v1.engine.core", "EngineCore"),))
"""The engine core's interface to clients, in any process."""

INPUT_PROCESSOR = Target(name="input processor", places=(Place("vllm.v1.engine.input_processor", "InputProcessor"),))
"""Builds the engine's requests in the API server."""

WORKER_PROCESS = Target(name="worker process", places=(Place("vllm.v1.worker.gpu_worker", "Worker"),))
"""One rank of an engine, on any kind of device."""

MODEL_LOADER = Target(
    name="model loader", places=(Place("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader"),)
)
"""Loads weights from files on a file system."""

STREAMING_LOADER = Target(
    name="streaming model loader",
    places=(Place("vllm.model_executor.model_loader.runai_streamer_loader", "RunaiModelStreamerLoader"),),
)
"""Streams weights from a file system or an object store."""

LOADER_BASE = Target(
    name="model loader base", places=(Place("vllm.model_executor.model_loader.base_loader", "BaseModelLoader"),)
)
"""The base class of every loader of weights."""

RENDERER = Target(name="renderer", places=(Place("vllm.renderers.base", "BaseRenderer"),))
"""Prepares prompts in the API server."""

MEDIA_PROCESSING = Target(
    name="media processing", places=(Place("vllm.multimodal.processing.context", "BaseProcessingInfo"),)
)
"""Computes the identifiers of images, sounds, ..."""

ENGINE_CLIENT = Target(name="engine client", places=(Place("vllm.v1.engine.async_llm", "AsyncLLM"),))
"""Gives the API server's requests to the engines, and their outputs back."""

API_ROUTES = Target(name="API routes", places=(Place("vllm.entrypoints.scale_out.factories"),))
"""Adds routes to the API server of a model that generates."""

HTTP_MIDDLEWARE = Target(
    name="HTTP middleware", places=(Place("vllm.entrypoints.serve.elastic_ep.middleware", "ScalingMiddleware"),)
)
"""Gets each HTTP request of the API server first."""

OUTPUT_PROCESSOR = Target(
    name="output processor", places=(Place("vllm.v1.engine.output_processor", "OutputProcessor"),)
)
"""Builds the outputs for clients in the API server."""

"""What the API server keeps of a request."""

EXECUTOR = Target(name="executor", places=(Place("vllm.v1.executor.abstract", "Executor"),))
"""Starts the workers of an engine core, in any kind of process."""

WORKER_BASE = Target(name="worker base", places=(Place("vllm.v1.worker.worker_base", "WorkerBase"),))
"""The base class of every worker, on every device and under every executor."""

FACTORY = Target(name="factory", places=(Place(f"{KV_TRANSFER}.factory", "KVConnectorFactory"),))

TRANSFER_CONFIG = Target(name="transfer config", places=(Place("vllm.config.kv_transfer", "KVTransferConfig"),))
"""``--kv-transfer-config``."""

KVCACHED_VERSION_RANGE = Target(
    name="kvcached's version range",
    places=(Place("kvcached.integration.version_utils", "VersionRange"),),
)
_KVCACHED_PATCHES = "kvcached.integration.vllm.patches"
KVCACHED_ALLOCATION = Target(
    name="kvcached's patch of the allocation",
    places=(Place(_KVCACHED_PATCHES, "KVCacheManagerAllocateSlotsPatch"),),
)
KVCACHED_COORDINATOR = Target(
    name="kvcached's patch of the coordinator",
    places=(Place(_KVCACHED_PATCHES, "KVCacheCoordinatorPatch"),),
)
KVCACHED_GPU_WORKER = Target(
    name="kvcached's patch of the GPU worker",
    places=(Place(_KVCACHED_PATCHES, "GPUWorkerPatch"),),
)
KVCACHED_PATCH_MANAGER = Target(
    name="kvcached's patch manager",
    places=(Place("kvcached.integration.patch_base", "PatchManager"),),
)
KVCACHED_PATCH = Target(
    name="kvcached",
    places=(Place(KVCACHED_NIXL_COMPAT, "NixlConnectorPatch"),),
)

KVCACHED_INTERFACES = Target(name="kvcached's engine", places=(Place("kvcached.integration.vllm.interfaces"),))
"""The functions that kvcached's patches of vLLM call."""
