# SPDX-License-Identifier: Apache-2.0
"""Optional emulation of a network card, whose registrations do not follow the pages of elastic memory.

A card translates addresses with a table that is made at registration. Pages that are mapped later are missing from it,
and pages that are unmapped later are still in it (nixl#1126). With KVCACHED_HOSTVMM_REGISTRATION=pinned, registering
elastic memory maps its present pages a second time, `SHIFT` bytes higher, and every transfer uses the second mapping,
on both sides. NIXL, UCX and the bytes are real. Wrong bytes appear only where the registration is outdated.

Elastic memory is recognized by its address (`WINDOW`), because a transfer also names the peer's addresses. Those are
shifted, too. So both sides must have the same setting, or they cannot reach each other's elastic memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from .errors import HostvmmError

REGISTRATION_VARIABLE = "KVCACHED_HOSTVMM_REGISTRATION"
WINDOW = range(0x1F00_0000_0000, 0x2F00_0000_0000)
"""The addresses that kvcached 0.1.6 asks for, one pool after the other from the lowest on."""
SHIFT = 0x2000_0000_0000
_PAGE_BYTES = 2 << 20
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def is_pinned(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether registrations pin their pages.

    Raises:
        HostvmmError: the variable is neither ``follows`` (the default) nor ``pinned``.
    """
    word = environment.get(REGISTRATION_VARIABLE) or "follows"
    if word not in ("follows", "pinned"):
        raise HostvmmError(
            found=f"{REGISTRATION_VARIABLE}={word!r}",
            expected="follows or pinned",
            consequence="Without it, it is undefined which bytes a transfer would read.",
            remedy=f"Correct or unset {REGISTRATION_VARIABLE}.",
        )
    return word == "pinned"


def get_reg_descs(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pins the pages that are mapped now, and returns descriptors of the second mapping."""
    return _shifted(wrapped, args, kwargs, pins=True)


def get_xfer_descs(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns descriptors of the second mapping, for local and remote addresses."""
    return _shifted(wrapped, args, kwargs, pins=False)


def _shifted(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, pins: bool) -> Any:
    import numpy as np

    descs, *others = args
    if not is_pinned() or not (
        isinstance(descs, np.ndarray) or (isinstance(descs, list) and isinstance(descs[0], tuple))
    ):
        return wrapped(*args, **kwargs)
    rows = [tuple(row) for row in descs]
    if pins:
        for address, length, *_ in rows:
            if int(address) in WINDOW:
                _pin(int(address), int(length))
    shifted: Any = [(int(row[0]) + SHIFT * (int(row[0]) in WINDOW), *row[1:]) for row in rows]
    if isinstance(descs, np.ndarray):
        shifted = np.array(shifted, dtype=descs.dtype)
    return wrapped(shifted, *others, **kwargs)


def _pin(address: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    begin = address // _PAGE_BYTES * _PAGE_BYTES
    for page in range(begin, address + length, _PAGE_BYTES):
        # An old size of 0 maps the pages of a shared mapping a second time and keeps the first mapping.
        found = libc.mremap(
            ctypes.c_void_p(page),
            ctypes.c_size_t(0),
            ctypes.c_size_t(_PAGE_BYTES),
            _MREMAP_MAYMOVE | _MREMAP_FIXED,
            ctypes.c_void_p(page + SHIFT),
        )
        if found == _FAILED:
            raise OSError(
                ctypes.get_errno(), f"pinning the page at {page:#x} failed: {os.strerror(ctypes.get_errno())}"
            )
