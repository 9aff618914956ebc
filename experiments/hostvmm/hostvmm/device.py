# SPDX-License-Identifier: Apache-2.0
"""The emulated device: its size, and the file in which all processes that use it account for their memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcached_nixl.errors import Refused
from kvcached_nixl.processes import start_ticks

SIZE_VARIABLE = "KVCACHED_HOSTVMM_GIB"
NAME_VARIABLE = "KVCACHED_HOSTVMM_DEVICE"
_PAGE_BYTES = 2 << 20

# Must equal the layout in native/device.hpp.
_HEADER = struct.Struct("=Qqqq")
_SLOT = struct.Struct("=9q")
_NAMESPACE_AT = 24
"""Offset in the header of the pid namespace of the slots' pids, 0 if unknown. Only this module reads and writes it."""
_SLOTS = 128
_ACCOUNT_BYTES = _HEADER.size + _SLOTS * _SLOT.size
_MAGIC = 0x314D4D5654534F48
_VERSION = 1


class HostvmmError(Refused, RuntimeError):
    """kvcached on host memory cannot be built, or cannot run here.

    It is also a RuntimeError, because kvcached lets only those pass while it sets up its block pool. It would log any
    other exception, and the engine would continue with vLLM's own block pool over memory without pages.
    """


@dataclass(frozen=True)
class ProcessUse:
    """Memory of the device that one running process holds, and its calls since it opened the device."""

    pid: int
    created_bytes: int
    mapped_bytes: int
    """Bytes of mapped addresses. The zero page counts once for each address that it is mapped at."""
    creates: int
    releases: int
    maps: int
    unmaps: int
    refused_creates: int
    """Allocations refused because the device was full."""


@dataclass(frozen=True)
class DeviceInfo:
    capacity_bytes: int
    processes: tuple[ProcessUse, ...]

    @property
    def used_bytes(self) -> int:
        return sum(process.created_bytes for process in self.processes)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


def capacity_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the emulated device's size: KVCACHED_HOSTVMM_GIB (default 4, decimals allowed), in whole 2 MiB pages."""
    text = environment.get(SIZE_VARIABLE) or "4"
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    pages = int(gib * 2**30) // _PAGE_BYTES if 0 < gib <= 2**20 else 0
    if pages == 0:
        raise HostvmmError(
            found=f"{SIZE_VARIABLE}={text!r}",
            expected="a number of GiB such as 4 or 0.5, at least one page of 2 MiB (0.002)",
            consequence="The size of the emulated device is not known.",
            remedy=f"Correct or unset {SIZE_VARIABLE}.",
        )
    return pages * _PAGE_BYTES


def device_name(environment: Mapping[str, str] = os.environ) -> str:
    """Returns KVCACHED_HOSTVMM_DEVICE (default "0"). Processes of one user that name the same share devices."""
    name = environment.get(NAME_VARIABLE) or "0"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise HostvmmError(
            found=f"{NAME_VARIABLE}={name!r}",
            expected="up to 64 letters, digits, '_' or '-'",
            consequence="The name cannot be used in a file name of the emulated device.",
            remedy=f"Correct or unset {NAME_VARIABLE}.",
        )
    return name


def account_path(index: int = 0, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of a device's file, which exists while a process uses the device."""
    return Path(f"/dev/shm/kvcached-hostvmm-{os.getuid()}-{device_name(environment)}-{index}")


def device_info(index: int = 0, environment: Mapping[str, str] = os.environ) -> DeviceInfo:
    """Returns the state of a device, without changing it. Any process of the same user may call it. A device that no
    process uses is empty. Dead processes are not listed, because their memory is free."""
    path = account_path(index, environment)
    content = _content(path)
    if len(content) < _ACCOUNT_BYTES:
        return DeviceInfo(capacity_bytes(environment), ())
    magic, version, capacity, _ = _HEADER.unpack_from(content)
    if (magic, version) != (_MAGIC, _VERSION):
        raise HostvmmError(
            found=f"{path}, which has version {version}",
            expected=f"version {_VERSION}",
            consequence="Its numbers cannot be read.",
            remedy="Stop the processes that use this device, or rebuild kvcached: both must be from one release.",
        )
    return DeviceInfo(capacity, tuple(ProcessUse(slot[0], *slot[2:]) for slot in _living(content)))


def refuse_foreign_account(index: int = 0, environment: Mapping[str, str] = os.environ) -> None:
    """Raises HostvmmError if the device is used by processes of another pid namespace. Call it before the device is
    opened: opening it clears the slots of processes that this one cannot see."""
    path = account_path(index, environment)
    _own_or_no_namespace(path, _content(path))


def sign_account(index: int = 0, environment: Mapping[str, str] = os.environ) -> None:
    """Writes the own pid namespace into the file of a device that this process has opened. Raises HostvmmError if the
    file holds pids of another namespace."""
    path = account_path(index, environment)
    with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _own_or_no_namespace(path, file.read()) == 0:
            os.pwrite(file.fileno(), struct.pack("=q", _own_namespace()), _NAMESPACE_AT)


def clear_abandoned(folder: Path = Path("/dev/shm")) -> tuple[str, ...]:
    """Removes the files of this user's devices that no running process uses, and returns their names; a killed process
    leaves its file behind. Files of another pid namespace are kept: this process cannot see whether those processes
    still run."""
    return tuple(path.name for path in folder.glob(f"kvcached-hostvmm-{os.getuid()}-*") if _clear(path))


def occupy(num_bytes: int, index: int = 0, environment: Mapping[str, str] = os.environ) -> None:
    """Has this process count as holding so many bytes of an opened device, as another engine would; 0: none any more.
    For experiments that need a device which others have filled. The calling process must not use the device otherwise.
    Raises FileNotFoundError if nobody uses the device, ValueError if too many do."""
    with account_path(index, environment).open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pids = [slot[0] for slot in _SLOT.iter_unpack(file.read()[_HEADER.size : _ACCOUNT_BYTES])]
        own = os.getpid()
        place = pids.index(own if own in pids else 0)
        use = (own, start_ticks(own) or 0, num_bytes) if num_bytes else (0, 0, 0)
        os.pwrite(file.fileno(), _SLOT.pack(*use, *[0] * 6), _HEADER.size + place * _SLOT.size)


def _content(path: Path) -> bytes:
    """Returns the content of a device's file; little or nothing if no process has opened the device completely."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return file.read()
    except FileNotFoundError:
        return b""


def _clear(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content = file.read()
        if len(content) < _ACCOUNT_BYTES or os.fstat(file.fileno()).st_nlink == 0:
            return False
        magic, version, _, namespace = _HEADER.unpack_from(content)
        if (magic, version, namespace) != (_MAGIC, _VERSION, _own_namespace()) or any(_living(content)):
            return False
        path.unlink()
        return True
    return False


def _living(content: bytes) -> Iterator[tuple[int, ...]]:
    slots = _SLOT.iter_unpack(content[_HEADER.size : _ACCOUNT_BYTES])
    return (slot for slot in slots if slot[0] and start_ticks(slot[0]) == slot[1])


def _own_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _own_or_no_namespace(path: Path, content: bytes) -> int | None:
    """Returns the pid namespace in a device's file, 0 for none, None if the file has no header yet. Raises HostvmmError
    if it is not the one of this process."""
    if len(content) < _HEADER.size:
        return None
    found: int = _HEADER.unpack_from(content)[3]
    if found not in (0, _own_namespace()):
        raise HostvmmError(
            found=f"{path}, which is used by processes in another pid namespace (another container)",
            expected="that all processes of a device are in one pid namespace",
            consequence="Each side would treat the other's processes as dead, and their memory as free.",
            remedy=f"Name another device in {NAME_VARIABLE}, or delete that file if its processes have ended.",
        )
    return found
