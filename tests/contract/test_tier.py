# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector beside NixlConnector, with a spec that copies between host memories. Since vLLM 0.28.

A block that is freed is overwritten at once, as if kvcached had unmapped it and another request had mapped it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import attention_engines
from support.clocks import ManualClock
from support.nodes import (
    ANOTHER_REQUESTS,
    BLOCK_SIZE,
    BLOCKS,
    DECODE_FILLING,
    DECODE_ID,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    RESERVED,
    SEND,
    USABLE,
    Node,
    nodes,
    prompt,
)
from support.waiting import until
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvcached_nixl.vllm.adapter.neighbours import is_tier
from kvcached_nixl.vllm.adapter.versions import (
    ASKS_FOR_RESULTS,
    HASHES_AHEAD,
    HITS_DIVERGE,
    LOADS_BEHIND,
    installed_has,
)
from kvcached_nixl.vllm.patches import tier as served

if not installed_has(HITS_DIVERGE):
    pytest.skip("refused before vLLM 0.28", allow_module_level=True)

LATER = "cmpl-y-0-aaaaaaaa"
OTHER = "cmpl-z-0-aaaaaaaa"


class TierNode(Node):
    """Its connectors are NixlConnector and OffloadingConnector. Nothing is in a prefix cache, but in the tier."""

    connector = "MultiConnector"

    def __post_init__(self) -> None:
        super().__post_init__()
        pool = self.scheduler.kv_cache_manager.block_pool
        freed = pool.free_blocks

        def unmapped(blocks: Any, *args: Any, **kwargs: Any) -> None:
            found = list(blocks)
            self.fill([one.block_id for one in found if one.ref_cnt == 1], ANOTHER_REQUESTS)
            freed(found, *args, **kwargs)

        pool.free_blocks = unmapped

    @property
    def copier(self) -> Any:
        """What copies on its worker."""
        return self.of(self.engine.worker, is_tier).connector_worker.worker

    @property
    def tier(self) -> Any:
        return served.tier_of(self.scheduler)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        # As vLLM's runner does before each step; since 0.29 it is vLLM's own here.
        if self.runner is None:
            self.engine.worker.handle_preemptions(output.kv_connector_metadata)
        return super().run(output)

    def compute_alone(self, request_id: str, **options: Any) -> None:
        self.add(request_id, None, 1, **options)
        self.step_until(lambda: request_id in self.ended)

    def takes(self, request_id: str, first_token: int, num_tokens: int) -> None:
        """The next input of a streaming session."""
        hasher = get_request_block_hasher(self.geometry.block_size, sha256)
        tokens, sampling = prompt(first_token, num_tokens), SamplingParams(ignore_eos=True, max_tokens=1)
        self.scheduler.add_request(
            Request(request_id, tokens, sampling, None, block_hasher=hasher, resumable=num_tokens > 0)
        )
        if num_tokens:
            self.step_until(lambda: self.status(request_id) == RequestStatus.WAITING_FOR_STREAMING_REQ)

    def settles(self) -> bool:
        """Whether nothing is copied any more, and all blocks are free."""
        until(lambda: self.step() and not self.tier.is_copying)
        return self.all_free

    def starts(self, request_id: str, num_tokens: int = PROMPT + BLOCK_SIZE, loads: bool = True) -> None:
        """Adds a request, and checks whether the tier has the beginning of its prompt, and what it computes with."""
        self.add(request_id, None, 1, num_tokens=num_tokens)
        self.computes_rightly(request_id)
        assert (request_id in self.received) is loads

    def computes_rightly(self, request_id: str) -> None:
        seen: list[bool] = []
        compute = self.compute

        def checked(output: Any) -> None:
            compute(output)
            if request_id in output.num_scheduled_tokens:
                end = min(self.tokens(request_id), self.scheduler.requests[request_id].num_prompt_tokens)
                seen.append(self.holds(self.blocks(request_id), end=end))

        self.compute = checked  # type: ignore[method-assign]
        self.step_until(lambda: request_id in self.ended)
        self.compute = compute  # type: ignore[method-assign]
        assert seen and all(seen)


@pytest.fixture(params=[False, True], ids=["second", "first"])
def is_first(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def direction() -> str:
    return "pull"


@pytest.fixture
def make(is_first: bool, tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., TierNode]]:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    spec: dict[str, Any] = {
        "spec_name": "HostTierSpec",
        "spec_module_path": "support.server_side.host_tier",
        "host_blocks": 32,
    }
    children = [
        {**nixl, "kv_connector_extra_config": {"num_threads": 0}},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec},
    ]
    with nodes(TierNode, tmp_path, log) as made:

        def node(
            filling: int = PREFILL_FILLING, geometry: Any = RESERVED, at_once_bytes: int = 0, **options: Any
        ) -> Any:
            spec["sync_load_budget_bytes"] = at_once_bytes
            return made(
                filling,
                geometry,
                connectors=children[::-1] if is_first else children,
                trusted_connectors=["HostTierSpec"],
                **{"prefix_caching": False, "kv_role": "kv_both", **options},
            )

        yield node


@pytest.fixture
def one(make: Callable[..., TierNode]) -> TierNode:
    return make()


LAYOUTS = {
    "layers apart": RESERVED,
    "layers side by side": dataclasses.replace(RESERVED, contiguous=True),
    "latents": dataclasses.replace(RESERVED, era=attention_engines.ERAS[1]),
    "latents side by side": dataclasses.replace(RESERVED, era=attention_engines.ERAS[1], contiguous=True),
}
if not installed_has(LOADS_BEHIND):
    LAYOUTS["K and V apart"] = dataclasses.replace(RESERVED, era="kv_apart")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_later_turn_loads_what_an_earlier_one_has_stored(layout: str, make: Callable[..., TierNode]) -> None:
    """In every layout of kvcached's, by the bytes."""
    one = make(geometry=LAYOUTS[layout])
    one.compute_alone(PREFILL_ID)
    assert one.settles()
    one.starts(LATER)
    assert one.settles()
    one.starts("cmpl-v-0-aaaaaaaa", num_tokens=PROMPT)
    assert one.settles()


def test_blocks_that_are_still_stored_are_not_free(one: TierNode) -> None:
    """Their requests have ended, and others run meanwhile."""
    one.copier.is_stuck = True
    one.compute_alone(PREFILL_ID)
    assert not one.all_free and one.side_of_engine.pending and one.side_of_engine.revocations.has_blocks
    one.compute_alone(OTHER, first_token=200)
    one.copier.is_stuck = False
    assert one.settles() and not one.side_of_engine.pending
    one.starts(LATER)


def test_a_request_that_is_preempted_keeps_the_blocks_that_are_still_stored(make: Callable[..., TierNode]) -> None:
    one = make(tokens_a_step=BLOCK_SIZE)
    one.copier.is_stuck = True
    one.add(PREFILL_ID, None, 1)
    one.step_until(lambda: one.tokens(PREFILL_ID) == 2 * BLOCK_SIZE)
    one.preempt(PREFILL_ID)
    assert not one.all_free
    one.copier.is_stuck = False
    one.step_until(lambda: PREFILL_ID in one.ended)
    assert PREFILL_ID in one.received
    assert one.settles()
    one.starts(LATER)


def test_a_request_that_gives_its_blocks_to_others_is_stored_first(one: TierNode) -> None:
    """vLLM has its worker copy at once what a preempted request stores, before the step that needs its blocks."""
    one.copier.is_stuck = True
    for number, request_id in enumerate((OTHER, DECODE_ID, PREFILL_ID)):
        one.add(request_id, None, first_token=160 - 80 * number)
    one.step_until(lambda: one.status(PREFILL_ID) == RequestStatus.PREEMPTED)
    one.copier.is_stuck = False
    one.step_until(lambda: {OTHER, DECODE_ID, PREFILL_ID} <= one.ended.keys())
    assert PREFILL_ID in one.received
    assert one.settles()
    one.starts(LATER)


def test_planted_blocks_that_are_freed_while_they_are_stored_spoil_later_turns(one: TierNode) -> None:
    """Without the parking, this module's other tests would find it."""
    one.add(OTHER, None, 1, first_token=200)
    one.step_until(lambda: OTHER in one.ended)
    pool = one.scheduler.kv_cache_manager.block_pool
    pool.free_blocks = one.tier.free
    one.copier.is_stuck = True
    one.compute_alone(PREFILL_ID)
    one.copier.is_stuck = False
    assert one.settles()
    with pytest.raises(AssertionError):
        one.starts(LATER)


@pytest.mark.parametrize("is_stored", [True, False])
def test_nothing_from_before_a_change_of_weights_is_loaded(is_stored: bool, make: Callable[..., TierNode]) -> None:
    """Neither what was stored, nor what is being stored, nor what a request computes that goes on."""
    one = make(tokens_a_step=BLOCK_SIZE)
    one.copier.is_stuck = not is_stored
    one.compute_alone(PREFILL_ID)
    one.add(OTHER, None, 1, first_token=200)
    one.step_until(lambda: one.tokens(OTHER) == BLOCK_SIZE)
    one.side_of_engine.revocations.weights_changed()
    one.copier.is_stuck = False
    one.step_until(lambda: OTHER in one.ended)
    assert one.settles()
    one.starts(LATER, loads=False)
    one.add(DECODE_ID, None, 1, first_token=200)
    one.step_until(lambda: DECODE_ID in one.ended)
    assert DECODE_ID not in one.received
    assert one.settles()
    # What was computed since is stored again.
    one.starts("cmpl-v-0-aaaaaaaa")


def test_requests_that_lose_their_blocks_to_a_forced_reset_are_computed(one: TierNode) -> None:
    """vLLM's connector asserts that it loads nothing in the step that tells of their preemption."""
    one.compute_alone(PREFILL_ID)
    assert one.settles()
    one.add(LATER, None, 8, num_tokens=PROMPT + BLOCK_SIZE)
    one.step_until(lambda: LATER in one.received and one.status(LATER) == RequestStatus.RUNNING)
    one.step_until(lambda: not one.tier.is_copying)
    one.received.clear()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.computes_rightly(LATER)
    assert LATER not in one.received and one.settles()


def test_a_request_that_loads_while_weights_change_is_computed(one: TierNode) -> None:
    one.compute_alone(PREFILL_ID)
    assert one.settles()
    one.copier.is_stuck = True
    one.add(LATER, None, 1, num_tokens=PROMPT + BLOCK_SIZE)
    one.step_until(lambda: one.waits(LATER))
    one.side_of_engine.revocations.weights_changed()
    one.copier.is_stuck = False
    one.copier.spoils = True
    one.computes_rightly(LATER)
    assert LATER in one.received
    one.copier.spoils = False
    assert one.settles()
    one.starts("cmpl-v-0-aaaaaaaa", loads=False)
    one.starts("cmpl-u-0-aaaaaaaa")


@pytest.mark.skipif(not installed_has(HASHES_AHEAD), reason="this vLLM loads between steps only")
@pytest.mark.parametrize("weights_change", [False, True])
def test_a_request_computes_in_the_step_that_loads(weights_change: bool, make: Callable[..., TierNode]) -> None:
    """With ``sync_load_budget_bytes``: vLLM says that its blocks are cached before they are loaded. It goes on when
    weights change, as any request that runs, but nothing of it is loaded later."""
    one = make(tokens_a_step=BLOCK_SIZE, at_once_bytes=1 << 30, prefix_caching=True)
    one.compute_alone(PREFILL_ID)
    assert one.settles() and one.scheduler.reset_prefix_cache()
    one.add(LATER, None, 1, num_tokens=PROMPT + 4 * BLOCK_SIZE)
    output = one.scheduler.schedule()
    assert output.has_sync_kv_loads and output.num_scheduled_tokens[LATER]
    one.take(output, one.run(output))
    assert one.holds(one.blocks(LATER), end=PROMPT)
    if weights_change:
        one.side_of_engine.revocations.weights_changed()
    one.computes_rightly(LATER)
    assert LATER not in one.received and one.settles() and one.scheduler.reset_prefix_cache()
    one.add(OTHER, None, 1, num_tokens=PROMPT + 5 * BLOCK_SIZE)
    output = one.scheduler.schedule()
    assert OTHER in output.num_scheduled_tokens and output.has_sync_kv_loads is not weights_change


def test_a_session_whose_beginning_is_stored_keeps_its_tokens_when_weights_change(one: TierNode) -> None:
    one.compute_alone(PREFILL_ID)
    assert one.settles()
    one.takes(LATER, 0, PROMPT + BLOCK_SIZE)
    assert LATER not in one.received
    one.side_of_engine.revocations.weights_changed()
    one.takes(LATER, 300, 2 * BLOCK_SIZE)
    all_tokens = list(one.scheduler.requests[LATER].all_token_ids)
    assert all_tokens[:-1] == prompt(0, PROMPT + BLOCK_SIZE) + prompt(300, 2 * BLOCK_SIZE)


def test_no_input_of_a_session_is_stored(one: TierNode) -> None:
    """vLLM would store the second one from blocks of the first."""
    one.takes(OTHER, 0, 2 * BLOCK_SIZE)
    one.takes(OTHER, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert not one.tier.is_copying
    one.takes(OTHER, 0, 0)
    assert one.settles()
    one.starts(LATER, num_tokens=5 * BLOCK_SIZE, loads=False)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_second_change_before_the_next_step_is_taken(is_ours: bool, one: TierNode) -> None:
    """vLLM's connector asserts that there is one. What is in flight is waited for, and not loaded."""
    one.copier.is_stuck = True
    one.compute_alone(PREFILL_ID)
    one.side_of_engine.revocations.weights_changed()
    if is_ours:
        one.side_of_engine.revocations.weights_changed()
    else:
        assert one.scheduler.reset_connector_cache()
    assert one.tier.is_copying and not one.all_free
    one.copier.is_stuck = False
    assert one.settles()
    one.starts(LATER, loads=False)


def test_copies_of_vllms_own_reset_are_in_flight(one: TierNode) -> None:
    """In the step that begins them."""
    one.copier.is_stuck = True
    one.add(PREFILL_ID, None, 4)
    output = one.scheduler.schedule()
    assert one.scheduler.reset_connector_cache()
    assert one.tier.is_copying
    one.take(output, one.run(output))
    one.copier.is_stuck = False
    one.step_until(lambda: PREFILL_ID in one.ended)
    assert one.settles()


def test_what_waits_when_weights_change_is_stored(one: TierNode) -> None:
    one.add(PREFILL_ID, None, 1)
    one.side_of_engine.revocations.weights_changed()
    one.step_until(lambda: PREFILL_ID in one.ended)
    assert one.settles()
    one.starts(LATER)


def test_a_request_that_waits_for_blocks_that_are_stored_does_not_starve(one: TierNode) -> None:
    one.copier.is_stuck = True
    for number in range(USABLE // BLOCKS):
        one.compute_alone(f"cmpl-o-0-aaaaaaa{number}", first_token=100 * number)
    one.add(LATER, None, 1, first_token=400)
    for _ in range(3):
        one.step()
    assert not one.tokens(LATER) and one.side_of_engine.due_in_seconds is None
    one.copier.is_stuck = False
    one.step_until(lambda: LATER in one.ended)
    assert one.settles()


@pytest.mark.skipif(not installed_has(ASKS_FOR_RESULTS), reason="this vLLM preempts, whatever is about to be free")
def test_a_request_that_lacks_a_block_waits_for_those_that_are_stored(one: TierNode) -> None:
    """Else vLLM would preempt all that run, one after the other: their blocks are still stored, so none comes free."""
    one.copier.is_stuck = True
    for number, request_id in enumerate((OTHER, DECODE_ID, PREFILL_ID)):
        one.add(request_id, None, first_token=160 - 80 * number)
    lost: list[str] = []
    run = one.run

    def noted(output: SchedulerOutput) -> ModelRunnerOutput:
        lost.extend(output.preempted_req_ids or ())
        return run(output)

    one.run = noted  # type: ignore[method-assign]
    one.step_until(lambda: bool(lost))
    for _ in range(3):
        one.step()
    assert lost == [PREFILL_ID]
    one.copier.is_stuck = False
    one.step_until(lambda: {OTHER, DECODE_ID, PREFILL_ID} <= one.ended.keys())
    assert one.settles()


def test_a_long_row_of_copies_does_not_end_the_engine(
    make: Callable[..., TierNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them take longer than one may."""
    clock = ManualClock()
    monkeypatch.setattr(served, "Clock", lambda: clock)
    one = make()
    one.copier.is_stuck = True
    for number in range(USABLE // BLOCKS):
        one.compute_alone(f"cmpl-o-0-aaaaaaa{number}", first_token=100 * number)
    # vLLM's worker begins to store with the next step.
    one.step()
    for number in sorted(one.copier.ordered):
        for _ in range(int(served.LONGEST_SECONDS * 0.6)):
            clock.advance(1.0)
            one.step()
        one.copier.wait({number})
    assert one.settles()


def test_a_worker_that_never_ends_a_copy_ends_the_engine(one: TierNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "LONGEST_SECONDS", 0.1)
    one.copier.is_stuck = True
    one.compute_alone(PREFILL_ID)
    with pytest.raises(RuntimeError, match="has not copied blocks"):
        one.step_until(lambda: not one.tier.is_copying)


def test_blocks_are_free_when_the_last_of_several_workers_has_ended_their_copy(one: TierNode) -> None:
    two_workers = one.of(one.engine.scheduler, is_tier).connector_scheduler
    two_workers.config = two_workers.config._replace(num_workers=2)
    reports: list[Any] = []
    run = one.run

    def by_both(output: SchedulerOutput) -> ModelRunnerOutput:
        """The second worker ends each copy when it is told to."""
        result = run(output)
        told = result.kv_connector_output
        if told is not None and told.kv_connector_worker_meta is not None:
            reports.append(told.kv_connector_worker_meta)
        return result

    one.run = by_both  # type: ignore[method-assign]
    one.compute_alone(PREFILL_ID)
    for _ in range(5):
        one.step()
    assert reports and not one.all_free
    late = one.scheduler.schedule()
    result = run(late)
    result.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=reports[0])
    one.take(late, result)
    assert one.settles()


def test_offers_that_give_way_are_stored_first(one: TierNode) -> None:
    """Their blocks go to the next request when they are stored, and their prompts need not be computed again."""
    one.copier.is_stuck = True
    names = [f"cmpl-o-0-aaaaaaa{number}" for number in range(USABLE // BLOCKS)]
    for place, name in enumerate(names):
        one.prefilled(name, first_token=100 * place)
    one.add(OTHER, SEND, 1, 900)
    one.step_until(lambda: names[0] in one.sent)
    for _ in range(3):
        one.step()
    assert not one.tokens(OTHER)
    one.copier.is_stuck = False
    one.step_until(lambda: OTHER in one.ended)
    one.rest()
    one.starts(LATER)


def test_blocks_that_another_connector_has_not_loaded_are_not_kept(one: TierNode) -> None:
    one.compute_alone(PREFILL_ID)
    one.add(OTHER, None)
    one.step_until(lambda: OTHER in one.received)
    one.step()
    run = one.run

    def unloaded(output: SchedulerOutput) -> ModelRunnerOutput:
        result = run(output)
        assert result.kv_connector_output is not None
        result.kv_connector_output.invalid_block_ids = {one.blocks(OTHER)[0]}
        one.run = run  # type: ignore[method-assign]
        return result

    one.run = unloaded  # type: ignore[method-assign]
    one.step()
    one.step_until(lambda: not one.scheduler.has_requests())
    assert one.settles()
    one.starts(LATER, loads=False)


def test_what_prefill_has_loaded_is_handed_over_and_stored_by_decode(
    make: Callable[..., TierNode], node: Callable[..., Node], is_first: bool
) -> None:
    prefill, decode = make(), make(DECODE_FILLING)
    prefill.compute_alone(OTHER)
    assert prefill.settles()
    params = prefill.prefilled(num_tokens=PROMPT + BLOCK_SIZE)
    assert PREFILL_ID in prefill.received
    local = decode.asked(params, num_tokens=PROMPT + BLOCK_SIZE)
    decode.receives(local, prefill, end=PROMPT + BLOCK_SIZE - 1)
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    prefill.rest(decode)
    decode.starts(LATER)
    assert decode.settles()
