# SPDX-License-Identifier: Apache-2.0
"""Why hand-overs brought no KV: counted, logged once, and told to the client under the same label. One per engine.

The metric, the log line and the client's error carry the cause's label; the last two also carry the attempt and both
requests' ids (`HandOverFailed.tags`). A worker's reason is in the log line only: it may name hosts and ports.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FAILED, STARVED, HandOverFailed

__all__ = ["Failures"]

logger = logging.getLogger(SERVER_LOGGER)


class Failures:
    """Counts and logs failed hand-overs; see the module's docstring. Used on the engine's thread only.

    Attributes:
        counts: failures by `FailureCause` since the last step; `SchedulerFacade.take_step` copies and clears them.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._told: dict[str, str] = {}
        self._ended: dict[str, str] = {}

    def not_received(
        self, request_id: str, failure: HandOverFailed, *, attempt: int | None = None, prefill_request_id: str = ""
    ) -> None:
        """Decode: a request does not get its KV. It fails, or is recomputed here."""
        tags = failure.tags(request_id, attempt=attempt, prefill_request_id=prefill_request_id)
        self.counts[failure.cause] += 1
        self._told[request_id] = f"{FAILED}{tags}"
        logger.warning("%s%s: %s", FAILED, tags, failure)

    def starved(self, request_id: str, failure: HandOverFailed) -> None:
        """A request ends because it never gets blocks, whether it is a hand-over or not."""
        self.counts[failure.cause] += 1
        told = self._told[request_id] = f"{STARVED}{failure.tags(request_id)}: {failure}"
        logger.warning("%s", told)

    def not_offered(self, request_id: str, failure: HandOverFailed) -> None:
        """Prefill: a request's KV is not offered to decode. The request is computed all the same."""
        self.counts[failure.cause] += 1
        logger.warning("KV is not offered: %s: %s", failure.tags(prefill_request_id=request_id), failure)

    def computed(self, request_id: str) -> None:
        """The request is computed here instead: how it ends has nothing to do with the hand-over."""
        self._told.pop(request_id, None)

    def request_ended(self, request_id: str) -> None:
        """A request has ended. If its hand-over had failed, or it has starved, its client is to be told."""
        told = self._told.pop(request_id, None)
        if told is not None:
            self._ended[request_id] = told

    def take_ended(self) -> dict[str, str]:
        """Requests that ended without KV since the last call -> the message for their clients."""
        ended, self._ended = self._ended, {}
        return ended
