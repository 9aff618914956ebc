# SPDX-License-Identifier: Apache-2.0
"""Engines with this package active, for hand-overs between them: vLLM's scheduler, this package's patches, real NIXL,
and a model that writes bytes which follow from the tokens and their positions.

Tests compare decode's blocks with the bytes that they must hold, and every other block with the byte that filled it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.attributes import side_of
from kvcached_nixl.vllm.patches.answering import let_look_up
from support import engine_node
from support.attention_engines import ERAS
from support.engine_node import DECODE_ID, GEOMETRY, PROMPT, nodes, prompt
from support.internals import (
    attempts_of,
    context_of,
    leases_of,
    matcher_of,
    receiver_of,
    registry_of,
    report_of,
    write_tasks_of,
    writer_of,
)
from support.transports import until

# More blocks than were planned, as kvcached reserves them.
RESERVED = dataclasses.replace(GEOMETRY, era=ERAS[0], reserved_blocks=29)
BLOCK_SIZE = RESERVED.block_size
CHUNK = 40
PREFILL_FILLING, DECODE_FILLING, ANOTHER_REQUESTS = 251, 252, 253
NAME = {"transfer_id": "t1"}
SEND = {"do_remote_decode": True}
IDLE_SECONDS = 2.0


def kv(token_ids: list[int], first_position: int, layer: int, num_bytes: int) -> torch.Tensor:
    """Returns the bytes of each token in a layer. None of them is a byte that a test fills blocks with."""
    tokens, numbers = torch.tensor(token_ids)[:, None], torch.arange(num_bytes)[None]
    positions = torch.arange(first_position, first_position + len(token_ids))[:, None]
    return ((tokens * 101 + positions * 7 + layer * 31 + numbers * 13) % 241).to(torch.uint8)


class Node(engine_node.Node):
    """An engine with this package active, and a model that writes each token's bytes into its blocks."""

    roles: ClassVar[Mapping[int, str]] = {PREFILL_FILLING: "kv_producer", DECODE_FILLING: "kv_consumer"}

    @property
    def agent(self) -> Any:
        return self.worker.nixl_wrapper

    @property
    def side(self) -> Any:
        """The worker's `WorkerFacade`."""
        return side_of(self.engine.worker)

    @property
    def thread(self) -> Any:
        """The transfer thread."""
        return self.side.thread

    @property
    def context(self) -> Any:
        """What both halves of the transfer thread share."""
        return context_of(self.thread)

    @property
    def registry(self) -> Any:
        """Prefill's half of the transfer thread."""
        return registry_of(self.thread)

    @property
    def receiver(self) -> Any:
        """Decode's half of the transfer thread."""
        return receiver_of(self.thread)

    @property
    def write_tasks(self) -> Any:
        """Decode's registrations that prefill has not finished, by agent and attempt."""
        return write_tasks_of(self.registry)

    @property
    def side_of_engine(self) -> Any:
        """The engine's `SchedulerFacade`."""
        return side_of(self.engine.scheduler)

    @property
    def owes(self) -> bool:
        """Whether the engine keeps or holds blocks, waits for KV, or has something pending."""
        side = self.side_of_engine
        waits = side.fetching.attempts.waiting or side.offering.kept.num_kept or side.engine.holds.num_blocks
        return bool(waits or side.pending or len(self.registry) or len(self.receiver))

    def address(self, request_id: str = "") -> dict[str, Any]:
        """Returns the parameters of a router that sends to both sides at once; it has no ``remote_request_id`` yet."""
        own = self.side_of_engine.engine.own
        where = {**super().address(request_id), "remote_host": own.host, "remote_port": own.port}
        return {key: one for key, one in where.items() if one != ""}

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

    def step(self) -> Any:
        """Steps as EngineCore does: only if there are requests."""
        return super().step() if self.scheduler.has_requests() else True

    def compute(self, output: Any) -> None:
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
        ratio = self.kernel_blocks_per_block
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


@dataclasses.dataclass
class Gate:
    """Delays something while it is closed. ``kept``: the delayed items."""

    closed: bool = True
    kept: list[Any] = dataclasses.field(default_factory=list)


def transfers_held(node: Node, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Delays the node's READs and WRITEs: they stay in flight and move nothing."""
    gate, transfer, check = Gate(), node.agent.transfer, node.agent.check_xfer_state

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

    monkeypatch.setattr(node.agent, "transfer", hold)
    monkeypatch.setattr(node.agent, "check_xfer_state", look)
    return gate


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


def asked(decode: Node, params: dict[str, Any], request_id: str = DECODE_ID, **options: Any) -> list[int]:
    """Adds a request to decode, which allocates its blocks. Returns them."""
    decode.add(request_id, params, **options)
    decode.step()
    assert decode.waits(request_id)
    return decode.blocks(request_id)


def registered(decode: Node, prefill: Node, request_id: str = DECODE_ID, **options: Any) -> list[int]:
    """Push: adds a request to decode that prefill has not started, and waits for its registration.

    Returns:
        The request's blocks.
    """
    blocks = asked(decode, {**prefill.address(), **NAME}, request_id, **options)
    until(lambda: prefill.write_tasks)
    return blocks


def until_both(prefill: Node, decode: Node, found: Callable[[], Any]) -> None:
    until(lambda: prefill.step() and decode.step() and found())


def all_free(node: Node) -> bool:
    """Whether every block is in the free queue once, and has no references."""
    pool = node.scheduler.kv_cache_manager.block_pool
    found = sorted(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    used = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
    return found == list(range(1, len(pool.blocks))) and not used


def rest(*both: Node) -> None:
    """Steps the nodes as long as their engines would, then checks that nothing is owed and all blocks are free.

    When only leases are left to wait for, they expire at once, so a test need not set short leases, which would expire
    too early on a slow machine.
    """

    def waits_for_leases() -> bool:
        busy = any(
            len(node.receiver) or node.write_tasks or node.side_of_engine.fetching.attempts.waiting for node in both
        )
        return not busy and all(node.step() for node in both)

    def is_over() -> bool:
        return not any(node.owes or node.scheduler.has_requests() for node in both)

    until(lambda: [node.step() for node in both] and (is_over() or waits_for_leases()))
    with ExitStack() as patches:
        for node in both:
            leases = leases_of(node.registry)
            due = functools.partial(type(leases).take_due, leases, math.inf)
            patches.enter_context(mock.patch.object(leases, "take_due", lambda _, due=due: due()))
        until(lambda: [node.step() for node in both] and is_over())
    assert all(all_free(node) for node in both)


def computed_alone(node: Node) -> None:
    """Checks that the engine still works: it computes a local request."""
    node.add("cmpl-w-0-eeeeeeee", None, first_token=300)
    node.step_until(lambda: "cmpl-w-0-eeeeeeee" in node.ended)
    assert node.ended["cmpl-w-0-eeeeeeee"] == "length"


def prefilled(
    prefill: Node, request_id: str, first_token: int = 0, num_tokens: int = PROMPT, max_tokens: int = 1, **params: Any
) -> dict[str, Any]:
    """Lets prefill compute a request and keep its blocks. Returns the parameters for decode, as a client gets them."""
    prefill.add(request_id, {**SEND, **params}, max_tokens, first_token, num_tokens=num_tokens)
    prefill.step_until(lambda: request_id in prefill.transfer_params)
    # JSON turns tuples into lists, as on the way through a client.
    return json.loads(json.dumps(prefill.transfer_params[request_id]))


@contextmanager
def without_haste(prefill: Node, decode: Node) -> Iterator[None]:
    """Raises all leases and deadlines, so that none expires however slow the machine is."""
    engine, registry, seconds = decode.side_of_engine.engine, prefill.registry, 600.0
    settings = dataclasses.replace(engine.settings, handover_timeout_seconds=seconds)
    with (
        mock.patch.object(engine, "settings", settings),
        mock.patch.object(writer_of(registry), "_unmatched_seconds", seconds),
        mock.patch.object(matcher_of(registry), "_unmatched_seconds", seconds),
        mock.patch.object(leases_of(registry), "_lease_seconds", seconds),
    ):
        yield


def core_around(node: Node) -> EngineCore:
    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.mm_receiver_cache = node.scheduler, None
    core.structured_output_manager = node.scheduler.structured_output_manager
    core.vllm_config, core.input_queue = node.scheduler.vllm_config, queue.Queue()
    size = node.geometry.block_size * node.kernel_blocks_per_block
    core.request_block_hasher = get_request_block_hasher(size, sha256)
    return core


def looked_up(
    core: EngineCore,
    token_ids: Sequence[int],
    least_tokens: int = 0,
    adapter: Any = None,
    salt: str = "",
    most_seconds: float = 600.0,
) -> Future[dict[str, Any]]:
    """What an API server's call gets, as far as that needs no step."""
    let_look_up(core)
    sent = None if adapter is None else msgspec.to_builtins(adapter)
    call = core.kvcached_nixl_look_up
    answer = call(np.asarray(token_ids, "<u4").tobytes(), "r", sent, salt, least_tokens, most_seconds)
    call.__self__._looker.submit(lambda: None).result()
    side_of(core.scheduler.connector).run_calls()
    return answer


def served(prefill: Node, decode: Node, number: int = 7) -> None:
    """Checks that both engines still work: another request is handed over."""
    first_token = 40 * number
    with without_haste(prefill, decode):
        params = prefilled(prefill, f"cmpl-w-0-aaaaaaa{number}", first_token)
        decode.add(f"cmpl-w-0-ddddddd{number}", params, first_token=first_token)
        decode.step()
        local = decode.blocks(f"cmpl-w-0-ddddddd{number}")
        until_both(prefill, decode, lambda: f"cmpl-w-0-ddddddd{number}" in decode.received)
        assert decode.holds(local, first_token=first_token)
        rest(prefill, decode)


def ends_by_policy(policy: str, decode: Node, *others: Node, num_tokens: int = PROMPT, first_token: int = 0) -> None:
    """Checks that decode's request fails or is recomputed, as the policy says, and that all blocks become free."""

    def step() -> bool:
        return all(node.step() for node in (decode, *others))

    if policy == "recompute":
        until(lambda: step() and decode.status(DECODE_ID) == RequestStatus.RUNNING)
        assert decode.holds(decode.blocks(DECODE_ID), 0, num_tokens, first_token)
    until(lambda: step() and DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == {"fail": "error", "recompute": "length"}[policy]
    rest(decode, *others)
