# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: decode tells prefill which requests it still waits for. vLLM's own format (vllm#41383).

HB:name,name,...   prefill's request ids, or names of transfers; prefill ignores names that it does not know
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcached_nixl.wire.checked import Malformed

__all__ = [
    "EXTENSION",
    "INTERVAL",
    "MAX_HEARTBEAT_BYTES",
    "heartbeats",
    "is_heartbeat",
    "is_nameable",
    "read_heartbeat",
]

INTERVAL, EXTENSION = 1 / 6, 2 / 3
"""Fractions of a lease: the time between two heartbeats, and how long a lease lasts at least after one. As in vLLM."""

MAX_HEARTBEAT_BYTES = 4096
"""Largest heartbeat. About eighty of vLLM's request ids fit into it."""

_PREFIX = b"HB:"


def is_nameable(name: str) -> bool:
    """Whether a heartbeat can name this request: its id contains the client's ``X-Request-Id``, perhaps with commas."""
    if not name or "," in name:
        return False
    try:
        return len(name.encode()) <= MAX_HEARTBEAT_BYTES - len(_PREFIX)
    except UnicodeEncodeError:
        return False


def heartbeats(names: Iterable[str]) -> Iterator[bytes]:
    """Encodes the names in as few notifications as possible; a name that does not fit into one is left out."""
    joined, begin, room = ",".join(names).encode(), 0, MAX_HEARTBEAT_BYTES - len(_PREFIX)
    while begin < len(joined):
        # The comma after the last name that fits.
        end = len(joined) if len(joined) - begin <= room else joined.rfind(b",", begin, begin + room + 1)
        if end >= 0:
            yield _PREFIX + joined[begin:end]
        else:
            end = joined.find(b",", begin) % (len(joined) + 1)
        begin = end + 1


def is_heartbeat(notification: bytes) -> bool:
    """Whether a NIXL notification is a heartbeat."""
    return notification.startswith(_PREFIX)


def read_heartbeat(notification: bytes) -> list[str]:
    """The names in a heartbeat.

    Raises:
        Malformed: it is not a heartbeat, is larger than `MAX_HEARTBEAT_BYTES`, or is not UTF-8.
    """
    if not is_heartbeat(notification) or len(notification) > MAX_HEARTBEAT_BYTES:
        raise Malformed(f"found {notification[:16]!r} ({len(notification)} bytes); expected a heartbeat of {_PREFIX!r}")
    try:
        names = notification[len(_PREFIX) :].decode().split(",")
    except UnicodeDecodeError as error:
        raise Malformed(str(error)) from error
    return [name for name in names if name]
