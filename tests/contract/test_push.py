# SPDX-License-Identifier: Apache-2.0
"""Our push between two engines, on the installed vLLM: its scheduler, this package's patches, real NIXL.

Every byte of a request's KV is known from its tokens and their places, so decode's blocks are compared with what they
must hold, and every other block with what filled it before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import engine_node
import msgspec
import test_geometry
import torch
from engine_node import BLOCKS, DECODE_ID, GEOMETRY, PREFILL_ID, PROMPT, USABLE, nodes, prompt, same
from test_geometry import ERAS
from test_transport import nixl_side, until
from vllm.v1.request import RequestStatus

from kvcached_nixl.compat.attached import push_of
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.wire.push import PREFIX, Withdrawal, Written, encode

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, test_geometry.patched

# More room than was planned, as kvcached reserves it.
RESERVED = dataclasses.replace(GEOMETRY, era=ERAS[0], reserved_blocks=29)
BLOCK_SIZE = RESERVED.block_size
CHUNK = 40
PREFILL_FILLING, DECODE_FILLING, ANOTHER_REQUESTS = 251, 252, 253
NAME = {"transfer_id": "t1"}
SEND = {"do_remote_decode": True}
IDLE_SECONDS = 2.0


def kv(token_ids: list[int], first_position: int, layer: int, num_bytes: int) -> torch.Tensor:
    """The bytes of each token in a layer; none of them is a filling."""
    tokens, numbers = torch.tensor(token_ids)[:, None], torch.arange(num_bytes)[None]
    positions = torch.arange(first_position, first_position + len(token_ids))[:, None]
    return ((tokens * 101 + positions * 7 + layer * 31 + numbers * 13) % 241).to(torch.uint8)


class Node(engine_node.Node):
    """An engine of ours, with a model that writes every token's bytes into its place."""

    @property
    def agent(self) -> Any:
        return self.worker.nixl_wrapper

    @property
    def pushing(self) -> Any:
        """The writer thread."""
        return push_of(self.engine.worker)._push

    @property
    def pending(self) -> bool:
        """Blocks wait for the workers. Where vLLM asks its connector for that, it is told so."""
        pending = bool(push_of(self.engine.scheduler).pending)
        asked = getattr(self.engine.scheduler, "has_pending_push_work", None)
        assert asked is None or asked() is pending
        return pending

    def compute(self, output: Any) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request, blocks = self.scheduler.requests[request_id], self.blocks(request_id)
            end = request.num_computed_tokens
            for cells, expected in self.cells(list(request.all_token_ids[:end]), blocks, end - count):
                cells.copy_(expected)

    def cells(
        self, token_ids: list[int], block_ids: list[int], first_position: int, offset: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where the tokens from a position on are, and what they must be. ``offset``: where the blocks begin."""
        size, position = self.geometry.block_size, first_position
        while position < len(token_ids):
            slot, tokens = position % size, token_ids[position : position + size - position % size]
            for layer, cache in enumerate(self.caches.values()):
                block = self.geometry.block(cache, block_ids[(position - offset) // size]).view(torch.uint8)
                cells = block.movedim(1, 0)[slot : slot + len(tokens)]
                yield cells, kv(tokens, position, layer, cells[0].numel()).view(cells.shape)
            position += len(tokens)

    def holds(self, block_ids: list[int], first_position: int = 0, end: int = PROMPT, first_token: int = 0) -> bool:
        """The blocks hold the tokens of a prompt from a position on, and none is missing."""
        cells = self.cells(prompt(first_token, end), block_ids, first_position, first_position)
        return all(torch.equal(found, expected) for found, expected in cells)

    def all_but(self, block_ids: list[int]) -> list[int]:
        """Every other block that memory is reserved for."""
        return [block_id for block_id in range(self.geometry.reserved_blocks) if block_id not in block_ids]

    def are_filled(self, block_ids: list[int], filling: int) -> bool:
        return all(bool((page.view(torch.uint8) == filling).all()) for page in self.content(block_ids))

    def fill(self, block_ids: list[int], filling: int) -> None:
        """Something else comes to stand in the blocks."""
        for cache in self.caches.values():
            for block_id in block_ids:
                self.geometry.block(cache, block_id).view(torch.uint8).fill_(filling)

    def preempt(self, request_id: str) -> None:
        """What the scheduler does to all requests that run when its prefix cache is reset."""
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.prev_step_scheduled_req_ids.clear()

    def status(self, request_id: str) -> RequestStatus:
        return self.scheduler.requests[request_id].status

    def settle(self) -> None:
        """The writer thread has done everything that it could do when this was called."""
        turn, done = self.pushing.turn, list[float]()

        def counted() -> float:
            done.append(turn())
            return done[-1]

        self.pushing.turn = counted
        until(lambda: len(done) > 2)
        del self.pushing.turn

    def dropped(self, reason: str) -> int:
        return int(self.pushing.dropped[reason])


@dataclasses.dataclass
class Gate:
    """Holds something back while it is closed. ``kept``: what was."""

    closed: bool = True
    kept: list[Any] = dataclasses.field(default_factory=list)


def notifications_held(node: Node, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """What is said to the node is not heard."""
    gate, real = Gate(), node.agent.get_new_notifs

    def get_new_notifs() -> Any:
        if not gate.closed:
            return gate.kept.pop(0) if gate.kept else real()
        gate.kept += [found] if (found := real()) else []
        return {}

    monkeypatch.setattr(node.agent, "get_new_notifs", get_new_notifs)
    return gate


def writes_held(node: Node, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The node's WRITEs do not end."""
    gate, real = Gate(), node.agent.check_xfer_state
    monkeypatch.setattr(node.agent, "check_xfer_state", lambda handle: "PROC" if gate.closed else real(handle))
    return gate


@pytest.fixture
def node(tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., Node]]:
    """Makes a node that pushes, all its pages filled with the given byte."""
    with nodes(Node, tmp_path, log) as make:
        yield lambda filling, geometry=RESERVED, transfer_mode="push", **options: make(
            filling, geometry, transfer_mode=transfer_mode, **options
        )


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    return node(PREFILL_FILLING), node(DECODE_FILLING)


def ask(decode: Node, prefill: Node) -> list[int]:
    """A request that prefill has not begun comes to decode and is registered; returns its blocks."""
    decode.add(DECODE_ID, {**prefill.address(""), **NAME})
    decode.step()
    assert decode.waits(DECODE_ID)
    until(lambda: len(prefill.pushing._sender))
    return decode.blocks(DECODE_ID)


def until_both(prefill: Node, decode: Node, found: Callable[[], Any]) -> None:
    until(lambda: prefill.step() and decode.step() and found())


def all_free(node: Node) -> bool:
    """Every block is in the free pool, once, and nobody counts it as used."""
    pool = node.scheduler.kv_cache_manager.block_pool
    found = sorted(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    used = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
    return found == list(range(1, node.geometry.num_blocks)) and not used


def rest(*both: Node) -> None:
    """They step for as long as their engines would; then nothing is owed and all blocks are free."""
    until(lambda: [node.step() for node in both] and not any(node.scheduler.has_requests() for node in both))
    for node in both:
        assert all_free(node) and not node.pending


def served(prefill: Node, decode: Node) -> None:
    """Both engines go on: another request is pushed from one to the other."""
    decode.add("cmpl-w-0-dddddddd", {**prefill.address(""), "transfer_id": "later"}, first_token=300)
    decode.step()
    local = decode.blocks("cmpl-w-0-dddddddd")
    prefill.add("cmpl-w-0-aaaaaaaa", {**SEND, "transfer_id": "later"}, 1, 300)
    until_both(prefill, decode, lambda: "cmpl-w-0-dddddddd" in decode.received)
    assert decode.holds(local, first_token=300)
    rest(prefill, decode)


def computed_alone(node: Node) -> None:
    """The engine goes on: a request that is nobody's but its own."""
    node.add("cmpl-w-0-eeeeeeee", None, first_token=300)
    node.step_until(lambda: "cmpl-w-0-eeeeeeee" in node.ended)
    assert node.ended["cmpl-w-0-eeeeeeee"] == "length"


def ends_by_policy(policy: str, decode: Node, *others: Node) -> None:
    """Decode's request fails, or decode computes it itself; then all blocks are free on all sides."""

    def step() -> bool:
        return all(node.step() for node in (decode, *others))

    if policy == "recompute":
        until(lambda: step() and decode.status(DECODE_ID) == RequestStatus.RUNNING)
        assert decode.holds(decode.blocks(DECODE_ID))
    until(lambda: step() and DECODE_ID in decode.ended)
    assert decode.worker.xfer_stats.data["num_failed_transfers"]
    assert decode.ended[DECODE_ID] == {"fail": "error", "recompute": "length"}[policy]
    rest(decode, *others)


def test_an_idle_writer_uses_no_processor_time(pair: tuple[Node, Node]) -> None:
    """On both sides, once they know each other and nothing is owed."""
    prefill, decode = pair
    served(prefill, decode)
    clocks = [time.pthread_getcpuclockid(node.pushing._thread.ident) for node in pair]
    before = [time.clock_gettime(clock) for clock in clocks]
    time.sleep(IDLE_SECONDS)
    used = [time.clock_gettime(clock) - begun for clock, begun in zip(clocks, before, strict=True)]
    assert max(used) < 0.005 * IDLE_SECONDS, used


# ------------------------------------------------------------------------------------------------------- bytes arrive


@pytest.mark.parametrize(
    ("era", "contiguous"), [(era, contiguous) for era in ERAS if era != "mla" for contiguous in (False, True)]
)
def test_a_push_writes_the_missing_blocks_and_no_other(era: str, contiguous: bool, node: Callable[..., Node]) -> None:
    geometry = dataclasses.replace(RESERVED, era=era, contiguous=contiguous)
    prefill, decode = node(PREFILL_FILLING, geometry), node(DECODE_FILLING, geometry)
    # So that equal tokens are not at equal places.
    decode.add("cmpl-y-0-dddddddd", None, first_token=200, num_tokens=PROMPT - 8)
    decode.step()
    others = decode.blocks("cmpl-y-0-dddddddd")
    local = ask(decode, prefill)
    before = decode.content(others)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    blocks = prefill.blocks(PREFILL_ID)
    assert not set(local) & {*blocks, *others}

    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    until(lambda: decode.pushing._outcome.received)
    assert prefill.holds(blocks) and decode.holds(local)
    assert same(decode.content(local), prefill.content(blocks))
    assert same(decode.content(others), before)
    assert decode.are_filled(decode.all_but([*local, *others]), DECODE_FILLING)
    assert prefill.are_filled(prefill.all_but(blocks), PREFILL_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"
    rest(prefill, decode)


NAMES = {
    "transfer_id": ({"transfer_id": "t1"}, {"transfer_id": "t1"}, DECODE_ID),
    "X-Request-Id": ({}, {}, DECODE_ID),
    "remote_request_id": ({}, {"remote_request_id": PREFILL_ID}, "cmpl-another-0-dddddddd"),
}


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("name", list(NAMES))
def test_the_two_requests_meet_in_either_order(name: str, first: str, pair: tuple[Node, Node]) -> None:
    """With what prefill answers if it comes first, with what a router knows by itself if decode does."""
    prefill, decode = pair
    theirs, own, decode_id = NAMES[name]
    if first == "decode":
        decode.add(decode_id, {**prefill.address(""), **own})
        decode.step()
        until(lambda: len(prefill.pushing._sender))
    # Another request, which nobody asks for.
    prefill.add("cmpl-z-0-aaaaaaaa", {**SEND, **({"transfer_id": "t2"} if theirs else {})}, 1, 200)
    prefill.add(PREFILL_ID, {**SEND, **theirs}, 1)
    prefill.step()
    if first == "prefill":
        answer = prefill.transfer_params[PREFILL_ID]
        assert answer.items() >= {**prefill.address(PREFILL_ID), **theirs, "transfer_mode": "push"}.items()
        decode.add(decode_id, answer)
        decode.step()
    local = decode.blocks(decode_id)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    decode.step_until(lambda: decode_id in decode.received)
    assert decode.holds(local)
    assert "cmpl-z-0-aaaaaaaa" not in prefill.sent and prefill.scheduler.has_requests()


REFUSED = pytest.mark.xfail(
    strict=True, reason="vLLM's compatibility hash tells the arrangements apart (cross_layers_blocks), in no words"
)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"block_size": 16, "num_blocks": 21}, id="other tokens a block"),
        pytest.param({"contiguous": True}, id="the other arrangement", marks=REFUSED),
    ],
)
def test_decode_may_be_laid_out_otherwise(change: dict[str, Any], node: Callable[..., Node]) -> None:
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, dataclasses.replace(RESERVED, **change))
    decode.add(DECODE_ID, {**prefill.address(""), **NAME})
    decode.step()
    local = decode.blocks(DECODE_ID)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert DECODE_ID not in decode.ended and decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)


def test_blocks_travel_while_prefill_still_computes(node: Callable[..., Node]) -> None:
    """Chunks end inside blocks: whole blocks go, each before the next chunk is computed, and nothing else."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = ask(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    for computed, whole in ((CHUNK, 1), (2 * CHUNK, 2)):
        prefill.step()
        assert prefill.scheduler.requests[PREFILL_ID].num_computed_tokens == computed
        until(lambda whole=whole: decode.holds(local, end=whole * BLOCK_SIZE))
        prefill.settle()
        assert decode.are_filled(local[whole:], DECODE_FILLING)
        assert prefill.status(PREFILL_ID) == RequestStatus.RUNNING
        decode.step()
        assert decode.waits(DECODE_ID) and DECODE_ID not in decode.received
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    until(lambda: decode.pushing._outcome.received)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


def test_only_blocks_that_decode_has_not_cached_are_written(pair: tuple[Node, Node]) -> None:
    """Two of three blocks are in decode's prefix cache; what stands in them stays."""
    prefill, decode = pair
    decode.add("cmpl-y-0-dddddddd", None, num_tokens=2 * BLOCK_SIZE + 1)
    decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
    local = ask(decode, prefill)
    (attempts,) = prefill.pushing._sender._attempts.values()
    (attempt,) = attempts.values()
    assert attempt.registration.first_token == 2 * BLOCK_SIZE
    assert attempt.registration.block_ids == ((local[2],),) and len(local) == BLOCKS
    decode.fill(decode.all_but([]), ANOTHER_REQUESTS)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    until(lambda: decode.pushing._outcome.received)
    assert decode.holds(local[2:], first_position=2 * BLOCK_SIZE)
    assert decode.are_filled(decode.all_but(local[2:]), ANOTHER_REQUESTS)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


# -------------------------------------------------------------------------------------------------- requests that end


def test_decodes_request_aborted_in_its_queue_frees_prefills_blocks(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    assert prefill.free_blocks == USABLE - BLOCKS
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.abort(DECODE_ID)
    assert decode.scheduler.has_requests()
    decode.step()
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    rest(prefill, decode)


def test_decodes_request_aborted_while_it_waits_keeps_its_blocks_until_prefill_has_stopped(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill hears of it late, computes the request after that, and writes nothing into the blocks.

    It keeps its own for a lease: the name may be used by a next request of decode.
    """
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=0.3), node(DECODE_FILLING)
    local = ask(decode, prefill)
    gate = notifications_held(prefill, monkeypatch)
    decode.abort(DECODE_ID)
    decode.step()
    until(lambda: gate.kept)
    for _ in range(3):
        decode.settle()
        decode.step()
    assert decode.free_blocks == USABLE - BLOCKS and decode.pending and decode.scheduler.has_requests()

    gate.closed = False
    rest(decode)
    assert DECODE_ID in decode.received and DECODE_ID not in decode.scheduler.requests
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    rest(prefill, decode)
    assert decode.are_filled(local, DECODE_FILLING)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prefills_request_aborted_while_it_computes_ends_decodes(
    policy: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of both come free when the WRITE that is in flight has ended, and not before."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING, policy=policy)
    ask(decode, prefill)
    gate = writes_held(prefill, monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    until(lambda: prefill.pushing._sender.in_flight)
    blocks = prefill.blocks(PREFILL_ID)
    prefill.abort(PREFILL_ID)
    for _ in range(3):
        prefill.step()
        prefill.settle()
        decode.step()
    assert prefill.free_blocks == USABLE - len(blocks) and prefill.scheduler.has_requests()
    assert decode.waits(DECODE_ID)
    gate.closed = False
    ends_by_policy(policy, decode, prefill)
    assert "prefill's request was aborted" in decode.log.text
    served(prefill, decode)


@pytest.mark.parametrize("order", ["registered before", "registered after"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prefills_request_aborted_in_its_queue_ends_decodes(policy: str, order: str, node: Callable[..., Node]) -> None:
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    if order == "registered before":
        ask(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.abort(PREFILL_ID)
    assert prefill.scheduler.has_requests()
    prefill.step()
    if order == "registered after":
        prefill.settle()
        decode.add(DECODE_ID, {**prefill.address(""), **NAME})
        decode.step()
    ends_by_policy(policy, decode, prefill)
    reason = "ended before it was computed" if order == "registered before" else "let go of this request"
    assert reason in decode.log.text
    served(prefill, decode)


@pytest.mark.parametrize("whose", ["decode's", "prefill's"])
def test_a_registration_that_is_not_served_in_time_fails(whose: str, node: Callable[..., Node]) -> None:
    """Prefill has no such request; ``push_registration_timeout`` of either side ends it."""
    short = {"push_registration_timeout": 0.3}
    prefill = node(PREFILL_FILLING, **(short if whose == "prefill's" else {}))
    decode = node(DECODE_FILLING, **(short if whose == "decode's" else {}))
    ask(decode, prefill)
    ends_by_policy("fail", decode, prefill)
    reason = "prefill has no such request" if whose == "prefill's" else "not written everything in 0.3 s"
    assert reason in decode.log.text
    assert not len(prefill.pushing._sender) and not len(decode.pushing._receiver)


@pytest.mark.parametrize("before", ["served, then decode first", "not served, then prefill first"])
def test_a_client_may_use_its_request_id_again(before: str, node: Callable[..., Node]) -> None:
    """X-Request-Id is the client's: it may repeat one after a request of it has ended, well or not."""
    prefill, decode = node(PREFILL_FILLING, push_registration_timeout=0.3), node(DECODE_FILLING)
    decode.add(DECODE_ID, prefill.address(""))
    if before == "served, then decode first":
        prefill.add(PREFILL_ID, SEND, 1)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)
    theirs, own = "cmpl-x-0-bbbbbbbb", "cmpl-x-0-eeeeeeee"
    assert theirs[:-8] == PREFILL_ID[:-8] and own[:-8] == DECODE_ID[:-8]
    if before == "served, then decode first":
        decode.add(own, prefill.address(""), first_token=200)
        decode.step()
        prefill.settle()
        prefill.add(theirs, SEND, 1, 200)
    else:
        prefill.add(theirs, SEND, 1, 200)
        prefill.step()
        prefill.settle()
        decode.add(own, prefill.transfer_params[theirs], first_token=200)
    until_both(prefill, decode, lambda: own in decode.ended)
    assert decode.ended[own] == "length"


def fail(*_: Any) -> str:
    raise RuntimeError("no route")


NOT_POSTED = {"transfer": lambda _: "PROC"}
BROKEN: dict[str, dict[str, Callable[..., str]]] = {
    "its state raises": {**NOT_POSTED, "check_xfer_state": fail},
    "its state is an error": {**NOT_POSTED, "check_xfer_state": lambda _: "ERR"},
    "it is not posted": {"transfer": fail},
    "it is not made": {"initialize_xfer": fail},
}


@pytest.mark.parametrize("broken", list(BROKEN))
def test_a_write_that_fails_ends_decodes_request_and_frees_prefills_blocks(
    broken: str, pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    local = ask(decode, prefill)
    with monkeypatch.context() as patching:
        for method, replacement in BROKEN[broken].items():
            patching.setattr(prefill.agent, method, replacement)
        prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
        ends_by_policy("fail", decode, prefill)
    reason = "a WRITE was not posted" if broken == "it is not made" else "a WRITE failed"
    assert PREFILL_ID in prefill.sent and reason in decode.log.text
    assert decode.are_filled(local, DECODE_FILLING)
    served(prefill, decode)


# --------------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_of_a_preempted_request_are_held_while_a_write_reads_them(
    times: int, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts over in other blocks, and decode gets the right bytes whatever comes to stand in the first ones."""
    # Without prefix caching it does not take the first ones up again.
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK, prefix_caching=False), node(DECODE_FILLING)
    local, gate = ask(decode, prefill), writes_held(prefill, monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    lost: list[int] = []
    for _ in range(times):
        prefill.step()
        until(lambda: prefill.pushing._sender.in_flight)
        assert not set(lost) & set(prefill.blocks(PREFILL_ID))
        lost += prefill.blocks(PREFILL_ID)
        prefill.preempt(PREFILL_ID)
        assert prefill.free_blocks == USABLE - len(lost) and prefill.pending
    for _ in range(2):
        prefill.step()
        prefill.settle()
    again = prefill.blocks(PREFILL_ID)
    assert prefill.scheduler.requests[PREFILL_ID].num_computed_tokens == 2 * CHUNK
    assert not set(lost) & set(again) and prefill.free_blocks == USABLE - len(lost) - len(again)
    assert prefill.pending and prefill.scheduler.has_requests()

    gate.closed = False
    until(lambda: len(prefill.pushing._outcome.quiet) == times)
    assert prefill.free_blocks == USABLE - len(lost) - len(again)
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    if PREFILL_ID not in prefill.sent:
        assert prefill.free_blocks == USABLE - BLOCKS
    prefill.fill(lost, ANOTHER_REQUESTS)
    until(lambda: decode.pushing._outcome.received)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_of_a_preempted_request_that_was_only_offered_are_held_until_the_worker_knows(
    times: int, node: Callable[..., Node]
) -> None:
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK, prefix_caching=False), node(DECODE_FILLING)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    for _ in range(times):
        prefill.step()
        prefill.settle()
        lost = prefill.blocks(PREFILL_ID)
        prefill.preempt(PREFILL_ID)
        assert prefill.free_blocks == USABLE - len(lost) and prefill.pending
        # It takes its new blocks before the workers hear of it.
        prefill.step()
        assert not set(lost) & set(prefill.blocks(PREFILL_ID))
        prefill.settle()
    prefill.step()
    again = prefill.blocks(PREFILL_ID)
    assert not prefill.pending and prefill.free_blocks == USABLE - len(again)
    prefill.fill([block_id for block_id in lost if block_id not in again], ANOTHER_REQUESTS)
    prefill.step()
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    decode.step()
    local = decode.blocks(DECODE_ID)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


def test_a_request_of_prefill_that_another_one_starves_arrives_all_the_same(node: Callable[..., Node]) -> None:
    """The scheduler itself preempts it, and it takes its own blocks up again from the prefix cache."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = ask(decode, prefill)
    # Its seven blocks are full, so its second token needs one more; the other request wants the last three.
    num_tokens = (USABLE - BLOCKS) * BLOCK_SIZE - 1
    prefill.add("cmpl-y-0-aaaaaaaa", None, 8, 200, num_tokens=num_tokens)
    prefill.step_until(lambda: prefill.scheduler.requests["cmpl-y-0-aaaaaaaa"].num_output_tokens)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    request = prefill.scheduler.requests[PREFILL_ID]
    prefill.step_until(lambda: request.num_preemptions)
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    assert "cmpl-y-0-aaaaaaaa" in prefill.ended
    until(lambda: decode.pushing._outcome.received)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


# ---------------------------------------------------------------------------------------------- what cannot be served

UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no host": ({"remote_host": None}, "remote_host"),
    "a name that is no string": ({"transfer_id": 7}, "transfer_id=7"),
    "an empty name": ({"transfer_id": ""}, "transfer_id=''"),
    "a port out of range": ({"remote_port": 70_000}, "a port from 1 to 65535"),
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("change", "reason"), list(UNUSABLE.values()), ids=list(UNUSABLE))
def test_parameters_that_cannot_be_used_end_the_request_by_policy(
    change: dict[str, Any], reason: str, policy: str, node: Callable[..., Node]
) -> None:
    decode = node(DECODE_FILLING, policy=policy)
    params = {**decode.address(""), **NAME, **change}
    decode.add(DECODE_ID, {key: value for key, value in params.items() if value is not None})
    ends_by_policy(policy, decode)
    assert reason in decode.log.text


def test_tensor_parallel_sizes_that_do_not_divide_end_the_request_by_policy(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    pushing = push_of(decode.engine.worker)
    place, pushing._place = pushing._place, dataclasses.replace(pushing._place, tp_size=2)
    decode.add(DECODE_ID, {**prefill.address(""), **NAME, "tp_size": 3})
    ends_by_policy("fail", decode, prefill)
    assert "tensor-parallel size 3 and decode's 2 do not divide" in decode.log.text
    pushing._place = place
    served(prefill, decode)


def test_prefills_request_of_an_unusable_name_is_not_offered(pair: tuple[Node, Node]) -> None:
    """It is computed and answered as any other, and its blocks come free at its end."""
    prefill, decode = pair
    prefill.add(PREFILL_ID, {**SEND, "transfer_id": 7}, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    assert prefill.ended[PREFILL_ID] == "length" and "transfer_id=7" in prefill.log.text
    rest(prefill)
    served(prefill, decode)


@pytest.mark.parametrize("modes", [("push", "pull"), ("pull", "push")], ids=" prefill, ".join)
def test_engines_of_which_only_one_pushes_refuse_each_other(modes: tuple[str, str], node: Callable[..., Node]) -> None:
    """In words, with what either offers; the request ends by policy, and both engines go on."""
    prefill = node(PREFILL_FILLING, transfer_mode=modes[0], kv_lease_duration=1)
    decode = node(DECODE_FILLING, transfer_mode=modes[1], kv_lease_duration=1)
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step()
    decode.add(DECODE_ID, prefill.transfer_params[PREFILL_ID])
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "error" and decode.free_blocks == USABLE
    said = [decode.log.handler.format(record) for record in decode.log.records]
    assert any(all(one.worker.compat_hash in message for one in (prefill, decode)) for message in said)
    assert {" push [" in prefill.worker.compat_hash, " push [" in decode.worker.compat_hash} == {True, False}
    assert decode.are_filled(decode.all_but([]), DECODE_FILLING)
    computed_alone(prefill)
    computed_alone(decode)
    if modes[0] == "push":
        rest(prefill)


def test_a_model_of_two_groups_is_refused_at_construction(node: Callable[..., Node]) -> None:
    with pytest.raises(SettingsError) as raised:
        node(PREFILL_FILLING, dataclasses.replace(RESERVED, groups=2))
    assert "2 KV-cache groups" in raised.value.found and "one group" in raised.value.expected
    assert "The engine stops." in raised.value.consequence and '"pull"' in raised.value.remedy


# ------------------------------------------------------------------------------------------- what an engine steps for


def test_an_engine_steps_exactly_while_something_is_owed(node: Callable[..., Node]) -> None:
    """An idle prefill gets its blocks back when the lease ends, without another request."""
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=1), node(DECODE_FILLING)
    assert not prefill.scheduler.has_requests() and not decode.scheduler.has_requests()
    # One that registered does not keep prefill awake; it waits for it.
    ask(decode, prefill)
    assert not prefill.scheduler.has_requests() and decode.scheduler.has_requests() and decode.pending
    prefill.add(PREFILL_ID, {**SEND, "transfer_id": "t2"}, 1)
    assert not prefill.pending
    prefill.step()
    for _ in range(5):
        prefill.step()
        assert prefill.pending and prefill.scheduler.has_requests() and prefill.free_blocks == USABLE - BLOCKS
    rest(prefill)
    assert PREFILL_ID in prefill.sent
    assert prefill.worker.xfer_stats.data["num_kv_expired_reqs"] == [1]
    decode.abort(DECODE_ID)
    assert decode.pending
    rest(decode)


def test_notifications_that_fit_nothing_are_counted_and_change_nothing(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Malformed, foreign, doubled, late, and of a stranger, on both sides, around a push that arrives all the same."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = ask(decode, prefill)
    (attempts,) = prefill.pushing._sender._attempts.values()
    (attempt,) = attempts.values()
    registration, to_decode = attempt.registration, attempt.peer
    (to_prefill,) = decode.pushing._connections._agents.values()
    stranger = nixl_side()
    for one in (prefill, decode):
        stranger.transport.add_peer(one.agent.get_agent_metadata())

    def counted(one: Node, say: Callable[..., Any], to: str, notification: bytes, reason: str) -> None:
        before, all_before = one.dropped(reason), one.pushing.dropped.total()
        say(to, notif_msg=notification)
        until(lambda: one.dropped(reason) == before + 1)
        assert one.pushing.dropped.total() == all_before + 1

    def written(index: int, **changes: Any) -> bytes:
        said = Written(*registration.key, 0, 1, index, False)
        return encode(msgspec.structs.replace(said, **changes))

    by_decode, by_prefill = decode.agent.send_notif, prefill.agent.send_notif
    by_stranger = lambda to, notif_msg: stranger.transport.send(to, notif_msg)  # noqa: E731
    unknown_field = PREFIX + msgspec.msgpack.encode({"say": "decline", "transfer": "t1", "and": 1})
    for notification in (PREFIX, PREFIX + b"\xff\x00", unknown_field):
        counted(prefill, by_decode, to_prefill, notification, "malformed")
        counted(decode, by_prefill, to_decode, notification, "malformed")
    counted(prefill, by_decode, to_prefill, encode(registration), "doubled or late registration")
    withdrawal = encode(Withdrawal(*registration.key, registration.decode))
    counted(prefill, by_stranger, to_prefill, withdrawal, "withdrawal by another peer")
    counted(decode, by_stranger, to_decode, written(0), "not a contributor")
    counted(decode, by_prefill, to_decode, written(0, tp_rank=1, tp_size=2), "not a contributor")
    counted(decode, by_prefill, to_decode, written(0, attempt=registration.attempt + 1), "unknown attempt")
    by_decode(to_prefill, notif_msg=b"HB:cmpl-x-0")
    by_prefill(to_decode, notif_msg=b"cmpl-x-0:1")

    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    (waiting,) = decode.pushing._receiver._waiting.values()
    until(lambda: waiting.contributors[0].arrived)
    counted(decode, by_prefill, to_decode, written(0), "doubled")
    decode.step()
    assert decode.waits(DECODE_ID)
    prefill.step()
    prefill.step()
    until(lambda: decode.pushing._outcome.received)
    assert decode.holds(local)
    counted(decode, by_prefill, to_decode, written(3), "unknown attempt")
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)
    decode.fill(local, ANOTHER_REQUESTS)
    counted(prefill, by_decode, to_prefill, encode(registration), "doubled or late registration")
    assert decode.are_filled(local, ANOTHER_REQUESTS)
    served(prefill, decode)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_connection_that_nixl_has_let_go_of_is_made_anew(side: str, node: Callable[..., Node]) -> None:
    """Both engines live: one request fails, well before its timeout, and the next ones are served."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    served(prefill, decode)
    one = prefill if side == "prefill" else decode
    (peer,) = one.pushing._connections._agents.values()
    if side == "prefill":
        ask(decode, prefill)
        one.agent.remove_remote_agent(peer)
        prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    else:
        one.agent.remove_remote_agent(peer)
        decode.add(DECODE_ID, {**prefill.address(""), **NAME})
    ends_by_policy("fail", decode, prefill)
    served(prefill, decode)
