# SPDX-License-Identifier: Apache-2.0
"""Whether a process that left its number somewhere still lives."""

from __future__ import annotations

from pathlib import Path

__all__ = ["start_ticks"]


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot: tells a reused pid from its first owner."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
