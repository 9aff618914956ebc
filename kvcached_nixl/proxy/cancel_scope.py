# SPDX-License-Identifier: Apache-2.0
"""Ends what a task waits for, from outside: on a time limit, or because of another leg."""

from __future__ import annotations

import math
from types import TracebackType

import anyio

__all__ = ["Guard"]


class Guard:
    """A ``with`` block that a time limit, or a callback of the same event loop, can end with an exception.

    Create and enter it in the task that it shall end. anyio's scopes are level-triggered: of two guards that end in
    one tick, the outer one still ends its block.
    """

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._failure: Exception | None = None
        self._late: Exception | None = None

    def __enter__(self) -> Guard:
        self._scope.__enter__()
        return self

    def limit(self, seconds: float, late: Exception) -> None:
        """End the block with ``late``, unless it is left or `limit` is called again within ``seconds``."""
        self._late = late
        self._scope.deadline = anyio.current_time() + seconds

    def unlimited(self) -> None:
        """Take the time limit back."""
        self._scope.deadline = math.inf

    def check(self) -> None:
        """Raise what the block was ended with, if it was. For what must not follow, although it needs not wait."""
        if self._scope.cancel_called and (failure := self._failure or self._late) is not None:
            raise failure

    def end(self, failure: Exception) -> None:
        """End the block with ``failure``, if it is still open. Of several calls the first one counts."""
        if not self._scope.cancel_called:
            self._failure = failure
            self._scope.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        is_swallowed = self._scope.__exit__(kind, error, trace)
        failure = self._failure or self._late
        if self._scope.cancelled_caught and failure is not None:
            raise failure from None
        return is_swallowed
