# SPDX-License-Identifier: Apache-2.0
"""Why a hand-over brought no KV: the label of the metric, and the number that workers report to their scheduler."""

from __future__ import annotations

import re
from enum import IntEnum

MAX_SHOWN = 200
"""Characters of an id that a log line shows."""


class FailureCause(IntEnum):
    """The numbers cross between processes, so add new causes at the end. The lower-case name is the metric's label."""

    PARAMETERS = 0
    """``kv_transfer_params`` have a wrong type, an impossible value or a contradiction."""
    NO_MANIFEST = 1
    """``kv_transfer_params`` lack the manifest that prefill's answer had."""
    DIGEST = 2
    """Prefill computed another prompt than decode has."""
    RANGE = 3
    """The tokens or blocks of the two sides do not match."""
    RESTARTED = 4
    """Prefill has been restarted, or its weights were changed, since it made the parameters."""
    REFUSED = 5
    """The handshake found another model, layout or version, or no such rank."""
    UNREACHABLE = 6
    """No handshake took place: nothing listens at the peer's address, or it does not answer."""
    LOST = 7
    """A transfer failed, or the peer is dead or was cut off."""
    LEASE = 8
    """Prefill no longer keeps the blocks."""
    STOPPED = 9
    """Prefill's request ended before its KV was handed over."""
    DEADLINE = 10
    """The hand-over did not end within its timeout."""
    PROTOCOL = 11
    """The peer violated the protocol."""
    DEFECT = 12
    """An unexpected exception in kvcached_nixl, which fails only this hand-over."""
    QUARANTINE = 13
    """The blocks that the request needs are in quarantine, and nothing else would free enough."""
    CHECKSUM = 14
    """The KV that arrived is not what prefill sent (``verify_fraction``)."""
    REVOKED = 15
    """One side has revoked it: it was paused, put to sleep or shut down, or its weights were changed."""
    MEDIA = 16
    """Decode's request lacks the images, sounds, ... that prefill's has, so decode must not compute it either."""
    NO_BLOCKS = 17
    """The request needs more blocks than the engine can ever give it now."""
    QUEUE_TIMEOUT = 18
    """The request has waited too long for its turn to be asked for (``queue_timeout``)."""

    @property
    def label(self) -> str:
        return self.name.lower()


class RevocationCause(IntEnum):
    """Why prefill takes an offer back. As for `FailureCause`: add new causes at the end; the name is a label."""

    WEIGHTS = 0
    """The weights or an adapter were changed."""
    PAUSED = 1
    """The engine is paused, put to sleep or shut down."""
    CLEARED = 2
    """Its cache is cleared."""
    STATES = 3
    """The states of its layers are about to be overwritten."""
    BLOCKS = 4
    """A request of the same engine waits for blocks."""
    LIMIT = 5
    """The engine uses more memory than kvcached's limit allows."""
    NEIGHBOUR = 6
    """Another engine on the device waits for memory."""

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def is_of_memory(self) -> bool:
        """Whether the offer gives way to others, so that only one that nobody reads is taken back."""
        return self >= RevocationCause.BLOCKS


FAILED = "KV hand-over failed: "
"""What a client and decode's log say in front of `HandOverFailed.tags`."""
STARVED = "KV memory is short: "
"""The same, for a request that never gets blocks, whether it is a hand-over or not."""


class HandOverFailed(Exception):
    """One hand-over brings no KV. ``cause`` is counted; the text is logged with the request.

    ``retry_after_seconds``: when the client may try again; 0 if it is not told.
    """

    def __init__(self, cause: FailureCause, reason: str, *, retry_after_seconds: int = 0) -> None:
        super().__init__(reason)
        self.cause = cause
        self._retry_after_seconds = retry_after_seconds

    def tags(self, request_id: str = "", *, attempt: int | None = None, prefill_request_id: str = "") -> str:
        """The fields that every log line about one failure has, in both engines. Each id is the one inside its engine,
        ``request_id`` decode's; unknown ids are left out."""
        shown = f"cause={self.cause.label}"
        ids = {"attempt": attempt, "request": request_id, "prefill_request": prefill_request_id}
        for key, one in ({"retry_after": self._retry_after_seconds or None} | ids).items():
            if one not in (None, ""):
                # A client chooses its id: it must neither start a new log line nor end its field.
                plain = re.sub(r"[^!-~]|[\"'\\\\]", "?", str(one)[:MAX_SHOWN])
                shown += f" {key}={plain}"
        return shown
