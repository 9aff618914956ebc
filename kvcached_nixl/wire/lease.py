# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: decode tells prefill which of its requests are still wanted. vLLM's own words (vllm#41383, vLLM 0.22).

HB:id,id,...   ids as prefill's engine knows them; a prefill that does not know one passes it by
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.push import Malformed

__all__ = [
    "EXTENSION",
    "INTERVAL",
    "MOST_BEAT_BYTES",
    "Beats",
    "beats",
    "is_beat",
    "is_nameable",
    "read_beat",
]

Beats: TypeAlias = list[tuple[RemotePrefill, list[PrefillRequestId]]]
"""Requests to renew, and where."""

INTERVAL, EXTENSION = 1 / 6, 2 / 3
"""Of a lease: between two beats, and what a lease lasts from a beat on, at least. vLLM's own proportions."""

MOST_BEAT_BYTES = 4096
"""No beat is larger. About eighty of vLLM's ids fit."""

_BEAT = b"HB:"


def is_nameable(request_id: str) -> bool:
    """Whether a beat can name this request: a client's ``X-Request-Id``, which becomes part of it, may hold a comma."""
    if not request_id or "," in request_id:
        return False
    try:
        return len(request_id.encode()) <= MOST_BEAT_BYTES - len(_BEAT)
    except UnicodeEncodeError:
        return False


def beats(request_ids: Iterable[PrefillRequestId]) -> Iterator[bytes]:
    """As few notifications as it takes; an id that is larger than one is left out."""
    names, begin, room = ",".join(request_ids).encode(), 0, MOST_BEAT_BYTES - len(_BEAT)
    while begin < len(names):
        # The comma right behind the last name that fits.
        end = len(names) if len(names) - begin <= room else names.rfind(b",", begin, begin + room + 1)
        if end >= 0:
            yield _BEAT + names[begin:end]
        else:
            end = names.find(b",", begin) % (len(names) + 1)
        begin = end + 1


def is_beat(notification: bytes) -> bool:
    """Whether a NIXL notification is a heartbeat, ours or a stock decode's."""
    return notification.startswith(_BEAT)


def read_beat(notification: bytes) -> list[PrefillRequestId]:
    """Read a heartbeat.

    Raises:
        Malformed: it is none, or it is not UTF-8.
    """
    if not is_beat(notification):
        raise Malformed(f"found {notification[:16]!r}; expected it to start with {_BEAT!r}")
    try:
        names = notification[len(_BEAT) :].decode().split(",")
    except UnicodeDecodeError as cause:
        raise Malformed(str(cause)) from cause
    return [PrefillRequestId(name) for name in names if name]
