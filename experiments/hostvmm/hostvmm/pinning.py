# SPDX-License-Identifier: Apache-2.0
"""Optional emulation of a network card, whose registrations do not follow the pages of elastic memory.

A card translates addresses with a table that is made at registration. Pages that are mapped later are missing from it,
and pages that are unmapped later are still in it (nixl#1126). With NIXL_HOSTVMM_REGISTRATION=pinned, registering
elastic memory maps its present pages a second time, `SHIFT` bytes higher, and every transfer uses the second mapping,
on both sides. NIXL, UCX and the bytes are real. Wrong bytes appear only where the registration is outdated.

Elastic memory is recognized by its address (`WINDOW`), because a transfer also names the peer's addresses. Those are
shifted, too. So both sides must have the same setting, or they cannot reach each other's elastic memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from hostvmm.device import HostvmmError
from kvcached_nixl.patching import Call

REGISTRATION_VARIABLE = "NIXL_HOSTVMM_REGISTRATION"
"""Begins with NIXL, so that kvcached_nixl keeps no proof beyond a change of it."""
WINDOW = range(0x1F00_0000_0000, 0x2F00_0000_0000)
"""The addresses that kvcached 0.1.6 asks for, one pool after the other from the lowest on."""
SHIFT = 0x2000_0000_0000
_PAGE_BYTES = 2 << 20
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def is_pinned(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether registrations pin their pages. Raises HostvmmError if the variable is neither ``follows`` (the default)
    nor ``pinned``."""
    word = environment.get(REGISTRATION_VARIABLE) or "follows"
    if word not in ("follows", "pinned"):
        raise HostvmmError(
            found=f"{REGISTRATION_VARIABLE}={word!r}",
            expected="follows or pinned",
            consequence="Without it, it is undefined which bytes a transfer would read.",
            remedy=f"Correct or unset {REGISTRATION_VARIABLE}.",
        )
    return word == "pinned"


def get_reg_descs(call: Call) -> Any:
    """Pins the pages that are mapped now, and returns descriptors of the second mapping."""
    if is_pinned() and (rows := _rows(call.argument("descs"))) is not None:
        for address, length, *_ in rows:
            if int(address) in WINDOW:
                _pin(int(address), int(length))
    return get_xfer_descs(call)


def get_xfer_descs(call: Call) -> Any:
    """Returns descriptors of the second mapping, for local and remote addresses."""
    import numpy as np

    descs = call.argument("descs")
    rows = _rows(descs) if is_pinned() else None
    if rows is None:
        return call.proceed()
    shifted: Any = [(int(row[0]) + SHIFT * (int(row[0]) in WINDOW), *row[1:]) for row in rows]
    return call.proceed(descs=np.array(shifted, dtype=descs.dtype) if isinstance(descs, np.ndarray) else shifted)


def _rows(descs: Any) -> list[tuple[Any, ...]] | None:
    """None for NIXL's own lists, which were made by one of these two."""
    import numpy as np

    if isinstance(descs, np.ndarray) or (isinstance(descs, list) and isinstance(descs[0], tuple)):
        return [tuple(row) for row in descs]
    return None


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
