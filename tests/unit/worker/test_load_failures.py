# SPDX-License-Identifier: Apache-2.0
"""worker/load_failures.py: no failed receive goes on as if it had succeeded."""

from __future__ import annotations

import threading

from kvcached_nixl.worker.load_failures import FailedReceives, end_failed_receives, unwritten_blocks


def test_blocks_of_all_groups_are_unwritten_and_the_placeholder_is_not() -> None:
    """vllm#52234: the blocks of every group are named; block 0 belongs to all requests."""
    assert unwritten_blocks(([0, 0, 7], [3, 4], [])) == {3, 4, 7}


def test_a_failure_of_another_thread_is_taken_once_and_the_stock_code_sees_an_empty_set() -> None:
    """The stock loop over the set would raise for a peer that was never registered."""
    failures = FailedReceives()
    thread = threading.Thread(target=failures.add, args=("r1",))
    thread.start()
    thread.join()
    assert set(failures) == set()
    assert list(failures.take()) == ["r1"]
    assert list(failures.take()) == []


def test_a_failure_that_arrives_between_read_and_clear_is_not_lost() -> None:
    """The stock worker reads its set and then clears it; an id added in between is taken next time."""
    failures = FailedReceives()
    received = {"other"}
    received.update(failures)
    failures.add("late")
    failures.clear()
    assert received == {"other"}
    assert list(failures.take()) == ["late"]


class Worker:
    """The stock worker as far as failed receives go."""

    def __init__(self) -> None:
        self.failed_receives: set[str] = {"early"}
        self.receiving = {"early": ([1], [2]), "late": ([3, 0], [4])}
        self.invalid: list[set[int]] = []

    def receiving_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.receiving.get(request_id, ())

    def end_receive(self, request_id: str) -> None:
        self.receiving.pop(request_id, None)

    def report_invalid_blocks(self, block_ids: set[int]) -> None:
        self.invalid.append(block_ids)


def test_failed_receives_end_with_their_blocks_reported() -> None:
    """Also those that failed before the set was replaced; a second call has nothing to end."""
    worker = Worker()
    assert end_failed_receives(worker) == {"early"}
    worker.failed_receives.add("late")
    assert end_failed_receives(worker) == {"late"}
    assert worker.invalid == [{1, 2}, {3, 4}]
    assert worker.receiving == {}
    assert end_failed_receives(worker) == set()


def test_a_notice_without_blocks_is_no_failed_receive() -> None:
    """Its request has ended; reported as received it would end the engine (``assert req_id in self.requests``)."""
    worker = Worker()
    worker.failed_receives = {"notice"}
    worker.receiving = {"notice": ()}
    assert end_failed_receives(worker) == set()
    assert worker.invalid == []
    assert worker.receiving == {}
