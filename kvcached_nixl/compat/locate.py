# SPDX-License-Identifier: Apache-2.0
"""Where each supported vLLM keeps what we patch.

    0.17 - 0.19   one file, v1/nixl_connector.py
    0.20 - 0.23   the package v1/nixl/, one connector, one scheduler and one worker class
    0.24 -        the same package, each class split into a base, a pull and a push class

Nothing here imports vLLM. A class that moved is found by its new place; one that is only re-exported under its old name
is patched where it is defined.
"""

from __future__ import annotations

from kvcached_nixl.compat.names import KV_TRANSFER, KVCACHED_NIXL_COMPAT, NIXL_PREFIX
from kvcached_nixl.patching import Place, Target

__all__ = [
    "CONNECTOR_BASE",
    "ENGINE_CORE",
    "ENGINE_CORE_BASE",
    "ENGINE_SCHEDULER",
    "ENGINE_SCHEDULER_INTERFACE",
    "ERROR_MODULES",
    "EXECUTOR",
    "FACADE",
    "FACADE_CLASS_NAMES",
    "FACTORY",
    "KVCACHED_INTERFACES",
    "KVCACHED_PATCH",
    "INPUT_PROCESSOR",
    "MEDIA_PROCESSING",
    "METADATA_MODULES",
    "MODEL_LOADER",
    "OUTPUT_PROCESSOR",
    "PULL_FACADE",
    "PUSH_CLASS_NAMES",
    "RENDERER",
    "STATS_MODULES",
    "WORKER",
    "WORKER_BASE",
    "WORKER_PROCESS",
]

_FILE = f"{KV_TRANSFER}.v1.nixl_connector"
_PACKAGE = f"{KV_TRANSFER}.v1.nixl"

CONNECTOR_BASE = Target(name="connector base", places=(Place(f"{KV_TRANSFER}.v1.base", "KVConnectorBase_V1"),))
"""What every connector inherits, others than NIXL's, too."""

FACADE = Target(
    name="connector",
    places=(
        Place(f"{_PACKAGE}.connector", "NixlBaseConnector"),
        Place(f"{_PACKAGE}.connector", "NixlConnector"),
        Place(_FILE, "NixlConnector"),
    ),
    scope=NIXL_PREFIX,
)
"""The class vLLM constructs. Since 0.24 the base of the pull and the push connector."""

PULL_FACADE = Target(
    name="pull connector",
    places=(
        Place(f"{_PACKAGE}.connector", "NixlPullConnector"),
        Place(f"{_PACKAGE}.connector", "NixlConnector"),
        Place(_FILE, "NixlConnector"),
    ),
    scope=NIXL_PREFIX,
)
"""The class behind the name ``NixlConnector``, where it is not the base of all."""

FACADE_CLASS_NAMES = frozenset({"NixlBaseConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"})
PUSH_CLASS_NAMES = frozenset({"NixlPushConnector"})

WORKER = Target(
    name="worker",
    places=(
        Place(f"{_PACKAGE}.base_worker", "NixlBaseConnectorWorker"),
        Place(f"{_PACKAGE}.worker", "NixlConnectorWorker"),
        Place(_FILE, "NixlConnectorWorker"),
    ),
    scope=NIXL_PREFIX,
)
"""Its worker half, which kvcached's own patch changes."""

METADATA_MODULES = (f"{_PACKAGE}.metadata", _FILE)
"""Where the envelope of its handshake is."""

ERROR_MODULES = ("vllm.exceptions", "vllm.entrypoints.openai.engine.protocol")
"""Where the errors of its API server are, since 0.29 and before."""

STATS_MODULES = (f"{_PACKAGE}.stats", _FILE)
"""Where the classes of its metrics are."""

ENGINE_SCHEDULER = Target(name="engine scheduler", places=(Place("vllm.v1.core.sched.scheduler", "Scheduler"),))
"""vLLM's own scheduler."""

ENGINE_SCHEDULER_INTERFACE = Target(
    name="engine scheduler interface", places=(Place("vllm.v1.core.sched.interface", "SchedulerInterface"),)
)
"""Its base, which asked nobody else whether there is work up to 0.23."""

ENGINE_CORE = Target(name="engine core", places=(Place("vllm.v1.engine.core", "EngineCoreProc"),))
"""The loop around the scheduler."""

ENGINE_CORE_BASE = Target(name="engine core base", places=(Place("vllm.v1.engine.core", "EngineCore"),))
"""What is asked of an engine from outside, in whatever process it runs."""

INPUT_PROCESSOR = Target(name="input processor", places=(Place("vllm.v1.engine.input_processor", "InputProcessor"),))
"""What the API server makes the engine's requests with."""

WORKER_PROCESS = Target(name="worker process", places=(Place("vllm.v1.worker.gpu_worker", "Worker"),))
"""One rank of an engine, on whatever kind of device."""

MODEL_LOADER = Target(
    name="model loader", places=(Place("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader"),)
)
"""What loads weights from files on a file system."""

RENDERER = Target(name="renderer", places=(Place("vllm.renderers.base", "BaseRenderer"),))
"""What the API server prepares prompts with."""

MEDIA_PROCESSING = Target(
    name="media processing", places=(Place("vllm.multimodal.processing.context", "BaseProcessingInfo"),)
)
"""What images, sounds, ... are identified by."""

OUTPUT_PROCESSOR = Target(
    name="output processor", places=(Place("vllm.v1.engine.output_processor", "OutputProcessor"),)
)
"""What the API server makes clients' outputs with."""

EXECUTOR = Target(name="executor", places=(Place("vllm.v1.executor.abstract", "Executor"),))
"""What an engine core starts its workers with, whatever they run in."""

WORKER_BASE = Target(name="worker base", places=(Place("vllm.v1.worker.worker_base", "WorkerBase"),))
"""What every worker inherits, on every device and under every executor."""

FACTORY = Target(name="factory", places=(Place(f"{KV_TRANSFER}.factory", "KVConnectorFactory"),))

KVCACHED_PATCH = Target(
    name="kvcached",
    places=(Place(KVCACHED_NIXL_COMPAT, "NixlConnectorPatch"),),
)

KVCACHED_INTERFACES = Target(name="kvcached's engine", places=(Place("kvcached.integration.vllm.interfaces"),))
"""What kvcached's patches of vLLM call."""
