# SPDX-License-Identifier: Apache-2.0
"""How much of the emulated device each engine has, over time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from experiments.shared_device.arms import DEVICE_GIB
from kvcached_nixl.hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Sample:
    """Bytes of the device that each engine has at a time; ``at_seconds`` counts from the watch's begin."""

    at_seconds: float
    used_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.used_bytes.values())


class DeviceWatch:
    """Samples a device on a separate thread during a ``with`` block.

    Args:
        device: its name.
        sessions: the engines' sessions (process ids of their leaders), by the engine's name.
    """

    def __init__(self, device: str, sessions: Mapping[str, int]) -> None:
        self._environment = {NAME_VARIABLE: device, SIZE_VARIABLE: str(DEVICE_GIB)}
        self._names = {session: name for name, session in sessions.items()}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"memory of {device}", daemon=True)
        self._begun_seconds = 0.0
        self.samples: list[Sample] = []

    def __enter__(self) -> DeviceWatch:
        self._begun_seconds = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def sample(self) -> None:
        """Read the device's account once."""
        used = dict.fromkeys(self._names.values(), 0)
        for process in device_info(environment=self._environment).processes:
            try:
                name = self._names.get(os.getsid(process.pid))
            except ProcessLookupError:
                continue
            if name is not None:
                used[name] += process.created_bytes
        self.samples.append(Sample(time.monotonic() - self._begun_seconds, used))

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.sample()
