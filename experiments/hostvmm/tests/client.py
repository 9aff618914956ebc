# SPDX-License-Identifier: Apache-2.0
"""The host-memory runtime as a shared library, called the way kvcached calls it. Test processes import this too."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

from hostvmm.build import NATIVE, SOURCES, find_compiler

PAGE_BYTES = 2 << 20
OUT_OF_MEMORY, INVALID_VALUE, INVALID_HANDLE, OPERATING_SYSTEM = 2, 1, 400, 304


class RuntimeFailure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def refused(call: Callable[[], object]) -> str:
    """Returns the code of a call's error, and its text."""
    try:
        found = call()
    except RuntimeFailure as error:
        return f"{error.code} {error}"
    raise AssertionError(f"found {found}; expected an error")


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("handle_type", ctypes.c_int), ("location", _Location))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def compile_library(folder: Path) -> Path:
    """Compiles the sources that are linked into kvcached, with exported symbols."""
    library = folder / "libhostvmm.so"
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}"]
    subprocess.run([find_compiler(), *flags, *map(str, SOURCES), "-o", str(library)], check=True)
    return library


class Client:
    """One process's view of the emulated device. Addresses are ints, sizes are in bytes."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.hipGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeFailure(code, self._library.hipGetErrorString(code).decode())

    def init(self) -> None:
        self._call("hipInit", 0)

    def memory(self) -> tuple[int, int]:
        """Returns (free, total) in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def reserve(self, size_bytes: int, address: int = 0) -> int:
        found = ctypes.c_void_p()
        sizes = ctypes.c_size_t(size_bytes), ctypes.c_size_t(PAGE_BYTES)
        more = ctypes.c_void_p(address), ctypes.c_ulonglong(0)
        self._call("hipMemAddressReserve", ctypes.byref(found), *sizes, *more)
        assert found.value is not None
        return found.value

    def free(self, address: int, size_bytes: int) -> None:
        self._call("hipMemAddressFree", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))

    def create(self, size_bytes: int = PAGE_BYTES, device: int = 0) -> int:
        handle = ctypes.c_void_p()
        properties = _Properties(1, 0, _Location(1, device))
        size, flags = ctypes.c_size_t(size_bytes), ctypes.c_ulonglong(0)
        self._call("hipMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), flags)
        assert handle.value is not None
        return handle.value

    def release(self, handle: int) -> None:
        self._call("hipMemRelease", ctypes.c_void_p(handle))

    def map(self, address: int, handle: int, size_bytes: int = PAGE_BYTES) -> None:
        """Maps and grants access, as kvcached does in one step."""
        sizes = (ctypes.c_size_t(size_bytes), ctypes.c_size_t(0))
        self._call("hipMemMap", ctypes.c_void_p(address), *sizes, ctypes.c_void_p(handle), ctypes.c_ulonglong(0))
        access = _Access(_Location(1, 0), 3)
        granted = ctypes.byref(access), ctypes.c_size_t(1)
        self._call("hipMemSetAccess", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), *granted)

    def unmap(self, address: int, size_bytes: int = PAGE_BYTES) -> None:
        self._call("hipMemUnmap", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
