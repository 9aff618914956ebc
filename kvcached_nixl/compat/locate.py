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
    "COMPATIBILITY_HASH_ALSO_BOUND_IN",
    "ENGINE_SCHEDULER",
    "ENGINE_SCHEDULER_INTERFACE",
    "FACADE",
    "FACADE_CLASS_NAMES",
    "FACTORY",
    "KVCACHED_PATCH",
    "METADATA",
    "PULL_FACADE",
    "PULL_SCHEDULER",
    "PULL_WORKER",
    "PUSH_CLASS_NAMES",
    "SCHEDULER",
    "TOPOLOGY",
    "WORKER",
]

_FILE = f"{KV_TRANSFER}.v1.nixl_connector"
_PACKAGE = f"{KV_TRANSFER}.v1.nixl"

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

SCHEDULER = Target(
    name="scheduler",
    places=(
        Place(f"{_PACKAGE}.base_scheduler", "NixlBaseConnectorScheduler"),
        Place(f"{_PACKAGE}.scheduler", "NixlConnectorScheduler"),
        Place(_FILE, "NixlConnectorScheduler"),
    ),
    scope=NIXL_PREFIX,
)
"""The scheduler side common to pull and push."""

PULL_SCHEDULER = Target(
    name="pull scheduler",
    places=(
        Place(f"{_PACKAGE}.pull_scheduler", "NixlPullConnectorScheduler"),
        Place(f"{_PACKAGE}.scheduler", "NixlConnectorScheduler"),
        Place(_FILE, "NixlConnectorScheduler"),
    ),
    scope=NIXL_PREFIX,
)

WORKER = Target(
    name="worker",
    places=(
        Place(f"{_PACKAGE}.base_worker", "NixlBaseConnectorWorker"),
        Place(f"{_PACKAGE}.worker", "NixlConnectorWorker"),
        Place(_FILE, "NixlConnectorWorker"),
    ),
    scope=NIXL_PREFIX,
)
"""The worker side common to pull and push."""

PULL_WORKER = Target(
    name="pull worker",
    places=(
        Place(f"{_PACKAGE}.pull_worker", "NixlPullConnectorWorker"),
        Place(f"{_PACKAGE}.worker", "NixlConnectorWorker"),
        Place(_FILE, "NixlConnectorWorker"),
    ),
    scope=NIXL_PREFIX,
)

METADATA = Target(name="metadata", places=(Place(f"{_PACKAGE}.metadata"), Place(_FILE)))
"""The module of the wire messages and of ``compute_nixl_compatibility_hash``."""

COMPATIBILITY_HASH_ALSO_BOUND_IN = (_PACKAGE, f"{_PACKAGE}.base_worker", f"{_PACKAGE}.worker")
"""Modules that take ``compute_nixl_compatibility_hash`` over with ``from metadata import``."""

TOPOLOGY = Target(
    name="topology",
    places=(
        Place(f"{KV_TRANSFER}.utils", "TransferTopology"),
        Place(f"{KV_TRANSFER}.utils", "TpKVTopology"),
    ),
)
"""The class that says how a KV tensor is cut into regions. ``TpKVTopology`` up to 0.19."""

ENGINE_SCHEDULER = Target(name="engine scheduler", places=(Place("vllm.v1.core.sched.scheduler", "Scheduler"),))
"""vLLM's own scheduler, which handles KV that could not be loaded."""

ENGINE_SCHEDULER_INTERFACE = Target(
    name="engine scheduler interface", places=(Place("vllm.v1.core.sched.interface", "SchedulerInterface"),)
)
"""Its base, which asked nobody else whether there is work up to 0.23."""

FACTORY = Target(name="factory", places=(Place(f"{KV_TRANSFER}.factory", "KVConnectorFactory"),))

KVCACHED_PATCH = Target(
    name="kvcached",
    places=(Place(KVCACHED_NIXL_COMPAT, "NixlConnectorPatch"),),
)
