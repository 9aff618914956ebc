# SPDX-License-Identifier: Apache-2.0
"""The emulated device's size and name, read from the environment."""

from __future__ import annotations

import pytest

from kvcached_nixl.hostvmm import HostvmmError, capacity_bytes, device_info
from kvcached_nixl.hostvmm.device import account_path


@pytest.mark.parametrize(
    ("text", "expected_bytes"), [("4", 4 << 30), ("0.5", 512 << 20), ("0.003", 2 << 20), (None, 4 << 30), ("", 4 << 30)]
)
def test_the_size_is_read_in_gib_and_whole_pages(text: str | None, expected_bytes: int) -> None:
    """Decimals are allowed; unset and empty mean 4 GiB."""
    assert capacity_bytes({} if text is None else {"KVCACHED_HOSTVMM_GIB": text}) == expected_bytes


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "four", "4GiB", "0.0001"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    """The error names the variable and its value."""
    with pytest.raises(HostvmmError, match=f"KVCACHED_HOSTVMM_GIB='{text}'"):
        capacity_bytes({"KVCACHED_HOSTVMM_GIB": text})


@pytest.mark.parametrize("name", ["../x", "a b", "x" * 65])
def test_a_device_name_that_is_no_file_name_is_refused(name: str) -> None:
    """A name cannot lead outside the folder of shared memory."""
    with pytest.raises(HostvmmError, match="KVCACHED_HOSTVMM_DEVICE"):
        account_path(environment={"KVCACHED_HOSTVMM_DEVICE": name})


def test_a_device_that_nobody_uses_is_empty() -> None:
    """Without an account the whole device is free."""
    environment = {"KVCACHED_HOSTVMM_DEVICE": "never-opened-by-anyone", "KVCACHED_HOSTVMM_GIB": "1"}
    found = device_info(environment=environment)
    assert (found.capacity_bytes, found.free_bytes, found.processes) == (1 << 30, 1 << 30, ())
