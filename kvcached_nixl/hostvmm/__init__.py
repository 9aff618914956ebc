# SPDX-License-Identifier: Apache-2.0
"""Host-memory emulation: runs the unmodified kvcached without a GPU.

kvcached is compiled over a small host-memory implementation of the runtime calls that it uses (`native/`). Reserved
addresses, mapping and unmapping of pages, the shared zero page and the limits are real. `build` compiles and installs
it. `activate` makes vLLM's CPU worker accept it, and does nothing with any other kvcached. `device_info` shows the
memory in use. `is_hostvmm_build` distinguishes it from a build for a GPU.

KVCACHED_HOSTVMM_GIB is the size of the emulated device. Processes of one user share a device as they would share a GPU,
including the ranks of a data-parallel server; KVCACHED_HOSTVMM_DEVICE selects another device. They share its size, not
its memory: the device's file counts the memory of each process under its pid. So all of them must be in one pid
namespace; a process in another one is refused.
With KVCACHED_HOSTVMM_REGISTRATION=pinned, memory registered with NIXL does not follow its pages, as with a network card
(`pinning`).

Every process with ENABLE_KVCACHED imports this package for `recognition`. The other modules are imported lazily, so
that nothing in them can fail on a GPU host.
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
