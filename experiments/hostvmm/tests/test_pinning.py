# SPDX-License-Identifier: Apache-2.0
"""Emulated pinning: transfers use the pages that were mapped at registration; other memory is not affected."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hostvmm.device import HostvmmError
from hostvmm.pinning import (
    REGISTRATION_VARIABLE,
    SHIFT,
    WINDOW,
    get_reg_descs,
    get_xfer_descs,
    is_pinned,
)

from kvcached_nixl.patching import Call

PAGE = 2 << 20
AT = WINDOW.start + (1 << 40)
"""Where kvcached in the same process would not be."""
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def describe(descs: Any, mem_type: str = "DRAM") -> Any:
    """What NIXL would be given."""
    return descs


def call(descs: Any) -> Call:
    return Call(describe, None, (descs, "DRAM"), {})


def place(file: int, page: int, number: int) -> None:
    """Put a page of a file at an address, as kvcached on host memory does."""
    found = libc.mmap(
        ctypes.c_void_p(AT + page * PAGE),
        ctypes.c_size_t(PAGE),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | 0x10,
        file,
        ctypes.c_long(number * PAGE),
    )
    assert found == AT + page * PAGE


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("pages")
    os.ftruncate(file, 4 * PAGE)
    yield file
    os.close(file)
    for base in (AT, AT + SHIFT):
        libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(4 * PAGE))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTRATION_VARIABLE, "pinned")


@pytest.mark.usefixtures("pinned")
def test_a_registration_keeps_the_pages_of_its_moment(file: int) -> None:
    place(file, 0, 0)
    place(file, 1, 1)
    ctypes.memset(AT, 1, 2 * PAGE)
    found = get_reg_descs(call([(AT + 10, 2 * PAGE - 10, 0, "")]))
    assert found == [(AT + 10 + SHIFT, 2 * PAGE - 10, 0, "")]
    assert ctypes.string_at(AT + SHIFT, 2 * PAGE) == b"\1" * 2 * PAGE
    ctypes.memset(AT, 2, PAGE)
    assert ctypes.string_at(AT + SHIFT, 1) == b"\2", "the same page"
    place(file, 0, 2)
    ctypes.memset(AT, 3, PAGE)
    assert ctypes.string_at(AT + SHIFT, 1) == b"\2", "the page of before"
    assert ctypes.string_at(AT, 1) == b"\3"


@pytest.mark.usefixtures("pinned")
def test_a_transfer_names_what_was_registered_and_other_memory_as_it_is() -> None:
    rows = np.array([[AT, 5, 0], [64, 5, 0], [WINDOW.stop, 5, 0]], np.uint64)
    found = get_xfer_descs(call(rows))
    assert found.dtype == np.uint64
    assert found.tolist() == [[AT + SHIFT, 5, 0], [64, 5, 0], [WINDOW.stop, 5, 0]]
    listed = get_xfer_descs(call([(AT, 5, 0)]))
    assert listed == [(AT + SHIFT, 5, 0)]
    made = object()
    assert get_xfer_descs(call(made)) is made, "NIXL's own lists were made by one of these two"


@pytest.mark.usefixtures("pinned")
def test_what_cannot_be_pinned_is_an_error() -> None:
    """As a card's driver answers for addresses with nothing behind them."""
    with pytest.raises(OSError, match="pinning the page"):
        get_reg_descs(call([(AT, PAGE, 0, "")]))


def test_another_word_is_refused() -> None:
    with pytest.raises(HostvmmError, match="pinned"):
        is_pinned({REGISTRATION_VARIABLE: "yes"})
