# SPDX-License-Identifier: Apache-2.0
"""Whether a process whose pid was recorded somewhere is still alive."""

from __future__ import annotations

from pathlib import Path

__all__ = ["start_ticks"]


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None if it is dead. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
