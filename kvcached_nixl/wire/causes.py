# SPDX-License-Identifier: Apache-2.0
"""Why a hand-over brought no KV: the label of the metric, and what crosses between a worker and its scheduler."""

from __future__ import annotations

import re
from enum import IntEnum

__all__ = ["FailureCause", "HandOverFailed"]

MAX_SHOWN = 200
"""Characters of an id in a log line."""


class FailureCause(IntEnum):
    """The numbers travel; add at the end. The lower-case name is the metric's label."""

    PARAMETERS = 0
    """kv_transfer_params hold a wrong type, an impossible value or a contradiction."""
    NO_MANIFEST = 1
    """kv_transfer_params do not hold what prefill's answer held."""
    DIGEST = 2
    """Prefill computed another prompt than decode wants."""
    RANGE = 3
    """The tokens or blocks of one side are not those of the other."""
    RESTARTED = 4
    """Prefill has been started again, or its weights were changed, since it made the parameters."""
    REFUSED = 5
    """The handshake: another model, layout or version, or no such rank."""
    UNREACHABLE = 6
    """No handshake: nobody answers, or nobody is there."""
    LOST = 7
    """A transfer failed, or the peer is gone."""
    LEASE = 8
    """Prefill does not keep the blocks any more."""
    STOPPED = 9
    """Prefill's request ended before its KV was handed over."""
    DEADLINE = 10
    """Nothing else ended it in time."""
    PROTOCOL = 11
    """The peer said something that cannot be."""
    DEFECT = 12
    """An exception of our own that only this hand-over pays for."""
    QUARANTINE = 13
    """What it needs is in quarantine, and nothing else would free enough."""
    CHECKSUM = 14
    """What has come is not what prefill sent (``verify_fraction``)."""
    REVOKED = 15
    """One side has taken it back: it was paused, put to sleep or shut down, or its weights were changed."""
    MEDIA = 16
    """Decode's request has not the images, sounds, ... that prefill's has, so it must not be computed here either."""

    @property
    def label(self) -> str:
        return self.name.lower()


class HandOverFailed(Exception):
    """One hand-over brings no KV. ``cause`` is counted, the text is logged with the request."""

    def __init__(self, cause: FailureCause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause

    def tags(self, request_id: str = "", *, attempt: int | None = None, prefill_request_id: str = "") -> str:
        """What every line about one failure has, in either engine and at the router, so that ``grep`` finds them all.

        Args:
            request_id: decode's; ids are in their engine's form. What is not known is left out.
        """
        ids = {"attempt": attempt, "request": request_id, "prefill_request": prefill_request_id}
        known = " ".join(f"{key}={_plain(str(one))}" for key, one in ids.items() if one not in (None, ""))
        return f"cause={self.cause.label} {known}".rstrip()


def _plain(said: str) -> str:
    # A client's id must neither begin a line of its own nor end its field.
    return re.sub(r"[^!-~]|[\"'\\\\]", "?", said[:MAX_SHOWN])
