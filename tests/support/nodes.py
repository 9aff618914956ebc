# SPDX-License-Identifier: Apache-2.0
"""Engines with this package active, stepped by the test: vLLM's scheduler, both roles of its NIXL connector, real NIXL,
and a model that writes bytes which follow from the tokens and their positions.

Missing: the model's layers (every step samples the same token) and HTTP. Tests compare decode's blocks with the bytes
that they must hold, and every other block with the byte that filled it. `Node` handles the differences between the
supported versions of vLLM.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import json
import math
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcached_nixl.patching import Registry
from kvcached_nixl.transport import listener
from kvcached_nixl.vllm.adapter.attributes import connectors, side_of
from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has
from kvcached_nixl.vllm.patches.arrival import let_look_up
from kvcached_nixl.vllm.patches.factory import is_nixl
from support.attention_engines import ERAS, engine_of, vllm_log_to
from support.internals import attempts_of, context_of, leases_of, matcher_of, receiver_of, registry_of, report_of
from support.kvcached_memory import Geometry
from support.stock_pair import Engine, single_process_group
from support.waiting import until

# More blocks than were planned, as kvcached reserves them.
RESERVED = Geometry(
    era=ERAS[0], num_pools=2, num_kv_heads=4, head_size=32, block_size=32, num_blocks=11, reserved_blocks=29
)
BLOCK_SIZE = RESERVED.block_size
# The scheduler keeps one block as its null block.
USABLE = RESERVED.num_blocks - 1
BLOCKS = 3
PROMPT = BLOCKS * BLOCK_SIZE
CHUNK = 40
# vLLM derives both ids from one client request id: the same on both sides, then eight random digits.
PREFILL_ID, DECODE_ID = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-dddddddd"
SAMPLED = 7
PREFILL_FILLING, DECODE_FILLING, ANOTHER_REQUESTS = 251, 252, 253
ROLES = {PREFILL_FILLING: "kv_producer", DECODE_FILLING: "kv_consumer"}
NAME = {"transfer_id": "t1"}
SEND = {"do_remote_decode": True}
IDLE_SECONDS = 2.0


def prompt(first_token: int, num_tokens: int) -> list[int]:
    return [(first_token + n) % 500 for n in range(num_tokens)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def kv(token_ids: list[int], first_position: int, layer: int, num_bytes: int) -> torch.Tensor:
    """Returns the bytes of each token in a layer. None of them is a byte that a test fills blocks with."""
    tokens, numbers = torch.tensor(token_ids)[:, None], torch.arange(num_bytes)[None]
    positions = torch.arange(first_position, first_position + len(token_ids))[:, None]
    return ((tokens * 101 + positions * 7 + layer * 31 + numbers * 13) % 241).to(torch.uint8)


@dataclasses.dataclass
class Gate:
    """Delays something while it is closed. ``kept``: the delayed items."""

    closed: bool = True
    kept: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Node:
    """One engine. ``ended`` maps each request that the engine finished to its finish reason; aborts are not in it.

    Attributes:
        windows: per KV-cache group, as in `nodes`.
        runner: vLLM's own connector glue, if every model of this vLLM uses model runner V2; else the node does that.
        drafts: with a draft model, whose KV of a step is computed after the worker was asked for what has ended.
        connector: what its configuration names; among several NixlConnector is one.
    """

    engine: Engine
    scheduler: Scheduler
    geometry: Geometry
    windows: Sequence[int | str | None]
    log: pytest.LogCaptureFixture
    caches: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    sent: set[str] = dataclasses.field(default_factory=set)
    received: set[str] = dataclasses.field(default_factory=set)
    transfer_params: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    taken_stats: list[Any] = dataclasses.field(default_factory=list)
    runner: Any = None
    drafts: bool = False
    is_over: bool = False

    connector: ClassVar[str] = "NixlConnector"
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __post_init__(self) -> None:
        freed = self.scheduler._update_from_kv_xfer_finished

        def noted(output: KVConnectorOutput) -> None:
            # The sets that vLLM's scheduler reads, after all wrappers.
            self.sent |= output.finished_sending or set()
            self.received |= output.finished_recving or set()
            freed(output)

        self.scheduler._update_from_kv_xfer_finished = noted

    # ------------------------------------------------------------------------------------------------------ its parts

    def of(self, connector: Any, is_meant: Callable[[type], bool] = is_nixl) -> Any:
        return next(one for one in connectors(connector) if is_meant(type(one)))

    @property
    def worker(self) -> Any:
        return self.of(self.engine.worker).connector_worker

    @property
    def connector_scheduler(self) -> Any:
        return self.of(self.engine.scheduler).connector_scheduler

    @property
    def side(self) -> Any:
        """The worker's `WorkerFacade`."""
        return side_of(self.of(self.engine.worker))

    agent = property(lambda self: self.worker.nixl_wrapper)
    thread = property(lambda self: self.side.thread)
    """The transfer thread."""
    context = property(lambda self: context_of(self.thread))
    """What both halves of the transfer thread share."""
    registry = property(lambda self: registry_of(self.thread))
    """Prefill's half of the transfer thread."""
    receiver = property(lambda self: receiver_of(self.thread))
    """Decode's half of the transfer thread."""
    write_tasks = property(lambda self: self.registry.writer.tasks)
    """Decode's registrations that prefill has not finished, by agent and attempt."""

    @property
    def side_of_engine(self) -> Any:
        """The engine's `SchedulerFacade`."""
        return side_of(self.of(self.engine.scheduler))

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

    def address(self) -> dict[str, Any]:
        """Returns the parameters that decode gets from a router that sends to this prefill and decode at once."""
        own = self.side_of_engine.engine.own
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine.engine_id,
            "remote_host": own.host,
            "remote_port": own.port,
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
            block_hasher=get_request_block_hasher(self.geometry.block_size * self.geometry.split, sha256),
        )
        self.scheduler.add_request(request)

    def add_input(self, first_token: int, *, is_last: bool = False, params: dict[str, Any] | None = None) -> None:
        """A chunk of a streaming session, as ``AsyncLLM`` adds it; the last one is empty, and says so."""
        sampling = SamplingParams(extra_args={"kv_transfer_params": params}, ignore_eos=True, max_tokens=1)
        tokens = [0] if is_last else prompt(first_token, CHUNK)
        hasher = get_request_block_hasher(self.geometry.block_size, sha256)
        self.scheduler.add_request(
            Request(PREFILL_ID, tokens, sampling, None, block_hasher=hasher, resumable=not is_last)
        )

    def blocks(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """Steps as EngineCore does, if there are requests; each with all tokens computed samples one."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.take(output, self.run(output))
        return True

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

    def step_until(self, found: Callable[[], Any], *others: Node) -> None:
        """Steps the others, then this one, again and again."""
        until(lambda: all(node.step() for node in (*others, self)) and found())

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

    @property
    def owes(self) -> bool:
        """Whether the engine keeps or holds blocks, waits for KV, or has something pending."""
        side = self.side_of_engine
        waits = side.fetching.attempts.waiting or side.offering.kept.num_kept or side.engine.holds.num_blocks
        return bool(waits or side.pending or len(self.registry) or len(self.receiver))

    @property
    def wakes(self) -> bool:
        """Whether this package makes the engine step.

        vLLM 0.28 alone steps as long as it keeps a request's blocks; this package lets it rest between steps.
        """
        pending = bool(self.side_of_engine.pending)
        assert self.scheduler.has_requests() or not pending
        return pending

    @property
    def moved(self) -> bool:
        """Whether an attempt has finished on the transfer thread, and the engine does not know it yet."""
        return bool(report_of(self.thread).ended)

    @property
    def has_failed(self) -> bool:
        """Whether an attempt has failed on the transfer thread, and is not finished or not known to the engine yet."""
        unfinished = list(attempts_of(self.receiver).values())
        return any(one.failed is not None for one in unfinished) or bool(report_of(self.thread).failed)

    @property
    def tag(self) -> str:
        """The tag that its handshake sends as the compatibility hash."""
        return str(self.worker.xfer_handshake_metadata.compatibility_hash)

    def compute(self, output: Any) -> None:
        """Called in the place of the model's forward pass."""
        for request_id, count in output.num_scheduled_tokens.items():
            request, blocks = self.scheduler.requests[request_id], self.blocks(request_id)
            end = request.num_computed_tokens
            for cells, expected in self.cells(list(request.all_token_ids[:end]), blocks, end - count):
                cells.copy_(expected)

    def tokens(self, request_id: str) -> int:
        """Returns how many tokens of a request are computed."""
        return int(self.scheduler.requests[request_id].num_computed_tokens)

    def cells(
        self, token_ids: list[int], block_ids: list[int], first_position: int, offset: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (memory, expected bytes) of the tokens from a position on. ``offset``: position of the first block."""
        size, position = self.geometry.block_size, first_position
        block_ids = self.kernel_blocks(block_ids)
        while position < len(token_ids):
            slot, tokens = position % size, token_ids[position : position + size - position % size]
            for layer, cache in enumerate(self.caches.values()):
                block = cache[block_ids[(position - offset) // size]].view(torch.uint8)
                cells = block.movedim(1, 0)[slot : slot + len(tokens)]
                yield cells, kv(tokens, position, layer, cells[0].numel()).view(cells.shape)
            position += len(tokens)

    def holds(self, block_ids: list[int], first_position: int = 0, end: int = PROMPT, first_token: int = 0) -> bool:
        """Whether the blocks hold the right KV of every token of a prompt from a position on."""
        cells = self.cells(prompt(first_token, end), block_ids, first_position, first_position)
        return all(torch.equal(found, expected) for found, expected in cells)

    def kernel_blocks(self, block_ids: list[int]) -> list[int]:
        """Returns the kernel blocks of these logical blocks."""
        ratio = self.geometry.split
        return [block_id * ratio + part for block_id in block_ids for part in range(ratio)]

    def all_but(self, block_ids: list[int]) -> list[int]:
        """Returns every other kernel block that memory is reserved for."""
        kept = self.kernel_blocks(block_ids)
        return [block_id for block_id in range(self.geometry.reserved_blocks) if block_id not in kept]

    def are_filled(self, block_ids: list[int], filling: int) -> bool:
        return all(bool((page.view(torch.uint8) == filling).all()) for page in self.content(block_ids))

    def fill(self, block_ids: list[int], filling: int) -> None:
        """Overwrites the blocks with a byte."""
        for cache in self.caches.values():
            for block_id in block_ids:
                cache[block_id].view(torch.uint8).fill_(filling)

    def preempt(self, request_id: str) -> None:
        """Preempts a request, as the scheduler does with all running requests when its prefix cache is reset."""
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.prev_step_scheduled_req_ids.clear()

    def status(self, request_id: str) -> RequestStatus:
        return self.scheduler.requests[request_id].status

    def settle(self) -> None:
        """Waits until the transfer thread has done everything that it could do when this was called."""
        turn, done = self.thread.turn, list[float]()

        def counted() -> float:
            done.append(turn())
            return done[-1]

        self.thread.turn = counted
        until(lambda: len(done) > 2)
        del self.thread.turn

    # ---------------------------------------------------------------------------------------------- steps of hand-overs

    def prefilled(
        self,
        request_id: str = PREFILL_ID,
        first_token: int = 0,
        num_tokens: int = PROMPT,
        max_tokens: int = 1,
        **params: Any,
    ) -> dict[str, Any]:
        """Computes a request and keeps its blocks. Returns the parameters for decode, as a client gets them."""
        self.add(request_id, {**SEND, **params}, max_tokens, first_token, num_tokens=num_tokens)
        self.step_until(lambda: request_id in self.transfer_params)
        # JSON turns tuples into lists, as on the way through a client.
        return json.loads(json.dumps(self.transfer_params[request_id]))

    def asked(self, params: dict[str, Any], request_id: str = DECODE_ID, **options: Any) -> list[int]:
        """Adds a request, and returns the blocks into which its KV is to come."""
        self.add(request_id, params, **options)
        self.step()
        assert self.waits(request_id)
        return self.blocks(request_id)

    def registered(self, prefill: Node, request_id: str = DECODE_ID, **options: Any) -> list[int]:
        """Push: as `asked`, for a request that prefill has not started; waits for its registration."""
        blocks = self.asked({**prefill.address(), **NAME}, request_id, **options)
        until(lambda: prefill.write_tasks)
        return blocks

    def receives(self, block_ids: list[int], prefill: Node, **where: Any) -> None:
        """Checks that its request's KV comes, rightly, into these blocks; ``where``: as `holds` has it."""
        self.step_until(lambda: DECODE_ID in self.received, prefill)
        assert self.holds(block_ids, **where)

    def ends(self, prefill: Node) -> None:
        """Checks that its request ends with all its tokens."""
        self.step_until(lambda: DECODE_ID in self.ended, prefill)
        assert self.ended[DECODE_ID] == "length"

    def rest(self, *others: Node) -> None:
        """Steps the nodes as long as their engines would, then checks that nothing is owed and all blocks are free.

        When only leases are left to wait for, they expire at once, so a test need not set short leases, which would
        expire too early on a slow machine.
        """
        every = (self, *others)

        def waits_for_leases() -> bool:
            busy = any(
                len(node.receiver) or node.write_tasks or node.side_of_engine.fetching.attempts.waiting
                for node in every
            )
            return not busy and all(node.step() for node in every)

        def is_over() -> bool:
            return not any(node.owes or node.scheduler.has_requests() for node in every)

        self.step_until(lambda: is_over() or waits_for_leases(), *others)
        with ExitStack() as patches:
            for node in every:
                leases = leases_of(node.registry)
                due = functools.partial(type(leases).take_due, leases, math.inf)
                patches.enter_context(mock.patch.object(leases, "take_due", lambda _, due=due: due()))
            self.step_until(is_over, *others)
        assert all(node.all_free for node in every)

    def ends_by(self, policy: str, *others: Node, num_tokens: int = PROMPT, first_token: int = 0) -> None:
        """Checks that decode's request fails or is recomputed, as the policy says, and that all blocks become free."""
        if policy == "recompute":
            self.step_until(lambda: self.status(DECODE_ID) == RequestStatus.RUNNING, *others)
            assert self.holds(self.blocks(DECODE_ID), 0, num_tokens, first_token)
        self.step_until(lambda: DECODE_ID in self.ended, *others)
        assert self.ended[DECODE_ID] == {"fail": "error", "recompute": "length"}[policy]
        self.rest(*others)

    def serves(self, decode: Node, number: int = 7) -> None:
        """Checks that both engines still work: another request is handed over, however slow the machine is."""
        first_token, name = 40 * number, f"cmpl-w-0-ddddddd{number}"
        engine, registry, seconds = decode.side_of_engine.engine, self.registry, 600.0
        settings = dataclasses.replace(engine.settings, handover_timeout_seconds=seconds)
        with (
            mock.patch.object(engine, "settings", settings),
            mock.patch.object(registry.writer, "_unmatched_seconds", seconds),
            mock.patch.object(matcher_of(registry), "_unmatched_seconds", seconds),
            mock.patch.object(leases_of(registry), "_lease_seconds", seconds),
        ):
            decode.add(name, self.prefilled(f"cmpl-w-0-aaaaaaa{number}", first_token), first_token=first_token)
            decode.step()
            local = decode.blocks(name)
            decode.step_until(lambda: name in decode.received, self)
            assert decode.holds(local, first_token=first_token)
            self.rest(decode)

    def computes_alone(self) -> None:
        """Checks that the engine still works: it computes a local request."""
        self.add("cmpl-w-0-eeeeeeee", None, first_token=300)
        self.step_until(lambda: "cmpl-w-0-eeeeeeee" in self.ended)
        assert self.ended["cmpl-w-0-eeeeeeee"] == "length"

    def hold_transfers(self, monkeypatch: pytest.MonkeyPatch) -> Gate:
        """Delays the node's READs and WRITEs: they stay in flight and move nothing."""
        gate, transfer, check = Gate(), self.agent.transfer, self.agent.check_xfer_state

        def hold(handle: Any) -> str:
            if not gate.closed:
                return str(transfer(handle))
            gate.kept.append(handle)
            return "PROC"

        def look(handle: Any) -> str:
            if not gate.closed:
                while gate.kept:
                    transfer(gate.kept.pop(0))
            return "PROC" if gate.closed else str(check(handle))

        monkeypatch.setattr(self.agent, "transfer", hold)
        monkeypatch.setattr(self.agent, "check_xfer_state", look)
        return gate

    @property
    def all_free(self) -> bool:
        """Whether every block is in the free queue once, and has no references."""
        pool = self.scheduler.kv_cache_manager.block_pool
        found = sorted(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
        used = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        return found == list(range(1, len(pool.blocks))) and not used

    @functools.cached_property
    def core(self) -> EngineCore:
        """vLLM's engine core around it, as far as requests that arrive need one."""
        core = EngineCore.__new__(EngineCore)
        core.scheduler, core.mm_receiver_cache = self.scheduler, None
        core.structured_output_manager = self.scheduler.structured_output_manager
        core.vllm_config, core.input_queue = self.scheduler.vllm_config, queue.Queue()
        core.request_block_hasher = get_request_block_hasher(self.geometry.block_size * self.geometry.split, sha256)
        let_look_up(core)
        return core

    def enter(self, request: EngineCoreRequest) -> None:
        """What vLLM's engine does with a request that comes from an API server."""
        self.core.add_request(*self.core.preprocess_add_request(request))

    def looked_up(
        self,
        token_ids: Sequence[int],
        least_tokens: int = 0,
        adapter: Any = None,
        salt: str = "",
        most_seconds: float = 600.0,
    ) -> Future[dict[str, Any]]:
        """What an API server's call gets, as far as that needs no step."""
        sent = None if adapter is None else msgspec.to_builtins(adapter)
        call = self.core.kvcached_nixl_look_up
        answer = call(np.asarray(token_ids, "<u4").tobytes(), "r", sent, salt, least_tokens, most_seconds)
        call.__self__._looker.submit(lambda: None).result()
        side_of(self.scheduler.connector).run_calls()
        return answer


@dataclasses.dataclass
class AsyncNode(Node):
    """An engine that schedules a step while the one before it is under way."""

    queued: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    scheduler_class: ClassVar[type[Scheduler]] = AsyncScheduler

    def step(self) -> bool:
        """As EngineCore.step_with_batch_queue."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.queued.append((output, self.run(output)))
            if len(self.queued) < 2 and self.scheduler.has_requests():
                return True
        if self.queued:
            self.take(*self.queued.pop(0))
        return True


AnyNode = TypeVar("AnyNode", bound=Node)


@contextmanager
def nodes(kind: type[AnyNode], folder: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., AnyNode]]:
    """Creates nodes whose pages are all filled with the given byte, and shuts them down."""
    made: list[AnyNode] = []

    def make(
        fill: int,
        geometry: Geometry = RESERVED,
        tokens_a_step: int | None = None,
        prefix_caching: bool = True,
        policy: str = "fail",
        windows: Sequence[int | str | None] | None = None,
        kv_role: str = "",
        num_drafts: int = 0,
        all2all_backend: str = "",
        **extra_config: Any,
    ) -> AnyNode:
        """Creates a node.

        Args:
            windows: as in `engine_of`.
            kv_role: another than that of its filling.
            num_drafts: how many tokens vLLM may draft at once; the node never drafts one.
        """
        engine = engine_of(geometry, folder, windows, num_drafts, extra_config, kv_role or ROLES.get(fill, "kv_both"))
        config = engine.config
        config.kv_transfer_config.kv_load_failure_policy = policy
        config.cache_config.enable_prefix_caching = prefix_caching
        config.scheduler_config.max_num_scheduled_tokens = tokens_a_step
        if all2all_backend:
            config.parallel_config.all2all_backend = all2all_backend
        if num_drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=num_drafts,
                prompt_lookup_max=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        one = kind(engine, _scheduled(kind, engine), geometry, windows or (), log)
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


def _scheduled(kind: type[Node], engine: Engine) -> Scheduler:
    """Gives an engine the connectors of a kind of node, and vLLM's scheduler."""
    config = engine.config
    if kind.connector != config.kv_transfer_config.kv_connector:
        engine.worker.shutdown()
        config.kv_transfer_config.kv_connector = kind.connector
        engine.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, engine.kv_cache_config)
    config.cache_config.num_gpu_blocks = engine.kv_cache_config.num_blocks
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
    return scheduler


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


@pytest.fixture(params=["pull", "push"])
def direction(request: pytest.FixtureRequest) -> str:
    """The transfer direction. A test module that needs only one overrides this fixture."""
    return str(request.param)


@pytest.fixture
def node(direction: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., Node]]:
    """Creates nodes whose pages are all filled with the given byte."""
    with nodes(Node, tmp_path, log) as make:
        yield lambda filling, geometry=RESERVED, transfer_mode=direction, **options: make(
            filling, geometry, transfer_mode=transfer_mode, **options
        )


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    return node(PREFILL_FILLING), node(DECODE_FILLING)


def mover(direction: str, prefill: Node, decode: Node) -> Node:
    """Returns the node that posts the transfers."""
    return prefill if direction == "push" else decode


def core_request(request_id: str, params: dict[str, Any] | None = None, **fields: Any) -> EngineCoreRequest:
    """What an API server sends to its engine."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    given = {"prompt_token_ids": [0], "sampling_params": sampling, "arrival_time": 0.0, **fields}
    # The first ten have no defaults.
    return EngineCoreRequest(
        **{**dict.fromkeys(EngineCoreRequest.__struct_fields__[:10]), "request_id": request_id, **given}
    )
