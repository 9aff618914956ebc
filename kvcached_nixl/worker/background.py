# SPDX-License-Identifier: Apache-2.0
"""Work on the KV cache's memory, off the engine's thread and off the transfer thread. A thread of its own.

The thread selects the device before anything else. Pieces are done in the order in which they were asked for; on an
accelerator in a stream of the thread's own, whose end is waited for; on a CPU it is torch that works, which lets go of
Python's lock.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvcached_nixl.current_device import select
from kvcached_nixl.settings import SERVER_LOGGER

__all__ = ["Background", "Work"]

logger = logging.getLogger(SERVER_LOGGER)

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Work(Generic[Result]):
    """Attributes:
    what: in words.
    do: on the background thread.
    ended: called once by `Background.turn`, with what it came to, None if it failed; and with what went wrong, or "".
    """

    what: str
    do: Callable[[], Result]
    ended: Callable[[Result | None, str], None]


class Background:
    """See the module.

    Args:
        name: of the thread.
        device: where the memory is.
        wake: called on the thread when something has ended; does not block.

    Raises:
        RuntimeError: the device cannot be used.

    Threads: `submit`, `turn` and `close` are one thread's, the transfer thread's.
    """

    def __init__(self, name: str, device: torch.device, wake: Callable[[], None]) -> None:
        self._name = name
        self._is_dropping = False
        self._device = device
        self._wake = wake
        self._asked: queue.SimpleQueue[Work[object] | None] = queue.SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._defect: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # vLLM captures graphs next, and a device's first use elsewhere would spoil one.
        self._is_ready.wait()
        self.turn()

    def __len__(self) -> int:
        """Pieces of work whose ends were not told yet."""
        return self._under_way

    def submit(self, work: Work[Result]) -> None:
        """Do it when what was asked for before is done."""
        self._under_way += 1
        self._asked.put(work)  # type: ignore[arg-type]

    def turn(self) -> None:
        """Tell the ends of what has ended.

        Raises:
            RuntimeError: the thread has ended by a defect: it is not known what is still under way.
        """
        if self._defect is not None:
            raise RuntimeError(f"{self._name} has stopped: {self._defect!r}") from self._defect
        while self._ended:
            tell = self._ended.popleft()
            self._under_way -= 1
            tell()

    def close(self, *, is_dropping: bool = False) -> None:
        """Stop the thread, after what was asked for; ``is_dropping``: after what has begun of it."""
        self._is_dropping = is_dropping
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            stream = self._begun()
            while (work := self._asked.get()) is not None and not self._is_dropping:
                self._ended.append(self._done(work, stream))
                self._wake()
        except BaseException as defect:  # kept for the transfer thread, which raises it
            logger.exception("%s has stopped; the engine stops at its next step", self._name)
            self._defect = defect
            self._is_ready.set()
            self._wake()

    def _begun(self) -> torch.Stream | None:
        """The thread's own stream; None on a CPU."""
        select(self._device.type, self._device.index or 0)
        stream = None if self._device.type == "cpu" else torch.Stream(self._device)
        self._is_ready.set()
        return stream

    @staticmethod
    def _done(work: Work[Result], stream: torch.Stream | None) -> Callable[[], None]:
        result, failed = None, ""
        try:
            with stream or contextlib.nullcontext():
                result = work.do()
        except Exception as defect:
            logger.exception("%s failed", work.what)
            failed = f"{work.what} failed: {type(defect).__name__}: {defect}"
        if stream is not None:
            # What was begun of one that failed is still under way. If its end cannot be seen, nothing may go on.
            stream.synchronize()
        return lambda: work.ended(result, failed)
