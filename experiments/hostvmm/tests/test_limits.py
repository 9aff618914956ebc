# SPDX-License-Identifier: Apache-2.0
"""The smallest pool that can work; and how much memory and how many mappings the machine can still give."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hostvmm import hooks
from hostvmm.device import HostvmmError
from hostvmm.limits import Pool, available_memory_bytes, spare_mappings
from hypothesis import given
from hypothesis import strategies as st

MIB = 2**20


def pool(device_mib: float, *, layers: int = 4, kv_buffers: int = 2, contiguous: bool = True) -> Pool:
    return Pool(int(device_mib * MIB), 2 * MIB, layers, kv_buffers, contiguous, 0.95)


@pytest.mark.parametrize("contiguous", [True, False])
@given(device_mib=st.integers(1, 4096), layers=st.integers(1, 40), kv_buffers=st.sampled_from([1, 2]))
def test_a_pool_is_refused_exactly_when_no_page_group_fits(
    contiguous: bool, device_mib: int, layers: int, kv_buffers: int
) -> None:
    """The refusal and kvcached's own count of free page groups agree, after the zero page is taken."""
    subject = pool(device_mib, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous)
    free_bytes = subject.device_bytes - subject.zero_page_bytes
    headroom_bytes = int(subject.device_bytes * (1.0 - 0.95))
    # As kvcached counts: pages first, then whole layers, then whole buffers.
    groups = max(free_bytes - headroom_bytes, 0) // (2 * MIB) // layers // kv_buffers
    assert subject.usable_bytes == groups * subject.page_group_bytes
    if groups:
        subject.refuse_if_too_small()
    else:
        with pytest.raises(HostvmmError, match="KVCACHED_HOSTVMM_GIB"):
            subject.refuse_if_too_small()


@given(layers=st.integers(1, 80), kv_buffers=st.sampled_from([1, 2]), contiguous=st.booleans())
def test_the_size_a_refusal_recommends_is_accepted(layers: int, kv_buffers: int, contiguous: bool) -> None:
    """A pool of the recommended size starts."""
    with pytest.raises(HostvmmError) as refusal:
        pool(2, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous).refuse_if_too_small()
    recommended = re.search(r"KVCACHED_HOSTVMM_GIB to ([0-9.]+)", refusal.value.remedy)
    assert recommended is not None
    device_mib = math.floor(float(recommended[1]) * 1024 / 2) * 2
    pool(device_mib, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous).refuse_if_too_small()


@pytest.mark.parametrize(
    ("limit", "used", "expected_bytes"),
    [(None, None, 2 << 20), ("1048576", "48576", 1000000), ("max", "48576", 2 << 20), ("1000", "2000", 0)],
)
def test_a_control_groups_rest_counts_if_it_is_less_than_the_kernels_estimate(
    tmp_path: Path, limit: str | None, used: str | None, expected_bytes: int
) -> None:
    """Inside a container the limit is the container's. MemAvailable is in KiB."""
    (tmp_path / "meminfo").write_text("MemTotal:    9000000 kB\nMemAvailable:    2048 kB\nHugePages_Total:    0\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected_bytes


def test_a_device_larger_than_the_machine_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better than the kernel killing processes when the pool fills; the remedy switches the check off."""
    monkeypatch.setenv("KVCACHED_HOSTVMM_DEVICE", "never-opened-by-anyone")
    monkeypatch.setenv("KVCACHED_HOSTVMM_GIB", "8")
    monkeypatch.setattr(hooks, "available_memory_bytes", lambda: 3 << 30)
    with pytest.raises(HostvmmError, match=r"(?s)3\.00 GiB.*8\.00 GiB"):
        hooks.refuse_if_host_too_small(0)
    monkeypatch.setenv("KVCACHED_HOSTVMM_OVERCOMMIT", "1")
    hooks.refuse_if_host_too_small(0)


def test_the_mappings_a_process_has_are_taken_from_its_limit(tmp_path: Path) -> None:
    """One line of /proc/self/maps is one mapping."""
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/max_map_count").write_text("65530\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/maps").write_text("a\nb\nc\n")
    assert spare_mappings(tmp_path) == (65527, 65530)


@pytest.mark.parametrize(("contiguous", "refused"), [(False, True), (True, False)])
def test_a_pool_with_more_pages_than_mappings_is_refused(
    monkeypatch: pytest.MonkeyPatch, contiguous: bool, refused: bool
) -> None:
    """128 GiB in 2 MiB pages are 65536 mappings; the contiguous layout's larger pages need an eighth here."""
    monkeypatch.setattr(hooks, "spare_mappings", lambda: (65000, 65530))
    pool = Pool(128 << 30, 2 << 20, 4, 2, contiguous, 0.95)
    if not refused:
        hooks.refuse_if_too_few_mappings(pool)
        return
    with pytest.raises(HostvmmError) as refusal:
        hooks.refuse_if_too_few_mappings(pool)
    assert "65000" in refusal.value.found
    assert str(65536 + 4096) in refusal.value.expected
    assert "vm.max_map_count=70162" in refusal.value.remedy
