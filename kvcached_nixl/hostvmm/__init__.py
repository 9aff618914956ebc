# SPDX-License-Identifier: Apache-2.0
"""kvcached on host memory: the same kvcached, no GPU.

The unmodified kvcached, compiled over a small host-memory implementation of the runtime calls it uses (`native/`):
reserved addresses, pages that come and go under them, the shared zero page and the limits are real. `build` compiles
and installs it, `activate` makes vLLM's CPU worker accept it and is inert with any other kvcached, `device_info` shows
what is in use.

KVCACHED_HOSTVMM_GIB is the emulated device's size. Processes of one user share a device as they would a GPU;
KVCACHED_HOSTVMM_DEVICE names another one. Accounts are kept by process id, so sharers must see each other's ids.
"""

from __future__ import annotations

from .activation import HOOKS, Activation, Hook, activate
from .device import DeviceInfo, ProcessUse, capacity_bytes, device_info
from .errors import HostvmmError
from .recognition import is_hostvmm_build

__all__ = [
    "HOOKS",
    "Activation",
    "DeviceInfo",
    "Hook",
    "HostvmmError",
    "ProcessUse",
    "activate",
    "capacity_bytes",
    "device_info",
    "is_hostvmm_build",
]
