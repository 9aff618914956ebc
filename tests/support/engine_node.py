# SPDX-License-Identifier: Apache-2.0
"""One engine without a model: vLLM's real scheduler and NIXL connector, with both connector roles, stepped by the test.

Real: the scheduler, the connector, its side channel, NIXL over CPU memory. Missing: the model (every step samples the
same token) and HTTP. This module handles the differences between the supported versions of vLLM.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcached_nixl.patching import Registry
from kvcached_nixl.transport import listener
from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has
from support.attention_engines import backend_of, spec_of, state_spec_of, vllm_log_to
from support.kvcached_memory import Geometry
from support.stock_pair import Engine, build_engine, single_process_group, write_model
from support.transports import until

GEOMETRY = Geometry(
    era="packed",
    num_pools=2,
    num_kv_heads=4,
    head_size=32,
    block_size=32,
    num_blocks=11,
    reserved_blocks=11,
)
"""The layout of a GPU attention backend of this vLLM."""
# The scheduler keeps one block as its null block.
USABLE = GEOMETRY.num_blocks - 1
BLOCKS = 3
PROMPT = BLOCKS * GEOMETRY.block_size
# vLLM derives both ids from one client request id: the same on both sides, then eight random digits.
PREFILL_ID, DECODE_ID = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-dddddddd"
SAMPLED = 7


@dataclasses.dataclass
class Node:
    """One engine. ``ended`` maps each request that the engine finished to its finish reason; aborts are not in it."""

    engine: Engine
    scheduler: Scheduler
    geometry: Geometry
    caches: dict[str, torch.Tensor]
    log: pytest.LogCaptureFixture
    sent: set[str] = dataclasses.field(default_factory=set)
    received: set[str] = dataclasses.field(default_factory=set)
    transfer_params: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    kernel_blocks_per_block: int = 1
    is_over: bool = False
    runner: Any = None
    """vLLM's own connector glue, if every model of this vLLM uses model runner V2. Else the node does its work."""
    drafts: bool = False
    """With a draft model, whose KV of a step is computed after the worker was asked for what has ended."""
    taken_stats: list[Any] = dataclasses.field(default_factory=list)
    windows: Sequence[int | str | None] = ()
    """Per KV-cache group, as in `nodes`."""

    connector: ClassVar[str] = "NixlConnector"
    roles: ClassVar[Mapping[int, str]] = {}
    """``kv_role`` of a node by what its pages are filled with; "kv_both" for any other."""
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __post_init__(self) -> None:
        freed = self.scheduler._update_from_kv_xfer_finished

        def noted(output: KVConnectorOutput) -> None:
            # The sets that vLLM's scheduler reads, after all wrappers.
            self.sent |= output.finished_sending or set()
            self.received |= output.finished_recving or set()
            freed(output)

        self.scheduler._update_from_kv_xfer_finished = noted

    @property
    def worker(self) -> Any:
        return self.engine.worker.connector_worker

    @property
    def connector_scheduler(self) -> Any:
        return self.engine.scheduler.connector_scheduler

    @property
    def account(self) -> dict[str, list[Any]]:
        """Returns everything that the worker has counted for the metrics since the node was created."""
        account: dict[str, list[Any]] = collections.defaultdict(list)
        for stats in (*self.taken_stats, self.worker.xfer_stats):
            for name, values in stats.data.items():
                account[name] += values
        return account

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def address(self, request_id: str) -> dict[str, Any]:
        """Returns the parameters that decode gets from a proxy that sends to this prefill engine and decode at once."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.engine.port,
            "tp_size": 1,
        }

    def add(
        self,
        request_id: str,
        params: dict[str, Any] | None,
        max_tokens: int = 4,
        first_token: int = 0,
        num_tokens: int = PROMPT,
        priority: int = 0,
    ) -> None:
        request = Request(
            request_id,
            prompt(first_token, num_tokens),
            SamplingParams(extra_args={"kv_transfer_params": params}, ignore_eos=True, max_tokens=max_tokens),
            None,
            priority=priority,
            block_hasher=get_request_block_hasher(self.geometry.block_size * self.kernel_blocks_per_block, sha256),
        )
        self.scheduler.add_request(request)

    def blocks(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def compute(self, output: Any) -> None:
        """Called in the place of the model's forward pass."""

    def step(self) -> Any:
        """Steps as EngineCore.step does; each request with all tokens computed samples one. Returns the metadata."""
        output = self.scheduler.schedule()
        self.take(output, self.run(output))
        return output.kv_connector_metadata

    def run(self, output: Any) -> ModelRunnerOutput:
        """Runs a scheduled step as a worker does."""
        assert output.kv_connector_metadata is not None
        if self.runner is None:
            told = self._run_by_hand(output)
        else:
            self.runner.pre_forward(output)
            self.compute(output)
            known = inspect.signature(self.runner.post_forward).parameters
            # Up to 0.30 vLLM does not save in empty steps. From 0.33 on it puts off saving until drafts are computed.
            wishes = {"wait_for_save": bool(output.num_scheduled_tokens), "defer_finalize": self.drafts}
            told = self.runner.post_forward(
                output.finished_req_ids, **{name: wish for name, wish in wishes.items() if name in known}
            )
            if self.drafts and "defer_finalize" in known:
                self.runner.finalize_step()
        if told.kv_connector_stats is not None:
            self.taken_stats.append(told.kv_connector_stats)
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[SAMPLED] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
            kv_connector_output=told,
        )

    def _run_by_hand(self, output: Any) -> KVConnectorOutput:
        worker = self.engine.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        self.compute(output)
        if output.num_scheduled_tokens and not self.drafts:
            worker.wait_for_save()
        sent, received = worker.get_finished(output.finished_req_ids)
        invalid, stats = worker.get_block_ids_with_load_errors(), worker.get_kv_connector_stats()
        meta = worker.build_connector_worker_meta()
        if output.num_scheduled_tokens and self.drafts:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=invalid,
            kv_connector_stats=stats,
            kv_connector_worker_meta=meta,
        )

    def take(self, output: Any, result: ModelRunnerOutput) -> None:
        """Handles the output of a step as EngineCore does."""
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.kv_transfer_params:
                    self.transfer_params[one.request_id] = one.kv_transfer_params
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)

    def register(self) -> None:
        """Registers the KV caches with the connector, as the model runner does."""
        if not installed_has(LOADS_BEHIND):
            self.engine.worker.register_kv_caches(dict(self.caches))
            return
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        # The runner uses the connector of its process, and this process has several.
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.engine.worker):
            self.runner = ActiveKVConnector(self.engine.config, dict(self.caches))

    def step_until(self, found: Callable[[], Any]) -> None:
        until(lambda: self.step() and found())

    def waits(self, request_id: str) -> bool:
        """Whether the request waits for remote KV and has blocks."""
        request = self.scheduler.requests[request_id]
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and len(self.blocks(request_id)) > 0

    def content(self, block_ids: list[int]) -> list[torch.Tensor]:
        return [cache[block_id].clone() for cache in self.caches.values() for block_id in block_ids]

    def shutdown(self) -> None:
        """Shuts the engine down. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.engine.worker.shutdown()
            self.scheduler.shutdown()

    def listen(self) -> None:
        """Starts to answer handshakes."""
        self.engine.listen()


AnyNode = TypeVar("AnyNode", bound=Node)


def prompt(first_token: int, num_tokens: int) -> list[int]:
    return [(first_token + n) % 500 for n in range(num_tokens)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def nodes(kind: type[AnyNode], folder: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., AnyNode]]:
    """Creates nodes whose pages are all filled with the given byte, and shuts them down."""
    made: list[AnyNode] = []

    def make(
        fill: int,
        geometry: Geometry = GEOMETRY,
        tokens_a_step: int | None = None,
        prefix_caching: bool = True,
        policy: str = "fail",
        kernel_blocks_per_block: int = 1,
        windows: Sequence[int | str | None] | None = None,
        kv_role: str = "",
        num_drafts: int = 0,
        **extra_config: Any,
    ) -> AnyNode:
        """Creates a node.

        Args:
            windows: sliding window of each group; None for a group that keeps all tokens; the ``mamba_cache_mode`` of
                one that keeps states.
            kv_role: another than that of its filling.
            num_drafts: how many tokens vLLM may draft at once; the node never drafts one.
        """
        geometry = dataclasses.replace(geometry, split=kernel_blocks_per_block)
        model = write_model(folder, num_key_value_heads=geometry.num_kv_heads)
        role = kv_role or kind.roles.get(fill, "kv_both")
        engine = _engine(model, geometry, kernel_blocks_per_block, windows, role, num_drafts, extra_config)
        one = _node(kind, engine, log, geometry, tokens_a_step, prefix_caching, policy)
        one.kernel_blocks_per_block = kernel_blocks_per_block
        one.windows = windows or ()
        made.append(one)
        caches, memory = geometry.allocate()
        for pool in memory:
            pool.view(torch.uint8).fill_(fill)
        one.caches.update(caches)
        one.register()
        one.listen()
        return one

    # How long a listener may take to notice that it shall stop.
    with mock.patch.object(listener, "_WATCH_SECONDS", 0.02):
        try:
            yield make
        finally:
            for one in made:
                one.connector_scheduler._stop_event.set()
            for one in made:
                one.shutdown()


def _engine(
    model: Path,
    geometry: Geometry,
    kernel_blocks_per_block: int,
    windows: Sequence[int | str | None] | None,
    kv_role: str,
    num_drafts: int,
    extra_config: dict[str, Any],
) -> Engine:
    names, pools = geometry.layer_names(), geometry.num_pools
    of_group = [names[group * pools : (group + 1) * pools] for group in range(geometry.groups)]
    if windows is None:
        specs = [spec_of(geometry.of_group(group), group, kernel_blocks_per_block) for group in range(geometry.groups)]
    else:
        specs = [
            state_spec_of(geometry, window, num_drafts)
            if isinstance(window, str)
            else spec_of(geometry.of_group(group), int(window is not None), kernel_blocks_per_block, window)
            for group, window in enumerate(windows)
        ]
    engine = build_engine(
        model,
        list(zip(of_group, specs, strict=True)),
        [names[pool::pools] for pool in range(pools)],
        geometry.num_blocks // kernel_blocks_per_block,
        geometry.block_size * kernel_blocks_per_block,
        backend_of(geometry),
        extra_config,
        kv_role=kv_role,
    )
    if num_drafts:
        engine.config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_drafts,
            prompt_lookup_max=2,
            target_model_config=engine.config.model_config,
            target_parallel_config=engine.config.parallel_config,
        )
    return engine


def _node(
    kind: type[AnyNode],
    engine: Engine,
    log: pytest.LogCaptureFixture,
    geometry: Geometry,
    tokens_a_step: int | None,
    prefix_caching: bool,
    policy: str,
) -> AnyNode:
    config = engine.config
    if kind.connector != config.kv_transfer_config.kv_connector:
        engine.worker.shutdown()
        config.kv_transfer_config.kv_connector = kind.connector
        engine.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, engine.kv_cache_config)
    config.kv_transfer_config.kv_load_failure_policy = policy
    config.cache_config.num_gpu_blocks = engine.kv_cache_config.num_blocks
    config.cache_config.enable_prefix_caching = prefix_caching
    config.scheduler_config.max_num_scheduled_tokens = tokens_a_step
    specs = [group.kv_cache_spec for group in engine.kv_cache_config.kv_cache_groups]
    for mode in (spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)):
        config.cache_config.mamba_cache_mode = mode
    sizes = [spec.block_size for spec in specs]
    of_blocks = {"block_size": config.cache_config.block_size}
    if "hash_block_size" in inspect.signature(Scheduler).parameters:
        # As the engine core resolves them.
        of_blocks = {"block_size": math.lcm(*sizes), "hash_block_size": math.gcd(*sizes)}
    scheduler = kind.scheduler_class(config, engine.kv_cache_config, StructuredOutputManager(config), **of_blocks)
    # The scheduler creates its connector itself, so the one of the engine is replaced.
    engine.scheduler = scheduler.connector
    return kind(engine, scheduler, geometry, {}, log)


@pytest.fixture(scope="module")
def parallel_state() -> Iterator[None]:
    init_none_hash(sha256)
    with single_process_group():
        yield


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, parallel_state: None, patched: Registry
) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level("WARNING"), vllm_log_to(caplog):
        yield caplog
