# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP with two limits that it lacks: how long the head of a request may be, and how long it may take.

uvicorn limits neither where httptools parses, and a connection on which nothing is ever sent stays open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHttp"]

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class BoundedHttp(HttpToolsProtocol):
    """See the module. A connection whose head breaks a limit is closed without an answer."""

    _head_bytes = 0
    _is_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_head and self._head_bytes > MOST_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_head, self._head_bytes = True, 0
        # Closing would wait for a client that does not read.
        self.scope["state"]["abort"] = self.transport.abort
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
