# SPDX-License-Identifier: Apache-2.0
"""How much of the emulated device each engine has, over time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

from experiments.common.sampler import Sampler
from experiments.shared_device.models import Device

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
        name: of the emulated device, which is a ``device``.
        sessions: the engines' sessions (process ids of their leaders), by the engine's name.
    """

    def __init__(self, device: Device, name: str, sessions: Mapping[str, int]) -> None:
        super().__init__(f"memory of {name}", SAMPLE_SECONDS)
        self._environment = {NAME_VARIABLE: name, SIZE_VARIABLE: str(device.gib)}
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
