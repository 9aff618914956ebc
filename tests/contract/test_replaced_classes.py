# SPDX-License-Identifier: Apache-2.0
"""Classes that an operator puts in the place of vLLM's: they reach this package's patches, or the start is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from support import attention_engines
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

from kvcached_nixl.errors import StartRefused

parallel_state, patched, engine_over = (
    attention_engines.parallel_state,
    attention_engines.patched,
    attention_engines.engine_over,
)

Construct = Callable[..., Any]


class Counting(AsyncScheduler):
    """As an operator writes one who wants to know more."""

    added = 0

    def add_request(self, request: Any) -> None:
        self.added += 1
        super().add_request(request)

    def get_request_counts(self) -> tuple[int, int]:
        return 0, 0


class Forgetful(AsyncScheduler):
    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request


class Foreign:
    """Another implementation of vLLM's interface."""


class QuietWorker(Worker):
    def get_kv_connector_handshake_metadata(self) -> None:
        return None


class NamedWorker(Worker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class OwnConnector(NixlConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class GreedyConnector(NixlConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Skips the constructor, and what it checks."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_prompt_tokens - num_computed_tokens, True


@pytest.fixture
def construct(engine_over: attention_engines.EngineOver) -> Construct:
    """construct(role, scheduler, worker, connector): a connector of an engine that is configured so."""

    def make(role: str = "SCHEDULER", scheduler: Any = None, worker: str = "", connector: type | None = None) -> Any:
        engine, _ = engine_over(dataclasses.replace(attention_engines.GQA, era=attention_engines.ERAS[0]))
        config = engine.config
        config.scheduler_config.scheduler_cls = scheduler
        if worker:
            config.parallel_config.worker_cls = f"{__name__}.{worker}"
        if connector is not None:
            config.kv_transfer_config.kv_connector = connector.__name__
            config.kv_transfer_config.kv_connector_module_path = __name__
        return KVConnectorFactory.create_connector(config, KVConnectorRole[role], engine.kv_cache_config)

    return make


@pytest.mark.parametrize("scheduler", [None, Scheduler, AsyncScheduler, Counting, f"{__name__}.Counting"])
def test_a_scheduler_that_calls_vllms_is_served(construct: Construct, scheduler: Any) -> None:
    assert construct(scheduler=scheduler)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (Forgetful, "Forgetful.add_request does not call super().add_request"),
        (f"{__name__}.Forgetful", "Forgetful.add_request does not call super().add_request"),
        (Foreign, "Foreign does not extend vllm.v1.core.sched.scheduler.Scheduler"),
    ],
)
def test_a_scheduler_that_does_not_is_refused(construct: Construct, scheduler: Any, words: str) -> None:
    """Its requests would have no lease, and a failed hand-over would pass for one that has succeeded."""
    with pytest.raises(StartRefused) as refused:
        construct(scheduler=scheduler)
    assert words in str(refused.value) and "Call super()" in str(refused.value)


def test_a_worker_that_hides_its_handshake_is_refused(construct: Construct) -> None:
    """Its weights would not be compared."""
    assert construct("WORKER", worker="NamedWorker")
    with pytest.raises(StartRefused, match="QuietWorker.get_kv_connector_handshake_metadata does not call"):
        construct("WORKER", worker="QuietWorker")


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_connector_that_replaces_what_is_patched_is_refused(construct: Construct, role: str) -> None:
    assert construct(role, connector=OwnConnector)
    with pytest.raises(StartRefused, match="GreedyConnector.get_num_new_matched_tokens does not call"):
        construct(role, connector=GreedyConnector)
