# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own scheduler with any number of waiting requests, making the calls of ``EngineCore.step``.

Real: the scheduler, its KV-cache manager and block pool, the connector's scheduler half, stock or with this package's
patches. Left out: the model and the workers, which have nothing to report while requests wait; each running request
gets one token per step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from experiments.bench.samples import Samples
from experiments.common import model as models
from experiments.common.command_line import MODES
from experiments.common.engines import asks_decode, asks_prefill
from experiments.common.servers import HOST, free_ports
from experiments.step_cost.hand_over import OURS, RUNNING, percentiles, some_manifest
from kvcached_nixl.patching import Registry
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.vllm.adapter.versions import reason_to_skip
from kvcached_nixl.vllm.patches import PATCHES
from kvcached_nixl.wire.params import RemotePrefill, prefill_params

SLOTS = 256
BLOCK_SIZE = 32
MAX_TOKENS = 16_384
SAMPLED = 7
FAR = RemotePrefill("far", HOST, 5600, 1)
FAR_START = "f" * 16
ARRIVALS = 10
ALONE, STOCK = "no connector", "stock connector"
RESERVED = "_inflight_prefill_reserved_blocks"


class Kind(str, Enum):
    """Kind of the waiting requests."""

    QUEUED = "queued"
    """Ordinary requests, queued because as many run as may."""
    DECODE = "decode"
    """Decode requests that wait for KV that never arrives."""
    PREFILL = "prefill"
    """Finished prefill requests whose blocks are kept for a decode that never comes."""


@contextmanager
def patched() -> Iterator[None]:
    """Apply this package's patches during a ``with`` block. Without kvcached: its pool's cost does not depend on how
    many requests wait."""
    registry = Registry(reason_to_skip)
    registry.add(PATCHES)
    registry.complete()
    if registry.refusals():
        raise RuntimeError(f"found {registry.refusals()}; expected every patch to apply. Nothing can be timed.")
    try:
        yield
    finally:
        registry.uninstall()


@dataclass(frozen=True)
class Making:
    """Configuration of a scheduler. ``mode`` None: no connector. ``is_ours``: with this package, so requests carry its
    parameters instead of stock vLLM's."""

    kind: Kind
    mode: str | None
    is_ours: bool
    waiting: int


class RealScheduler:
    """See the module. Must be closed with `close`.

    Args:
        has_room: whether more requests may run than do. If not, vLLM does not look at the waiting ones.
    """

    def __init__(self, making: Making, *, has_room: bool) -> None:
        self._making = making
        self._numbers = itertools.count()
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = self._make()
        # Running requests are not handed over, and are long enough to outlast every measurement.
        for _ in range(RUNNING):
            self._add(None, MAX_TOKENS - 2 * BLOCK_SIZE)
        self.step()
        if making.kind is Kind.QUEUED:
            self.scheduler.max_num_running_reqs = RUNNING
        with self._admitting_quickly():
            for _ in range(making.waiting):
                self._wait()
            while not self._all_wait():
                self.step()
        if not has_room:
            self.scheduler.max_num_running_reqs = RUNNING
        self.step()

    def close(self) -> None:
        self.scheduler.shutdown()

    def step(self) -> float:
        """Make the scheduler's calls of ``EngineCore.step``. Returns CPU seconds of this thread, which other load does
        not change; none of the calls blocks."""
        begun = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time()
        result = self._computed(output)
        computed = time.thread_time()
        self.scheduler.update_from_output(output, result)
        return scheduled - begun + time.thread_time() - computed

    def arrival(self) -> float:
        """Run a step that admits one more request of the waiting kind, which then waits as well."""
        self._wait()
        return self.step()

    @contextmanager
    def _admitting_quickly(self) -> Iterator[None]:
        """Disable vLLM's sum of reserved blocks while requests are admitted.

        For each hand-over that it admits, vLLM sums the blocks that all others may still need: quadratic,
        ten thousand times ten thousand here. The pool has blocks for all, so the sum is not needed until all wait.
        """
        if hasattr(Scheduler, RESERVED):
            setattr(self.scheduler, RESERVED, lambda: 0)
        try:
            yield
        finally:
            vars(self.scheduler).pop(RESERVED, None)

    def _wait(self) -> None:
        self._add(self._params(), 16 if self._making.kind is Kind.DECODE else 1)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are in the scheduler and do not run."""
        return len(self.scheduler.requests) - len(self.scheduler.running)

    def _all_wait(self) -> bool:
        requests = self.scheduler.requests.values()
        kind = self._making.kind
        if kind is Kind.QUEUED:
            return True
        if kind is Kind.DECODE:
            found = sum(one.status == RequestStatus.WAITING_FOR_REMOTE_KVS for one in requests)
        else:
            found = sum(RequestStatus.is_finished(one.status) for one in requests)
        return found == self._making.waiting

    def _computed(self, output: Any) -> ModelRunnerOutput:
        """Return the model's output: a token for each request with all its tokens computed, no reports of workers."""
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[one] for one in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[SAMPLED] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
            kv_connector_output=KVConnectorOutput() if self._making.mode is not None else None,
        )

    def _add(self, params: Mapping[str, Any] | None, max_tokens: int) -> None:
        number = next(self._numbers)
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            f"cmpl-{uuid.UUID(int=number)}-0-{number:08x}",
            self._prompt(number),
            SamplingParams(extra_args=extra, ignore_eos=True, max_tokens=max_tokens),
            None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    @staticmethod
    def _prompt(number: int) -> list[int]:
        return [number, *range(1, BLOCK_SIZE)]

    def _params(self) -> Mapping[str, Any] | None:
        making, number = self._making, next(self._numbers)
        if making.kind is Kind.QUEUED:
            return None
        if making.kind is Kind.PREFILL:
            return asks_prefill()
        if not making.is_ours:
            blocks = {"remote_block_ids": [[number]], "remote_request_id": f"far-{number}"}
            return {**asks_decode(FAR, f"t{number}"), **blocks}
        if making.mode == "push":
            return asks_decode(FAR, f"t{number}")
        # For the next request. Its digest is compared only after a handshake with prefill, which never happens.
        made = some_manifest(FAR_START, f"far-{number}", self._prompt(number + 1), BLOCK_SIZE)
        return prefill_params(FAR, made, transfer_id=None, transfer_mode=TransferMode.PULL, cached_tokens=0)

    def _make(self) -> Scheduler:
        making = self._making
        (port,) = free_ports(1)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = HOST, str(port)
        init_none_hash(sha256)
        model = str(models.make_model(models.ModelShape(max_positions=MAX_TOKENS)))
        mode = {"transfer_mode": making.mode} if making.is_ours else {}
        transfer = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            engine_id=str(uuid.uuid4()),
            kv_connector_extra_config={"num_threads": 0, **mode},
        )
        config = VllmConfig(
            model_config=ModelConfig(model=model, tokenizer=model, skip_tokenizer_init=True, max_model_len=MAX_TOKENS),
            cache_config=CacheConfig(block_size=BLOCK_SIZE),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_TOKENS,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=SLOTS * BLOCK_SIZE,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer if making.mode is not None else None,
        )
        config.cache_config.block_size = BLOCK_SIZE
        # As many as all requests can have at the same time, and vLLM's null block.
        num_blocks = 1 + 2 * making.waiting + RUNNING * MAX_TOKENS // BLOCK_SIZE
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=config.model_config.dtype)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        return Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK_SIZE)


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(samples: Samples, waiting: int, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure every engine, with room for more running requests and without: a step, and one that admits one more
    request, where one is admitted."""
    for engine, making in _makings(waiting):
        for has_room in (True, False) if making.kind is not Kind.QUEUED else (False,):
            say(f"{engine}, {making.kind.value}, {waiting:,} waiting")
            with patched() if making.is_ours else contextlib.nullcontext():
                found = _measure(making, has_room, repetitions)
            samples.add((making.kind.value, "yes" if has_room else "no", waiting), engine, **found)


def _makings(waiting: int) -> Iterator[tuple[str, Making]]:
    yield ALONE, Making(Kind.QUEUED, None, False, waiting)
    for kind in (Kind.DECODE, Kind.PREFILL):
        yield STOCK, Making(kind, "pull", False, waiting)
        for mode in MODES:
            yield f"{OURS}, {mode}", Making(kind, mode, True, waiting)


def _measure(making: Making, has_room: bool, repetitions: int) -> dict[str, float]:
    side = RealScheduler(making, has_room=has_room)
    try:
        steps = percentiles("step", [side.step() for _ in range(repetitions)])
        if side.num_waiting != making.waiting:
            raise RuntimeError(f"found {side.num_waiting} waiting after {repetitions} steps; expected {making.waiting}")
        return steps | percentiles("arrival", [side.arrival() for _ in range(ARRIVALS)] if has_room else [])
    finally:
        side.close()
