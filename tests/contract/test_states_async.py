# SPDX-License-Identifier: Apache-2.0
"""States and zeroed blocks on a device that lags behind, with several steps in flight.

A state is overwritten by every step of its request, and vLLM zeroes new blocks of such models on the device. Both may
still be under way when decode's request gets the blocks (rule R8; vllm#42182, vllm#48481).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.groups_node import GroupsNode
from support.nodes import (
    DECODE_FILLING,
    DECODE_ID,
    PREFILL_FILLING,
    PREFILL_ID,
    RESERVED,
    SAMPLED,
    AsyncNode,
    nodes,
    prompt,
)
from support.waiting import until
from vllm.v1.outputs import ModelRunnerOutput

from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has

pytestmark = pytest.mark.skipif(not installed_has(HITS_DIVERGE), reason="this vLLM cannot load states")

BLOCK, TOKENS = 16, 44
GEOMETRY = dataclasses.replace(
    RESERVED, block_size=BLOCK, num_blocks=5, reserved_blocks=9, num_pools=2, groups=2, states=(1,)
)
"""A null block, and four: a request of 44 tokens has three, and one for its state."""
WINDOWS = (None, "none")
LOCAL_ID = "cmpl-y-0-eeeeeeee"


@dataclasses.dataclass
class Node(AsyncNode, GroupsNode):
    """An engine whose device works when it is told to.

    Attributes:
        work: what was submitted to the device and is not done.
        submitted: for each step in flight, how much was submitted by its end.
    """

    work: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    submitted: list[int] = dataclasses.field(default_factory=list)
    num_submitted: int = 0
    lags: bool = False

    def submit(self, work: Callable[[], None]) -> None:
        self.num_submitted += 1
        self.work.append(work)
        if not self.lags:
            self.do_all()

    @property
    def num_done(self) -> int:
        return self.num_submitted - len(self.work)

    def do_all(self) -> None:
        self.do(self.num_submitted)

    def do(self, up_to: int) -> None:
        while self.num_done < up_to:
            self.work[0]()
            del self.work[0]

    def record(self) -> Callable[[], bool]:
        """Returns whether the device has done all that it was given before this call."""
        place = self.num_submitted
        return lambda: self.num_done >= place

    def zero(self, block_ids: Any) -> None:
        if block_ids:
            ids = list(block_ids)
            self.submit(lambda: super(Node, self).zero(ids))

    def compute_tokens(self, request: Any, blocks: list[list[int]], begin: int, count: int) -> None:
        self.submit(lambda: super(Node, self).compute_tokens(request, blocks, begin, count))

    def run(self, output: Any) -> ModelRunnerOutput:
        result = super().run(output)
        self.submitted.append(self.num_submitted)
        return result

    def take(self, output: Any, result: ModelRunnerOutput) -> None:
        """A step's output is there when the device has done it."""
        self.do(self.submitted.pop(0))
        super().take(output, result)


@pytest.fixture(params=["pull", "push"])
def node(
    request: pytest.FixtureRequest, tmp_path: Path, log: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Node]]:
    with nodes(Node, tmp_path, log) as make:

        def one(filling: int, **options: Any) -> Node:
            extra = {"transfer_mode": request.param, "prefix_caching": False, "windows": WINDOWS, **options}
            found = make(filling, extra.pop("geometry", GEOMETRY), **extra)
            found.side.record_event = found.record
            return found

        yield one


def with_a_step_in_flight(decode: Node) -> list[list[int]]:
    """A request has ended with its first token, while the device has not begun a step more of it. Returns its blocks
    per group, which are free."""
    decode.add(LOCAL_ID, None, 4, num_tokens=TOKENS, stop_token_ids=[SAMPLED])
    decode.step()
    blocks = decode.of_groups(LOCAL_ID)
    decode.lags = True
    decode.step()
    assert decode.ended.pop(LOCAL_ID) == "stop"
    assert decode.work, "the step behind the last token is under way"
    return blocks


def goes_on(prefill: Node, decode: Node, num_tokens: int) -> None:
    """Decode's device catches up, and its request ends with so many tokens from prefill."""
    decode.do_all()
    decode.step_until(lambda: DECODE_ID in decode.received, prefill)
    assert decode.sees(DECODE_ID, TOKENS, num_tokens)
    decode.lags = False
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    prefill.rest(decode)


def test_states_arrive_after_the_steps_that_still_overwrite_them(node: Callable[..., Node]) -> None:
    """Rule R8 is a matter of tokens here: the step in flight writes the state behind a token that nobody wants."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    params = prefill.prefilled(num_tokens=TOKENS)
    freed = with_a_step_in_flight(decode)
    decode.add(DECODE_ID, params, 2, num_tokens=TOKENS)
    output = decode.scheduler.schedule()
    decode.queued.append((output, decode.run(output)))
    blocks = decode.of_groups(DECODE_ID)
    assert set(freed[1]) <= {*blocks[0], *blocks[1]}, "the step in flight writes a state into one of its blocks"
    decode.settle()
    prefill.step()
    assert not decode.moved and not decode.sees(DECODE_ID, TOKENS, TOKENS - 1)
    goes_on(prefill, decode, TOKENS - 1)


def test_blocks_are_filled_after_they_were_zeroed(node: Callable[..., Node]) -> None:
    """vllm#48481. From 0.28 on vLLM leaves such blocks alone, and this package asks for them."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    params = prefill.prefilled(num_tokens=TOKENS)
    decode.lags = True
    decode.add(DECODE_ID, params, 2, num_tokens=TOKENS)
    decode.step()
    assert decode.work, "the last block is to be zeroed"
    decode.settle()
    prefill.step()
    assert not decode.moved
    goes_on(prefill, decode, TOKENS - 1)


def test_what_is_behind_the_last_token_is_zero_in_larger_blocks_too(node: Callable[..., Node]) -> None:
    """Prefill's blocks do not reach as far; and what was there before may be no number."""
    larger = dataclasses.replace(GEOMETRY, block_size=2 * BLOCK)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, geometry=larger)
    decode.add(DECODE_ID, prefill.prefilled(num_tokens=2 * BLOCK + 5), 2, num_tokens=2 * BLOCK + 5)
    decode.step_until(lambda: DECODE_ID in decode.received, prefill)
    (blocks, _) = decode.of_groups(DECODE_ID)
    assert not any(cell.any() for cell in decode.behind(2 * BLOCK + 4, [blocks], 0))
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    prefill.rest(decode)


def test_what_is_cached_is_offered_when_the_device_has_computed_it(node: Callable[..., Node]) -> None:
    """vLLM caches blocks when it schedules the step that computes them, which may be under way when a peer asks."""
    geometry = dataclasses.replace(GEOMETRY, num_blocks=9)
    more = {"geometry": geometry, "windows": (None, "align"), "prefix_caching": True}
    prefill, decode = node(PREFILL_FILLING, **more), node(DECODE_FILLING, **more)
    prefill.lags = True
    prefill.add(PREFILL_ID, None, 1, num_tokens=2 * BLOCK)
    prefill.step()
    asks = prefill.looked_up(prompt(0, TOKENS), BLOCK)
    output = prefill.scheduler.schedule()
    prefill.queued.append((output, prefill.run(output)))
    assert prefill.work and not asks.done(), "the device has not begun"
    until(lambda: prefill.step() and asks.done())
    assert not prefill.work
    params = json.loads(json.dumps(asks.result()))
    decode.add(DECODE_ID, params, 2, num_tokens=TOKENS)
    goes_on(prefill, decode, 2 * BLOCK)
