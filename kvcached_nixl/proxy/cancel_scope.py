# SPDX-License-Identifier: Apache-2.0
"""Cancels what a task waits for, from outside: on a time limit, a dead server, or a client that disconnected."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

__all__ = ["Guard"]


class Guard:
    """A ``with`` block that another callback of the same event loop can end with any exception.

    Create and enter it in the task that it shall end. One timer checks the deadline. Moving the deadline to a later
    time does not restart the timer and costs an assignment only, so it may be done for every piece of a stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a Guard must be created in a task"
        self._task: asyncio.Task[object] = task
        self._failure: Exception | None = None
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_seconds = float("inf")
        self._late: Exception | None = None

    def __enter__(self) -> Guard:
        self._is_open = True
        return self

    def limit(self, seconds: float, late: Exception) -> None:
        """End the block with ``late``, unless it is left or `limit` is called again within ``seconds``."""
        self._deadline_seconds = deadline = self._loop.time() + seconds
        self._late = late
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._look)

    def end(self, failure: Exception) -> None:
        """End the block with ``failure``, if it is still open. Of several calls the first one counts."""
        if self._is_open and self._failure is None:
            self._failure = failure
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._failure is None:
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is None or issubclass(kind, asyncio.CancelledError):
            raise self._failure from None

    def _look(self) -> None:
        self._timer = None
        if not self._is_open:
            return
        if self._loop.time() < self._deadline_seconds:
            self._timer = self._loop.call_at(self._deadline_seconds, self._look)
        elif self._late is not None:
            self.end(self._late)
