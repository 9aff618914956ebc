# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.tier` with stand-ins for vLLM's OffloadingConnector and its block pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.clocks import ManualClock

from kvcached_nixl.vllm.patches.tier import LONGEST_SECONDS, Tier, tier_of

BLOCKS = [SimpleNamespace(block_id=number) for number in range(6)]


def job(request_id: str, *block_ids: int, num_workers: int = 1, is_store: bool = True) -> Any:
    return SimpleNamespace(
        req_id=request_id, pending_count=num_workers, is_store=is_store, deferred_fence_block_ids=list(block_ids)
    )


class OffloadingWorkerMetadata(SimpleNamespace):
    """vLLM's."""


def done(*numbers: int) -> Any:
    """What a ``MultiConnector`` reports of them, and of jobs of another connector's."""
    told, other = OffloadingWorkerMetadata(), SimpleNamespace(completed_jobs={0: 5, 1: 5})
    told.completed_jobs = dict.fromkeys(numbers, 1)
    return SimpleNamespace(metadata=(None, other, told))


class Engine:
    """A tier over a pool. ``freed``: the ids of the blocks that came back."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.jobs: dict[int, Any] = {}
        self.statuses: dict[str, Any] = {}
        self.num_resets = 0
        self.clock = ManualClock()
        self.pool = SimpleNamespace(free_blocks=lambda blocks: self.freed.extend(one.block_id for one in blocks))
        self.flushed: set[int] = set()
        scheduler = SimpleNamespace(
            _jobs=self.jobs, _req_status=self.statuses, _current_batch_jobs_to_flush=self.flushed
        )
        self.connector = SimpleNamespace(
            connector_scheduler=scheduler, reset_cache=self.reset, get_num_new_matched_tokens=lambda *_: (32, True)
        )
        self.tier = Tier(self.connector, self.pool, self.clock)

    def reset(self) -> None:
        assert not self.flushed
        self.num_resets += 1
        self.flushed.update(self.jobs)
        self.jobs.clear()

    def starts(self, request_id: str, num_computed_tokens: int = 1, *block_ids: int) -> Any:
        groups = [SimpleNamespace(offload_keys=[b"key"], block_ids=list(block_ids))]
        request = SimpleNamespace(num_computed_tokens=num_computed_tokens)
        self.statuses[request_id] = SimpleNamespace(req=request, max_offload_tokens=None, group_states=groups)
        return self.statuses[request_id]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_blocks_are_freed_when_no_job_reads_them(engine: Engine) -> None:
    """One block is read by two jobs, another one by none."""
    engine.jobs |= {0: job("a", 1, 2), 1: job("b", 2, 3)}
    engine.pool.free_blocks(reversed(BLOCKS[1:5]))
    assert engine.freed == [4] and engine.tier.is_copying
    engine.tier.ended(done(0))
    assert engine.freed == [4, 1]
    engine.tier.ended(done(1))
    assert engine.freed == [4, 1, 3, 2] and not engine.tier.is_copying


def test_every_worker_has_to_end_a_job_and_a_job_counts_once(engine: Engine) -> None:
    """vLLM forgets an ended job only after this package has seen the report."""
    engine.jobs[0] = job("a", 1, num_workers=2)
    engine.pool.free_blocks([BLOCKS[1]])
    engine.tier.ended(done(0))
    assert not engine.freed
    engine.tier.ended(done(0))
    assert engine.freed == [1] and not engine.tier.is_copying


def test_what_vllm_forgets_is_still_in_flight(engine: Engine) -> None:
    engine.jobs[0] = job("a", 1)
    engine.tier.forget()
    assert engine.num_resets == 1 and not engine.jobs and engine.tier.is_copying
    engine.pool.free_blocks([BLOCKS[1]])
    engine.tier.ended(None)
    assert not engine.freed
    engine.tier.ended(done(0))
    assert engine.freed == [1]


def test_a_report_of_a_job_that_was_never_seen_is_passed_over(engine: Engine) -> None:
    """One that a reset has forgotten in the step that made it, and that reads no blocks."""
    engine.tier.ended(done(7))
    assert not engine.tier.is_copying


def test_requests_that_had_begun_store_nothing_under_the_hashes_of_before(engine: Engine) -> None:
    """One that has blocks may have lost its tokens to a load that has failed."""
    found = engine.starts("a"), engine.starts("b", 0, 3), engine.starts("c", 0)
    engine.tier.forget()
    assert [one.max_offload_tokens for one in found] == [0, 0, None]
    assert not any(one.group_states[0].offload_keys for one in found)


def test_a_streaming_session_is_neither_stored_nor_loaded(engine: Engine) -> None:
    one, other = engine.starts("a"), engine.starts("b")
    match = engine.connector.get_num_new_matched_tokens
    assert match(SimpleNamespace(request_id="a", resumable=True), 0) == (0, False)
    assert match(SimpleNamespace(request_id="b", resumable=False), 0) == (32, True)
    assert (one.max_offload_tokens, other.max_offload_tokens) == (0, None)


def test_what_workers_are_to_end_is_kept_until_they_are_told(engine: Engine) -> None:
    """vLLM resets its cache by itself, too."""
    engine.jobs[0] = job("a", 1)
    engine.tier.forget()
    engine.jobs[1] = job("b", 2)
    engine.connector.reset_cache()
    engine.tier.forget()
    assert engine.flushed == {0, 1} and engine.num_resets == 3 and engine.tier.is_copying


def test_nothing_is_stored_of_a_request_that_has_ended(engine: Engine) -> None:
    one = engine.starts("a")
    engine.tier.finished("a")
    engine.tier.finished("unknown")
    assert one.max_offload_tokens == 0


def test_requests_that_have_loaded_are_named_until_they_end(engine: Engine) -> None:
    engine.jobs |= {0: job("a", is_store=False), 1: job("b", 1)}
    assert engine.tier.forget() == engine.tier.forget() == {"a"}
    engine.tier.finished("a")
    assert not engine.tier.forget()


def test_a_job_that_does_not_end_ends_the_engine(engine: Engine) -> None:
    """A process that stood still has not waited."""
    engine.jobs[0] = job("a", 1)
    engine.clock.advance(10 * LONGEST_SECONDS)
    engine.tier.ended(None)
    for _ in range(int(LONGEST_SECONDS) - 2):
        engine.clock.advance(1.0)
        engine.tier.ended(None)
    engine.clock.advance(1.0)
    engine.tier.ended(None)
    engine.clock.advance(1.0)
    with pytest.raises(RuntimeError, match="has not copied blocks in 120 s"):
        engine.tier.ended(None)


def test_a_long_row_of_jobs_does_not_end_the_engine_but_one_that_others_pass_does(engine: Engine) -> None:
    engine.jobs |= {number: job("a", 1) for number in range(400)}
    for number in range(200):
        for _ in range(2 if number else 1):
            engine.clock.advance(1.0)
            engine.tier.ended(None)
        engine.tier.ended(done(number))
    with pytest.raises(RuntimeError, match="has not copied blocks in 120 s"):
        for number in range(201, 400):
            engine.clock.advance(1.0)
            engine.tier.ended(done(number))
    assert number == 200 + LONGEST_SECONDS + 1


def test_an_engine_without_our_connector_is_left_alone() -> None:
    offloading = type("OffloadingConnector", (), {"__module__": "vllm.distributed.kv_transfer.kv_connector.v1.of"})
    assert tier_of(SimpleNamespace(connector=None)) is None
    assert tier_of(SimpleNamespace(connector=offloading())) is None
