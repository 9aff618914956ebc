# SPDX-License-Identifier: Apache-2.0
"""The kernel's limits for this process, and which of them are too low for a server."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["FILES", "LOCKED", "MAPPINGS", "SHARED", "UNLIMITED", "Limits", "limits", "shortfalls"]

Limits = Mapping[str, int | str]
"""Name -> value; a text if it is unlimited or not known."""

LOCKED, FILES, MAPPINGS, SHARED = "ulimit -l, bytes", "ulimit -n", "max_map_count", "/dev/shm, bytes"
UNLIMITED = "unlimited"
_SHARED_BYTES = 1 << 30
"""With less than this in /dev/shm, UCX may fail to create shared memory in a container."""
_MAPPINGS = 65_530
"""Linux's default for vm.max_map_count."""
_INFINIBAND = Path("/sys/class/infiniband")


def limits() -> Limits:
    def limit(which: int) -> int | str:
        soft, _ = resource.getrlimit(which)
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    def known(look: Callable[[], int]) -> int | str:
        try:
            return look()
        except OSError as error:
            return f"not known: {error}"

    return {
        LOCKED: limit(resource.RLIMIT_MEMLOCK),
        FILES: limit(resource.RLIMIT_NOFILE),
        MAPPINGS: known(lambda: int(Path("/proc/sys/vm/max_map_count").read_text())),
        SHARED: known(lambda: shutil.disk_usage("/dev/shm").free),
    }


def shortfalls(found: Limits, *, pins: bool | None = None) -> Iterator[str]:
    """What to change about each limit that is too low; what a server needs depends on the transports it uses.

    Args:
        pins: whether this host has network cards that pin registered memory; None to look.
    """
    locked, mappings, shared = (found[name] for name in (LOCKED, MAPPINGS, SHARED))
    if (_INFINIBAND.is_dir() if pins is None else pins) and locked != UNLIMITED:
        yield "ulimit -l unlimited: network cards pin registered memory"
    if isinstance(mappings, int) and mappings < _MAPPINGS:
        yield f"sysctl -w vm.max_map_count={_MAPPINGS}: each of kvcached's pages is a mapping"
    if isinstance(shared, int) and shared < _SHARED_BYTES:
        yield (
            "give the container more shared memory (--shm-size=1g, or an emptyDir of medium Memory): UCX and vLLM's "
            "processes create some"
        )
