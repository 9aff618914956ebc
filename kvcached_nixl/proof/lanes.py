# SPDX-License-Identifier: Apache-2.0
"""Which transports UCX could choose on this host, and which it chose, both parsed from UCX's own output."""

from __future__ import annotations

import ctypes
import fnmatch
import re
from pathlib import Path
from types import MappingProxyType

from kvcached_nixl.proof.result import Ucx

_FEATURES = 1 << 0
"""UCP_PARAM_FIELD_FEATURES: the only parameter that is given."""
_RMA, _AM = 1 << 1, 1 << 6
"""The features that NIXL asks UCX for: remote memory access, and active messages for notifications."""

_NEEDS = MappingProxyType(
    {
        # These only move bytes; another transport has to connect the two processes.
        "cma": "tcp",
        "knem": "tcp",
        "xpmem": "tcp",
        # The same. Device memory is told from host memory by the transport that copies it.
        "cuda_copy": "tcp",
        "cuda_ipc": "cuda_copy,tcp",
        "gdr_copy": "cuda_copy,tcp",
        "rocm_copy": "tcp",
        "rocm_ipc": "rocm_copy,tcp",
        "ze_copy": "tcp",
        "ze_ipc": "ze_copy,tcp",
        "rc_*": "ud_verbs:aux,ud_mlx5:aux",
        "dc_*": "ud_mlx5:aux",
        "gga_*": "rc_mlx5,ud_mlx5:aux",
    }
)
"""Transport -> the transports that it needs beside it, as far as UCX's documentation names them."""

_COPIES = frozenset({"cuda_copy", "gdr_copy", "rocm_copy", "ze_copy"})
"""These copy between an accelerator and its host, before and after a transport that connects processes."""


class _Params(ctypes.Structure):
    # ucp_params_t. With this field_mask UCX reads nothing behind the features.
    _fields_ = (("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("rest", ctypes.c_char * 512))


def ucx_of_this_process() -> Ucx:
    """What the UCX library that NIXL has loaded could choose from now. Needs an existing NIXL agent. Opens devices.

    Raises:
        OSError, RuntimeError: UCX is not loaded, or a call fails.
    """
    library = _loaded("libucp")
    ucp = ctypes.CDLL(library)
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    _require(ucp.ucp_config_read(None, None, ctypes.byref(config)), "ucp_config_read")
    params = _Params(_FEATURES, _RMA | _AM)
    _require(
        ucp.ucp_init_version(major, minor, ctypes.byref(params), config, ctypes.byref(context)), "ucp_init_version"
    )
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    ucp.ucp_cleanup(context)
    status = Path(library).stat()
    return Ucx(
        f"{major.value}.{minor.value}.{release.value}, {status.st_size} bytes of {status.st_mtime_ns}",
        _resources((text.value or b"").decode()),
    )


def carriers(said: str) -> frozenset[str]:
    """The transports that UCX chose to read or write another process's memory, from its ``UCX_PROTO_INFO`` output."""
    found: set[str] = set()
    is_of_a_peer = is_of_memory = False
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        # The head of a table is one row of two cells in UCX 1.18, and two rows of one in 1.20.
        if len(cells) in (1, 2):
            if "cfg#" in cells[0]:
                is_of_a_peer = " self cfg#" not in cells[0]
            is_of_memory = cells[-1].startswith("remote memory")
        elif len(cells) == 3 and is_of_a_peer and is_of_memory:
            found.update(re.findall(r"(\w+)/", cells[2]))
    return frozenset(found)


def is_never_chosen(lane: str, said: str) -> bool:
    """Whether UCX reports that a transport does not detect peer failure. NIXL requires that of every transport."""
    return re.search(rf"\b{re.escape(lane)}/\S+ - no peer failure handler", said) is not None


def only_copies(lane: str) -> bool:
    return lane in _COPIES


def transports_of(lane: str, device: str) -> tuple[str, str]:
    """``UCX_TLS`` values with which UCX can move bytes only over this lane: without TCP, and with TCP beside it.

    The second is for lanes that UCX does not use alone: NIXL requires peer failure detection, and a transport without
    it is chosen at most beside another one.
    """
    needs = next((needs for pattern, needs in _NEEDS.items() if fnmatch.fnmatch(lane, pattern)), "")
    names = [lane, *filter(None, needs.split(","))]
    if device == "cuda" and "cuda_copy" not in names:
        names.append("cuda_copy")
    return ",".join(names), ",".join(dict.fromkeys((*names, "tcp")))


def _resources(text: str) -> tuple[str, ...]:
    """From what UCX prints: ``resource 4 : md 3 dev 0 flags -- posix/memory``."""
    return tuple(re.findall(r"resource\s+\d+\s*:.*?(\w+/\S+)\s*$", text, re.MULTILINE))


def _loaded(library: str) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(library):
            return f"/{path}"
    raise OSError(f"{library} is not loaded")


def _require(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"UCX's {what} returned {ctypes.c_int8(status).value}")
