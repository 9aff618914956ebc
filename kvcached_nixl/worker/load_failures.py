# SPDX-License-Identifier: Apache-2.0
"""A receive that failed is reported with every block it left unwritten, and ends.

The stock worker reports a failed receive in two places: the request's id (it is done waiting) and the block ids
that hold no KV. For engines with several KV-cache groups it leaves the second out, so the request goes on with
whatever its blocks held and the client gets HTTP 200 with wrong tokens (vllm#52234).

On vLLM <= 0.21 both places are plain sets, filled by the handshake thread while the engine's thread swaps and clears
them, so an entry that falls in between is lost; and an id whose peer was never registered raises ``KeyError`` in
``get_finished``, which ends the engine. There, :class:`FailedReceives` takes the set's place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it backs no token, and every request with a sliding window holds it."""


class ReceivingWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

    failed_receives: set[str]

    def receiving_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...
    def end_receive(self, request_id: str) -> None: ...
    def report_invalid_blocks(self, block_ids: set[int]) -> None: ...


def report_unwritten(worker: ReceivingWorker, request_id: str) -> bool:
    """Report the blocks of all groups of a request whose receive failed.

    Returns:
        Whether a request waits for them. A receive without blocks only tells prefill to free what it holds; its
        request has ended, and reporting it as received would end the engine.
    """
    block_ids = worker.receiving_block_ids(request_id)
    if not any(block_ids):
        worker.end_receive(request_id)
        return False
    worker.report_invalid_blocks(unwritten_blocks(block_ids))
    return True


def end_failed_receives(worker: ReceivingWorker) -> set[str]:
    """vLLM <= 0.21, on the engine's thread: end the receives that failed before a transfer was posted, blocks first.

    Returns:
        Their request ids, to be reported as done waiting.
    """
    if not isinstance(worker.failed_receives, FailedReceives):
        worker.failed_receives = FailedReceives(worker.failed_receives)
    failed = {request_id for request_id in worker.failed_receives.take() if report_unwritten(worker, request_id)}
    for request_id in failed:
        worker.end_receive(request_id)
    return failed


def unwritten_blocks(local_block_ids: Sequence[Collection[int]]) -> set[int]:
    """Block ids of all groups that a failed receive left unwritten; the placeholder is not one of them."""
    return {block_id for group in local_block_ids for block_id in group} - {NULL_BLOCK_ID}


class FailedReceives(set[str]):
    """In place of the worker's set of failed request ids: it looks empty to the stock code, and loses nothing.

    Threads: :meth:`add` may be called by any thread, :meth:`take` by the engine's thread only.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        super().__init__()
        self._inbox = deque(known)

    def add(self, request_id: str) -> None:
        self._inbox.append(request_id)

    def take(self) -> Iterator[str]:
        """The ids that arrived since the last call, each once."""
        while self._inbox:
            yield self._inbox.popleft()
