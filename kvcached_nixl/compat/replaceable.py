# SPDX-License-Identifier: Apache-2.0
"""The classes that an operator may put in the place of vLLM's, and which patches have to run in them.

    --scheduler-cls                a subclass of vLLM's scheduler
    --worker-cls                   a subclass of vLLM's worker; a worker extension only adds to it
    kv_connector_module_path       a subclass of the NIXL connector

An executor (``--distributed-executor-backend``) that skips vLLM's constructor has no name for kvcached, and its workers
refuse to start (`naming`). A model loader that skips vLLM's way to the files leaves weights without their files, and
memory alone is compared.

Sources: ``config/scheduler.py`` (``get_scheduler_cls``), ``v1/worker/worker_base.py`` (``init_worker``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from kvcached_nixl.compat.locate import (
    CONNECTOR_BASE,
    ENGINE_SCHEDULER,
    FACADE,
    PULL_FACADE,
    WORKER_BASE,
    WORKER_PROCESS,
)
from kvcached_nixl.compat.private import private
from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import Decisions

__all__ = ["ways_around"]


def ways_around(
    decisions: Decisions, vllm_config: Any, connectors: Iterable[type], *, is_scheduler: bool
) -> Iterator[tuple[str, Refused]]:
    """Yields a refusal for each patch that the classes of this process do not reach.

    Args:
        connectors: the NIXL connector's class, or those derived from it.
        is_scheduler: in the engine core, not in a worker.
    """
    if is_scheduler:
        yield from decisions.bypassed(private(vllm_config, "scheduler_config").get_scheduler_cls(), ENGINE_SCHEDULER)
    else:
        module, _, name = private(vllm_config, "parallel_config").worker_cls.rpartition(".")
        if module:
            worker = getattr(importlib.import_module(module), name)
            yield from decisions.bypassed(worker, WORKER_BASE, WORKER_PROCESS)
    for cls in connectors:
        yield from decisions.bypassed(cls, CONNECTOR_BASE, FACADE, PULL_FACADE)
