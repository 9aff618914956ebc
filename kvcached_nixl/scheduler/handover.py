# SPDX-License-Identifier: Apache-2.0
"""A hand-over on the engine's side: decode's part and prefill's, between vLLM's scheduler and the workers.

Once per engine, on its thread, but for `woken`. Whatever has changed goes to the workers with the next step, and what
they report comes back with a step's output; between steps the engine sleeps until something has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvcached_nixl.clock import Clock
from kvcached_nixl.scheduler.engine import Blocks, Progress, Request
from kvcached_nixl.scheduler.fetching import Fetching
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.offering import Offering
from kvcached_nixl.scheduler.wish import Terms
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import Cause
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import FAILING, BlockIds, Reports, Step, failure_of, overs_of, quiets_of

__all__ = ["HandOver"]

logger = logging.getLogger(SERVER_LOGGER)


class Listener(Protocol):
    def close(self) -> None: ...


class HandOver:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        start: 16 hexadecimal digits, drawn when this engine started.
        wake_key: by which the side channel knows a word of this engine's own workers.
    """

    def __init__(self, own: RemotePrefill, start: str, wake_key: str, terms: Terms, clock: Clock) -> None:
        self.own = own
        self.start = start
        self.wake_key = wake_key
        self._drops_blocks = terms.drops_blocks
        self._timeout_seconds = terms.timeout_seconds
        self._clock = clock
        self._holds = Holds()
        self._fetching = Fetching(terms, clock, self._holds)
        self._offering = Offering(own, start, terms, self._holds)
        self._step = self._new_step()
        self._quarantined = 0
        self._has_news = False
        self._blocks: Blocks | None = None
        self._wake: Callable[[], None] | None = None
        self._failed: set[str] = set()
        self._stalled: tuple[str, float] | None = None
        self._listener: Listener | None = None

    # ------------------------------------------------------------------------------------------------ the engine's loop

    def bind(self, blocks: Blocks) -> None:
        """Whose blocks these are; before the first request."""
        if self._blocks is None:
            self._blocks = blocks

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """How to end the engine's sleep, from any thread."""
        self._wake = wake

    def learn(self, *, is_staged: bool) -> None:
        """Whether the workers stage KV; when they have registered their memory."""
        self._offering.is_read_early |= is_staged

    def listen(self, listener: Listener) -> None:
        """The side channel answers; until `close`."""
        self.close()
        self._listener = listener

    def close(self) -> None:
        """The engine ends."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def woken(self) -> None:
        """A worker has something to tell. Any thread."""
        self._has_news = True
        if self._wake is not None:
            self._wake()

    @property
    def pending(self) -> bool:
        """Whether the engine has to step with nothing to compute: the workers have news, or are to be told some.

        vllm#45168: an engine that sleeps hears nothing and frees nothing.
        """
        is_counted = self._fetching.num_quarantined_blocks == self._quarantined
        return self._has_news or self._fetching.has_news or self._step.has_news or not is_counted

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV and nothing else."""
        return self._fetching.num_waiting

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks vLLM keeps for us."""
        return self._offering.num_kept

    @property
    def due_in_seconds(self) -> float | None:
        """Until a hand-over has waited for too long; None if none waits."""
        due_at = self._fetching.due_at_seconds
        return None if due_at is None else max(0.0, due_at - self._clock.now_seconds())

    # ------------------------------------------------------------------------------------------------- what vLLM asks

    def arrived(self, request: Request) -> None:
        """A request has entered the engine."""
        self._fetching.arrived(request, self._step)
        self._offering.arrived(request, self._step)

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that prefill has beyond those decode has, and whether they come between steps."""
        return self._fetching.matched(request, num_computed_tokens, self._step)

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks: all of its prompt's for decode."""
        self._fetching.allocated(request, block_ids, num_external_tokens, self._step)

    def take_step(self, progress: Iterable[Progress]) -> Step:
        """What the workers have to know, once, with what is computed in the step that is being built."""
        self._offering.scheduled(progress, self._bound(), self._step)
        self._has_news = False
        step, self._step = self._step, self._new_step()
        step.counts = {**self._fetching.counts}
        for cause, count in self._offering.counts.items():
            step.counts[cause] = step.counts.get(cause, 0) + count
        self._fetching.counts.clear()
        self._offering.counts.clear()
        quarantined = self._fetching.num_quarantined_blocks
        if quarantined != self._quarantined:
            step.quarantined_blocks = self._quarantined = quarantined
        return step

    def spares(self, request_id: str) -> bool:
        """Whether a request that ends must keep every block until `finished` is asked, out of its window or not."""
        if not self._drops_blocks:
            return False
        return self._fetching.is_waiting(request_id) or self._offering.is_named(request_id)

    def preempted(self, request_id: str) -> None:
        """A request loses its blocks; where they may be read, they are held."""
        if self._offering.is_read(request_id):
            self._offering.preempted(request_id, self._bound(), self._step)

    def finished(self, request: Request, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its prompt was computed to the end.

        Returns: whether its blocks must be kept until `collect` names it, and the parameters for decode's request.
        """
        self._fetching.finished(request, self._bound(), self._step)
        return self._offering.finished(request, is_whole, block_ids, self._bound(), self._step)

    def collect(self, reports: Reports) -> None:
        """What all ranks have reported: takes our ids and marks out, and puts in the requests that they mean."""
        failures = [found for mark in reports.invalid if (found := failure_of(mark)) is not None]
        reports.invalid = {block_id for block_id in reports.invalid if failure_of(block_id) is None}
        overs, blocks = overs_of(reports.received), self._bound()
        received, failed = self._fetching.collect(failures, overs, blocks, self._step)
        reports.received |= received
        self._failed |= failed
        if failed:
            reports.invalid.add(FAILING)
        quiet = quiets_of(reports.sent)
        self._offering.ended(reports.sent, quiet, blocks)

    def take_starved(self) -> set[str]:
        """A request that has waited for blocks for too long, where nothing but a quarantine can free any (rule R4).

        It may be anybody's, and those behind it in the queue wait for it.
        """
        may_stall = self._fetching.num_quarantined_blocks and not (self.num_waiting or self.num_kept)
        request_id = self._bound().stalled if may_stall else None
        if request_id is None:
            self._stalled = None
            return set()
        now = self._clock.now_seconds()
        if self._stalled is None or self._stalled[0] != request_id:
            self._stalled = request_id, now
        if now < self._stalled[1] + self._timeout_seconds:
            return set()
        self._stalled = None
        self._fetching.counts[Cause.QUARANTINE] += 1
        logger.warning(
            "Request %s fails: it has waited %g s for blocks, nothing else runs, and %d blocks are in quarantine for "
            "peers that are not heard of and may still write. Those of other hosts are kept from it within about two "
            "minutes and their blocks are free then; one of this host that stands still has to go on or to end.",
            request_id,
            self._timeout_seconds,
            self._fetching.num_quarantined_blocks,
        )
        return {request_id}

    def take_failed(self) -> set[str]:
        """Requests whose KV has not come, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _bound(self) -> Blocks:
        assert self._blocks is not None, "no request has entered the engine"
        return self._blocks

    def _new_step(self) -> Step:
        return Step(self.own.host, self.own.port, self.wake_key, self.start)
