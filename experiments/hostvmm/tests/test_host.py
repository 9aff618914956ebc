# SPDX-License-Identifier: Apache-2.0
"""How much memory the machine can still give."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostvmm import hooks
from hostvmm.errors import HostvmmError
from hostvmm.geometry import Pool
from hostvmm.host import available_memory_bytes, spare_mappings


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
