# SPDX-License-Identifier: Apache-2.0
"""Reads something again and again on a thread of its own, while something else runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Sampler = TypeVar("_Sampler", bound="Sampler")


class Sampler(ABC):
    """Calls `sample` during a ``with`` block, and once more when that ends, so that what happens last is not missed.

    Args:
        name: of the thread.
        pause_seconds: between two samples.
    """

    def __init__(self, name: str, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self: _Sampler) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    @abstractmethod
    def sample(self) -> None:
        """Read once. Called on the sampler's thread."""

    def _run(self) -> None:
        while not self._done.wait(self._pause_seconds):
            self.sample()
        self.sample()
