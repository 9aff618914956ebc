# SPDX-License-Identifier: Apache-2.0
"""The emulated device's size and name, read from the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostvmm import device
from hostvmm.device import HostvmmError

from kvcached_nixl.processes import start_ticks

OWN_START = start_ticks(os.getpid())


def account(*slots: tuple[int, int | None], namespace: int | None = None) -> bytes:
    """One of these (pid, start) of each process; of this pid namespace."""
    named = device._own_namespace() if namespace is None else namespace
    header = device._HEADER.pack(device._MAGIC, device._VERSION, 1 << 30, named)
    filled = [device._SLOT.pack(pid, start or 0, *[0] * 7) for pid, start in slots]
    return header + b"".join(filled).ljust(device._SLOTS * device._SLOT.size, b"\0")


@pytest.mark.parametrize(
    ("text", "expected_bytes"), [("4", 4 << 30), ("0.5", 512 << 20), ("0.003", 2 << 20), (None, 4 << 30), ("", 4 << 30)]
)
def test_the_size_is_read_in_gib_and_whole_pages(text: str | None, expected_bytes: int) -> None:
    """Decimals are allowed; unset and empty mean 4 GiB."""
    assert device.capacity_bytes({} if text is None else {"KVCACHED_HOSTVMM_GIB": text}) == expected_bytes


@pytest.mark.parametrize("name", ["../x", "a b", "x" * 65])
def test_a_device_name_that_is_no_file_name_is_refused(name: str) -> None:
    """A name cannot lead outside the folder of shared memory."""
    with pytest.raises(HostvmmError, match="KVCACHED_HOSTVMM_DEVICE"):
        device.account_path(environment={"KVCACHED_HOSTVMM_DEVICE": name})


def test_a_device_that_nobody_uses_is_empty() -> None:
    """Without an account the whole device is free."""
    environment = {"KVCACHED_HOSTVMM_DEVICE": "never-opened-by-anyone", "KVCACHED_HOSTVMM_GIB": "1"}
    found = device.device_info(environment=environment)
    assert (found.capacity_bytes, found.free_bytes, found.processes) == (1 << 30, 1 << 30, ())


@pytest.mark.parametrize(
    ("content", "cleared"),
    [
        (account(), True),
        (account((os.getpid(), 1)), True),
        (account((os.getpid(), OWN_START)), False),
        (account((os.getpid(), 1), (os.getpid(), OWN_START)), False),
        (account(namespace=1), False),
        (account(namespace=0), False),
        (b"", False),
        (account()[:200], False),
        (b"x" * len(account()), False),
    ],
    ids=["empty", "dead", "living", "one of two", "another namespace", "unsigned", "new", "cut", "another file"],
)
def test_an_account_is_cleared_if_all_its_processes_are_known_to_be_dead(
    tmp_path: Path, content: bytes, cleared: bool
) -> None:
    """One that is just being made, or whose processes cannot be seen, stays."""
    path = tmp_path / f"kvcached-hostvmm-{os.getuid()}-any-0"
    path.write_bytes(content)
    assert device.clear_abandoned(tmp_path) == ((path.name,) if cleared else ())
    assert path.exists() is not cleared


@pytest.mark.parametrize("call", [device.refuse_foreign_account, device.sign_account])
def test_a_device_of_another_container_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: object
) -> None:
    """Neither side sees whether the other's processes live, so each would take the other's memory."""
    path = tmp_path / "account"
    monkeypatch.setattr(device, "account_path", lambda index, environment: path)
    path.write_bytes(account(namespace=0))
    assert callable(call) and call() is None
    path.write_bytes(account(namespace=7))
    with pytest.raises(HostvmmError, match="another pid namespace"):
        call()


def test_an_account_is_signed_once_and_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what says whose ids it holds; nothing else of it changes."""
    path = tmp_path / "account"
    monkeypatch.setattr(device, "account_path", lambda index, environment: path)
    device.sign_account()
    path.write_bytes(account((os.getpid(), OWN_START), namespace=0))
    for _ in range(2):
        device.sign_account()
    assert path.read_bytes() == account((os.getpid(), OWN_START))
    assert [one.pid for one in device.device_info().processes] == [os.getpid()]


def test_a_process_that_occupies_memory_counts_as_one_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "account"
    monkeypatch.setattr(device, "account_path", lambda *_: path)
    with pytest.raises(FileNotFoundError):
        device.occupy(1)
    path.write_bytes(account((os.getppid(), start_ticks(os.getppid()))))
    for num_bytes in (5 << 20, 7 << 20):
        device.occupy(num_bytes)
        assert device.device_info().free_bytes == (1 << 30) - num_bytes
        assert len(device.device_info().processes) == 2
    device.occupy(0)
    assert device.device_info().free_bytes == 1 << 30 and len(device.device_info().processes) == 1
    path.write_bytes(account(*[(1, 1)] * device._SLOTS))
    with pytest.raises(ValueError):
        device.occupy(1)
