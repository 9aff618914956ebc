# SPDX-License-Identifier: Apache-2.0
"""kvcached on host memory: the same kvcached, no GPU.

The unmodified kvcached, compiled over a small host-memory implementation of the runtime calls it uses (`native/`):
reserved addresses, pages that come and go under them, the shared zero page and the limits are real. `build` compiles
and installs it, `activate` makes vLLM's CPU worker accept it and is inert with any other kvcached, `device_info` shows
what is in use, `is_hostvmm_build` tells it from a build for a GPU.

KVCACHED_HOSTVMM_GIB is the emulated device's size. Processes of one user share a device as they would a GPU, the ranks
of a data-parallel server, too; KVCACHED_HOSTVMM_DEVICE names another one. What they share is its size: each process has
an account of its own in it, by its id, so sharers must see each other's ids; others are refused.
With KVCACHED_HOSTVMM_REGISTRATION=pinned, memory that is registered with NIXL does not follow its pages, as under a
network card (`pinning`).

Every process with ENABLE_KVCACHED imports this package to ask `recognition`. The rest is imported when it is used: on a
GPU host nothing here may be able to fail.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

_HOMES = MappingProxyType(
    {
        "HOOKS": "activation",
        "Activation": "activation",
        "DeviceInfo": "device",
        "Hook": "activation",
        "HostvmmError": "errors",
        "ProcessUse": "device",
        "activate": "activation",
        "capacity_bytes": "device",
        "device_info": "device",
        "is_hostvmm_build": "recognition",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
