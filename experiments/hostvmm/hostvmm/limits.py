# SPDX-License-Identifier: Apache-2.0
"""What fits: sizes of the KV memory (arithmetic only, without kvcached and vLLM), and limits of the host machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hostvmm.device import HostvmmError


@dataclass(frozen=True)
class Pool:
    """One kvcached pool on one device.

    A page group is one page for each layer and KV buffer: the smallest amount by which the pool grows or shrinks, in
    both layouts.
    """

    device_bytes: int
    page_bytes: int
    layers: int
    kv_buffers: int
    contiguous: bool
    utilization: float
    """kvcached leaves (1 - utilization) of the device unused (KVCACHED_GPU_UTILIZATION)."""

    @property
    def page_group_bytes(self) -> int:
        return self.page_bytes * self.layers * self.kv_buffers

    @property
    def zero_page_bytes(self) -> int:
        """Size of the shared zero page, mapped at every address without memory: one mapping unit of the pool."""
        return self.page_group_bytes if self.contiguous else self.page_bytes

    @property
    def mappings(self) -> int:
        """Number of kernel mappings for the pool's addresses: one for each range of the zero page's size."""
        return self.device_bytes // self.zero_page_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes available for KV blocks: whole page groups, without kvcached's headroom and the zero page."""
        headroom_bytes = int(self.device_bytes * (1.0 - self.utilization))
        spare_bytes = max(self.device_bytes - headroom_bytes - self.zero_page_bytes, 0)
        return spare_bytes // self.page_group_bytes * self.page_group_bytes

    def refuse_if_too_small(self, planned_bytes: int | None = None) -> None:
        """Raises HostvmmError if no page group fits the device or `planned_bytes` (the KV cache that vLLM planned).

        Otherwise kvcached would wait for ever for the first block.
        """
        step = (
            f"{_mib(self.page_group_bytes)}, one page group of kvcached "
            f"({_mib(self.page_bytes)} x {self.layers} layers x {self.kv_buffers} KV buffers)"
        )
        consequence = "No KV block could get memory and the engine would wait for ever, so it is stopped."
        if self.usable_bytes < self.page_group_bytes:
            least_bytes = (self.page_group_bytes + self.zero_page_bytes) / self.utilization
            least_gib = math.ceil(least_bytes / 2**20 + 2) / 1024
            raise HostvmmError(
                found=f"an emulated device of {_mib(self.device_bytes)} (KVCACHED_HOSTVMM_GIB)",
                expected=f"{step}, and a zero page of {_mib(self.zero_page_bytes)}, in {self.utilization:.0%} of it",
                consequence=consequence,
                remedy=f"Set KVCACHED_HOSTVMM_GIB to {least_gib:.4f} or more; room for three page groups is useful.",
            )
        if planned_bytes is not None and planned_bytes < self.page_group_bytes:
            raise HostvmmError(
                found=f"a planned KV cache of {_mib(planned_bytes)}",
                expected=f"at least {step}",
                consequence=consequence,
                remedy="Raise VLLM_CPU_KVCACHE_SPACE, --kv-cache-memory-bytes or --num-gpu-blocks-override.",
            )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes this process can still allocate: the kernel's estimate, or its cgroup's rest if smaller."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available_bytes  # no cgroup, or cgroup v1
    if not limit.isdigit() or not used.isdigit():
        return available_bytes
    return min(available_bytes, max(int(limit) - int(used), 0))


def spare_mappings(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Returns how many memory mappings this process may still make, and the kernel's limit (vm.max_map_count)."""
    limit = int((proc / "sys/vm/max_map_count").read_text())
    with (proc / "self/maps").open() as lines:
        return limit - sum(1 for _ in lines), limit
