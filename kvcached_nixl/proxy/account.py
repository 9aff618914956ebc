# SPDX-License-Identifier: Apache-2.0
"""What the router may use in all: memory, connections and descriptors. Once per process."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.failure import RETRY_SECONDS, Refusal, RouterFailure
from kvcached_nixl.proxy.options import Options

__all__ = ["Account", "Share", "fit_descriptors"]

logger = logging.getLogger("kvcached_nixl.proxy")

REQUEST_BYTES = 512 << 10
"""Of buffers that a request may fill beside its bodies: read ahead from two servers, not yet written to three peers."""
OTHER_DESCRIPTORS = 96
"""Of the interpreter, log, listening sockets, health checks, and connections that are accepted to be refused."""
PER_REQUEST = 2
"""Connections to servers that a request has at once."""


class Share:
    """What one request has taken of an `Account`."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserve more memory; a negative size gives some back.

        Raises:
            Refusal: the limit would be exceeded. The client may try again.
        """
        self._account.take(size_bytes)
        self.taken_bytes += size_bytes


class Account:
    """Limits the memory of all connections and requests together: heads, bodies, responses, and buffers."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """See `Share.take`."""
        if size_bytes > 0 and self.taken_bytes + size_bytes > self._limit_bytes:
            raise Refusal(
                429,
                RouterFailure.BUSY,
                f"No memory is left for the request now (--max-memory-bytes {self._limit_bytes}). Try again.",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.taken_bytes += size_bytes

    def hold(self, size_bytes: int) -> None:
        """Count memory that is in use already, or, with a negative size, is not any more."""
        self.taken_bytes += size_bytes

    @property
    def is_overdrawn(self) -> bool:
        return self.taken_bytes > self._limit_bytes

    @contextmanager
    def share(self, least_bytes: int) -> Iterator[Share]:
        """One request's share, at first ``least_bytes``; leaving the block gives all of it back.

        Raises:
            Refusal: not even that is left.
        """
        share = Share(self)
        share.take(least_bytes)
        try:
            yield share
        finally:
            self.taken_bytes -= share.taken_bytes


def fit_descriptors(options: Options) -> Options:
    """Raise the soft limit of open files as far as allowed, and return options whose limits fit it.

    Raises:
        SettingsError: not even one request could be served.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.max_connections + PER_REQUEST * options.max_inflight + OTHER_DESCRIPTORS
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return options
    inflight = (soft - OTHER_DESCRIPTORS) // (PER_REQUEST + 2)
    if inflight < 1:
        raise SettingsError(
            found=f"a limit of {soft} open files (RLIMIT_NOFILE)",
            expected=f"at least {OTHER_DESCRIPTORS + PER_REQUEST + 2}, and {wanted} for the limits that are set",
            consequence="The router could not serve one request, and does not start.",
            remedy="Raise the limit: ulimit -n, LimitNOFILE= of systemd.",
        )
    inflight = min(inflight, options.max_inflight)
    connections = min(options.max_connections, soft - OTHER_DESCRIPTORS - PER_REQUEST * inflight)
    logger.warning(
        "This process may open %d files, and %d connections with %d requests in flight would need %d. The limits are "
        "now %d connections and %d requests. To have more, raise the hard limit (ulimit -Hn, LimitNOFILE=).",
        soft,
        options.max_connections,
        options.max_inflight,
        wanted,
        connections,
        inflight,
    )
    return replace(options, max_connections=connections, max_inflight=inflight)
