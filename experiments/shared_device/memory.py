# SPDX-License-Identifier: Apache-2.0
"""How much of the emulated device each engine has, over time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.common.sampler import Sampler
from experiments.shared_device.arms import DEVICE_GIB
from kvcached_nixl.hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Sample:
    """Bytes of the device that each engine has at a time; ``at_seconds`` counts from the watch's creation."""

    at_seconds: float
    used_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.used_bytes.values())


class DeviceWatch(Sampler):
    """Samples a device during a ``with`` block.

    Args:
        device: its name.
        sessions: the engines' sessions (process ids of their leaders), by the engine's name.
    """

    def __init__(self, device: str, sessions: Mapping[str, int]) -> None:
        super().__init__(f"memory of {device}", SAMPLE_SECONDS)
        self._environment = {NAME_VARIABLE: device, SIZE_VARIABLE: str(DEVICE_GIB)}
        self._names = {session: name for name, session in sessions.items()}
        self._begun_seconds = time.monotonic()
        self.samples: list[Sample] = []

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
