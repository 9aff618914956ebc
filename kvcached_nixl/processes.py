# SPDX-License-Identifier: Apache-2.0
"""Whether a process whose pid was recorded somewhere is still alive, and which programs have started this one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def has_ancestor(program: str) -> bool:
    """Whether a program of this name has started this process, be it through others."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            if name == program:
                return True
            pid = int(rest.split()[1])
    return False


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None if it is dead. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
