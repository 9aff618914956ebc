# SPDX-License-Identifier: Apache-2.0
"""A background thread for slow work, such as reading or copying KV memory, off the engine's and the transfer thread.

The thread selects its device first. Work is done in the order in which it was submitted: on an accelerator in a stream
of this thread, which is synchronized after each piece; on a CPU by torch, which releases Python's lock.
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

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import select_device

logger = logging.getLogger(SERVER_LOGGER)

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Work(Generic[Result]):
    """Attributes:
    what: description for log lines.
    do: runs on the background thread.
    ended: called once by `Background.turn`, with the result, None if it failed; and with the reason it failed, or "".
    """

    what: str
    do: Callable[[], Result]
    ended: Callable[[Result | None, str], None]


class Background:
    """See the module. ``wake``: called on the background thread when work has ended; does not block. Raises
    `RuntimeError`: the device cannot be used.

    Threads: `submit`, `turn` and `close` are called by one thread, the transfer thread.
    """

    def __init__(self, name: str, device: torch.device, wake: Callable[[], None]) -> None:
        self._name = name
        self._is_dropping = False
        self._device = device
        self._wake = wake
        self._asked: queue.SimpleQueue[Work[object] | None] = queue.SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._defect: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # vLLM captures graphs next, and another thread's first use of the device would spoil the capture.
        self._is_ready.wait()
        self.turn()

    def submit(self, work: Work[Result]) -> None:
        """Queue work behind all that was submitted before."""
        self._asked.put(work)  # type: ignore[arg-type]

    def turn(self) -> None:
        """Call ``ended`` of the work that has ended. Raises `RuntimeError`: an internal error has stopped the thread,
        so it is not known what the device still does."""
        if self._defect is not None:
            raise RuntimeError(f"{self._name} has stopped: {self._defect!r}") from self._defect
        while self._ended:
            self._ended.popleft()()

    def close(self, *, is_dropping: bool = False) -> None:
        """Stop the thread after all submitted work; ``is_dropping``: after the piece that has begun."""
        self._is_dropping = is_dropping
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            select_device(self._device.type, self._device.index or 0)
            stream = None if self._device.type == "cpu" else torch.Stream(self._device)
            self._is_ready.set()
            while (work := self._asked.get()) is not None and not self._is_dropping:
                self._ended.append(self._done(work, stream))
                self._wake()
        except BaseException as defect:  # kept for the transfer thread, which raises it
            logger.exception("%s has stopped; the engine stops at its next step", self._name)
            self._defect = defect
            self._is_ready.set()
            self._wake()

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
            # Also after a failure: kernels it has launched may still run. If this raises, the thread stops.
            stream.synchronize()
        return lambda: work.ended(result, failed)
