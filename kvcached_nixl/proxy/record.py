# SPDX-License-Identifier: Apache-2.0
"""The result of one request, for the log, the metrics and the web page. Contains no prompt and no key."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.metrics import Metrics
from kvcached_nixl.proxy.tracing import NOT_TRACED, Part

__all__ = ["Record", "Recorder"]

logger = logging.getLogger("kvcached_nixl.proxy.requests")

SHOWN_ON_PAGE = 50
MEAN_OF = 64


@dataclass
class Record:
    """Filled in while the request is served.

    Attributes:
        begun: ``time.perf_counter`` in seconds, for durations.
        at: ``time.time`` in seconds.
        first_seconds: from ``begun`` until the client had the first piece.
        on_first: called when the client has the first piece.
        trace: the request's span.
    """

    request_id: str
    client_id: str
    route: str
    begun: float = field(default_factory=time.perf_counter)
    at: float = field(default_factory=time.time)
    direction: str = ""
    alone: str = ""
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    first_seconds: float | None = None
    status: int = 0
    sent_bytes: int = 0
    outcome: str = "ok"
    reason: str = ""
    on_first: Callable[[], None] | None = None
    trace: Part = NOT_TRACED

    def asked(self, asked: Asked) -> None:
        self.prompt_tokens = asked.prompt_tokens

    def first(self) -> None:
        """Called when the first piece is sent to the client."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.begun
        if self.on_first is not None:
            self.on_first()


class Recorder:
    """Counts and logs finished requests, and keeps the last ones for the page. Once per process."""

    def __init__(self, metrics: Metrics, *, as_json: bool) -> None:
        self._metrics = metrics
        self._as_json = as_json
        self._latest: deque[dict[str, Any]] = deque(maxlen=SHOWN_ON_PAGE)
        self._mean_seconds = 1.0

    def ended(self, record: Record) -> None:
        """Count and log a finished request, and keep it for the page."""
        seconds = time.perf_counter() - record.begun
        self._metrics.ended(record.route, record.outcome)
        if record.outcome == "ok":
            self._mean_seconds += (seconds - self._mean_seconds) / MEAN_OF
            self._metrics.request_seconds.labels(record.route).observe(seconds)
            if record.first_seconds is not None:
                self._metrics.first_seconds.labels(record.route).observe(record.first_seconds)
            self._metrics.handovers.labels(record.direction or "none").inc()
        line = {
            "time": round(record.at, 3),
            "id": record.request_id,
            "client_id": record.client_id,
            "route": record.route,
            "status": record.status,
            "outcome": record.outcome,
            "direction": record.direction,
            "alone": record.alone,
            "prefill": record.prefill,
            "decode": record.decode,
            "attempts": record.attempts,
            "prompt_tokens_about": record.prompt_tokens,
            "first_ms": None if record.first_seconds is None else round(record.first_seconds * 1000, 2),
            "ms": round(seconds * 1000, 2),
            "bytes": record.sent_bytes,
            "reason": record.reason,
        }
        self._latest.appendleft(line)
        if logger.isEnabledFor(logging.INFO):
            if self._as_json:
                logger.info("%s", msgspec.json.encode(line).decode())
            else:
                logger.info(
                    "%s", " ".join(f"{key}={_plain(value)}" for key, value in line.items() if value not in ("", None))
                )

    def seconds_until_one_ends(self, in_flight: int) -> int:
        """Returns when one of the requests in flight will have ended, judged by the latest ones; at least a second."""
        return max(1, math.ceil(self._mean_seconds / max(1, in_flight)))

    def latest(self) -> list[dict[str, Any]]:
        """Returns the last requests, newest first."""
        return list(self._latest)


def _plain(value: object) -> str:
    # A client's text, such as its id, must not contain a line end: it could forge a log line.
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)
