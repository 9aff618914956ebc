# SPDX-License-Identifier: Apache-2.0
"""Copies between blocks and slots, off the engine's thread and off the transfer thread. One thread per worker.

On an accelerator it has a stream of its own and waits for its end; on a CPU it is torch that copies, which lets go of
Python's lock. Copies are done in the order in which they were asked for.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.worker.staging.slab import Slab

__all__ = ["Copier", "Copy"]

logger = logging.getLogger(SERVER_LOGGER)


@dataclass(frozen=True, eq=False)
class Copy:
    """Attributes:
    is_gather: from blocks into slots; else the other way.
    ended: called once by `Copier.turn`, with what went wrong, or "".
    """

    is_gather: bool
    blocks: Sequence[int]
    slots: Sequence[int]
    ended: Callable[[str], None]


class Copier:
    """See the module.

    Args:
        wake: called on the copier's thread when a copy has ended; does not block.
    """

    def __init__(self, slab: Slab, wake: Callable[[], None]) -> None:
        self._slab = slab
        self._wake = wake
        self._asked: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Copy, str]] = deque()
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-copies", daemon=True)
        self._under_way = 0
        self._defect: BaseException | None = None

    def __len__(self) -> int:
        """Copies whose ends were not told yet."""
        return self._under_way

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        """Do it when those before it are done. The transfer thread's, as `turn` is."""
        self._under_way += 1
        self._asked.put(copy)

    def turn(self) -> None:
        """Tell the ends of what has ended.

        Raises:
            RuntimeError: the copier has ended by a defect: it is not known what is still copied.
        """
        if self._defect is not None:
            raise RuntimeError(f"copies have stopped: {self._defect!r}") from self._defect
        while self._ended:
            copy, failed = self._ended.popleft()
            self._under_way -= 1
            copy.ended(failed)

    def close(self) -> None:
        """Stop the thread, after what was asked for."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            device = self._slab.blocks_device
            stream = None if device.type == "cpu" else torch.Stream(device)
            while (copy := self._asked.get()) is not None:
                self._ended.append((copy, self._do(copy, stream)))
                self._wake()
        except BaseException as defect:  # kept for the transfer thread, which raises it
            logger.exception("The thread that copies has stopped; the engine stops at its next step")
            self._defect = defect
            self._wake()

    def _do(self, copy: Copy, stream: torch.Stream | None) -> str:
        failed = ""
        try:
            with stream or contextlib.nullcontext():
                if copy.is_gather:
                    self._slab.gather(copy.blocks, copy.slots)
                else:
                    self._slab.scatter(copy.slots, copy.blocks)
        except Exception as defect:
            logger.exception("A copy of %d blocks failed", len(copy.blocks))
            failed = f"a copy of {len(copy.blocks)} blocks failed: {type(defect).__name__}: {defect}"
        if stream is not None:
            # What was begun of one that failed is still under way. If its end cannot be seen, nothing may go on.
            stream.synchronize()
        return failed
