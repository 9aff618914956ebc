# SPDX-License-Identifier: Apache-2.0
"""Limits of the host machine."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes this process can still allocate: the kernel's estimate, or its cgroup's rest if smaller."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    limit_bytes, used_bytes = (_read_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit_bytes is None or used_bytes is None:
        return available_bytes
    return min(available_bytes, max(limit_bytes - used_bytes, 0))


def spare_mappings(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Returns how many memory mappings this process may still make, and the kernel's limit (vm.max_map_count)."""
    limit = int((proc / "sys/vm/max_map_count").read_text())
    with (proc / "self/maps").open() as lines:
        return limit - sum(1 for _ in lines), limit


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no cgroup, or cgroup v1
    return int(text) if text.isdigit() else None
