# SPDX-License-Identifier: Apache-2.0
"""Questions and results of a proof: pure data, sent between processes and stored on disk. And its lanes: which
transports UCX could choose on this host, and which it chose, both parsed from UCX's own output.
"""

from __future__ import annotations

import ctypes
import fnmatch
import re
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from kvcached_nixl.settings import MemoryPath

Place: TypeAlias = Literal["elastic", "ordinary", "host"]
"""kvcached's pages, mapped or not; other memory of the device; host memory, where the device has its own."""
AS_CONFIGURED = "as configured"
"""The lane with all transports that UCX may choose from: tests what UCX chooses on this host."""
SLOW = 4.0
"""kvcached's pages may be this many times slower than a slab. Beyond that staging is better: it costs one more copy on
the device."""
HOST_GAIN = 2.0
"""A slab is on the host if every transport writes host memory this many times faster than the device's: without a
direct path to the device, UCX copies each piece through the host, and a slab there is copied at once."""


class Question(msgspec.Struct, frozen=True):
    """How the asking process would transfer KV.

    Attributes:
        device: ``cpu`` or torch's name of an accelerator.
        memory_type: NIXL's, of the KV cache.
        backends: NIXL's, which the connector is configured with.
    """

    device: str
    device_index: int
    memory_type: str
    backends: tuple[str, ...]

    @property
    def torch_device(self) -> str:
        return "cpu" if self.device == "cpu" else f"{self.device}:{self.device_index}"

    @property
    def staged(self) -> MemoryPath:
        """Place of a slab where no rates are known: on the device, or on the host for a CPU."""
        return MemoryPath.HOST if self.device == "cpu" else MemoryPath.DEVICE


class Ucx(msgspec.Struct, frozen=True):
    """What UCX could choose from.

    Attributes:
        library: version and build of the UCX library.
        resources: ``TRANSPORT/DEVICE`` names.
    """

    library: str
    resources: tuple[str, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """The transports that connect two processes, without duplicates."""
        names = (resource.partition("/")[0] for resource in self.resources)
        # The transport `self` connects an endpoint with itself, never two engines.
        return tuple(name for name in dict.fromkeys(names) if name != "self")


class Rates(msgspec.Struct, frozen=True):
    """Transfer rates of one kind of memory on prefill's side.

    Attributes:
        read, write: bytes per second, by the peer: a few MiB with one descriptor per page.
        descriptors: descriptors of 4 KiB that the peer reads per second.
    """

    read: float
    write: float
    descriptors: float

    def __str__(self) -> str:
        return f"{self.read / 1e9:.3g} GB/s (READ) and {self.write / 1e9:.3g} GB/s (WRITE)"

    def best_of(self, other: Rates | None) -> Rates:
        if other is None:
            return self
        return Rates(max(self.read, other.read), max(self.write, other.write), max(self.descriptors, other.descriptors))


class LaneFound(msgspec.Struct, frozen=True):
    """The result of one lane.

    Attributes:
        name: name of a UCX transport, or of a NIXL backend.
        transports: the ``UCX_TLS`` that it was tested with; "" for a backend.
        unusable: why nothing could be moved over it alone; "" if it could.
        never: why it is never chosen, so that no test is needed; "" if it may be chosen.
        wrong: descriptions of the transfers whose bytes arrived wrong.
    """

    name: str
    transports: str
    unusable: str = ""
    never: str = ""
    wrong: tuple[str, ...] = ()
    rates: dict[Place, Rates] = {}

    def is_slow(self, slab: Place) -> bool:
        """Whether kvcached's pages are read or written more than `SLOW` times slower than such memory."""
        if self.never:
            return False
        elastic, other = self.rates["elastic"], self.rates[slab]
        return elastic.read * SLOW < other.read or elastic.write * SLOW < other.write

    @property
    def why_not(self) -> str:
        """Why kvcached's pages must not be registered if this lane may be chosen; "" if they may."""
        if self.unusable:
            return f"{self.name} could not be tested: {self.unusable}"
        if self.wrong:
            return f"{self.name} does not move the bytes of a page that was {', or '.join(self.wrong)}"
        return ""

    def why_slow(self, slab: Place) -> str:
        """Why kvcached's pages should not be registered although the bytes are right; "" if they are fast enough.
        ``slab``: where a slab would be."""
        if self.why_not or not self.is_slow(slab):
            return ""
        elastic, other = self.rates["elastic"], self.rates[slab]
        return f"{self.name} moves kvcached's pages at {elastic}, and a slab at {other}"


class Proof(msgspec.Struct, frozen=True):
    """The answer to a `Question`.

    Attributes:
        environment: versions and settings that the proof is valid for; the prover leaves them out.
        ucx: what the prover's UCX could choose from; None if UCX is not among the backends.
        seconds: how long the prover took.
    """

    question: Question
    environment: dict[str, str]
    lanes: tuple[LaneFound, ...]
    ucx: Ucx | None
    seconds: float = 0.0

    @property
    def why_not(self) -> tuple[str, ...]:
        """One reason per lane that could be chosen and must not be used with kvcached's pages."""
        return tuple(filter(None, (lane.why_not for lane in self.lanes)))

    @property
    def unusable(self) -> tuple[str, ...]:
        """The names of the lanes over which nothing could be moved. A later test may succeed."""
        return tuple(lane.name for lane in self.lanes if lane.unusable)

    @property
    def is_direct(self) -> bool:
        return not (self.why_not or self.why_slow)

    @property
    def slab(self) -> MemoryPath:
        """The place of a slab, if KV has to be staged."""
        found = [lane.rates for lane in self.lanes if "host" in lane.rates]
        prefer_host = bool(found) and all(one["host"].write >= HOST_GAIN * one["ordinary"].write for one in found)
        return MemoryPath.HOST if prefer_host else self.question.staged

    @property
    def memory_path(self) -> MemoryPath:
        """What ``memory_path: auto`` selects: kvcached's pages, or a slab."""
        return MemoryPath.DIRECT if self.is_direct else self.slab

    @property
    def remedy(self) -> str:
        """How to limit UCX to the lanes that follow kvcached's pages, if there are both kinds of lanes."""
        good = [lane.name for lane in self.lanes if lane.transports and not (lane.why_not or lane.never)]
        bad = [lane.name for lane in self.lanes if lane.transports and lane.why_not]
        if not (good and bad):
            return "python -m kvcached_nixl doctor shows the result of each transport."
        return (
            f"Limit UCX to the lanes that follow, with UCX_TLS={','.join(good)} in the environment of every server "
            f"(without {', '.join(bad)}; python -m kvcached_nixl doctor shows the results)."
        )

    @property
    def why_slow(self) -> tuple[str, ...]:
        """One reason per lane that is a copy path for kvcached's pages and not for a slab."""
        has_own_memory = self.question.memory_type != "DRAM"
        slab: Place = "host" if has_own_memory and self.slab is MemoryPath.HOST else "ordinary"
        return tuple(filter(None, (lane.why_slow(slab) for lane in self.lanes)))


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

COPIES = frozenset({"cuda_copy", "gdr_copy", "rocm_copy", "ze_copy"})
"""These copy between an accelerator and its host, before and after a transport that connects processes."""


class _Params(ctypes.Structure):
    # ucp_params_t. With this field_mask UCX reads nothing behind the features.
    _fields_ = (("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("rest", ctypes.c_char * 512))


def ucx_of_this_process() -> Ucx:
    """What the UCX library that NIXL has loaded could choose from now. Needs an existing NIXL agent. Opens devices.
    Raises OSError, RuntimeError: UCX is not loaded, or a call fails."""
    mapped = (f"/{line.partition('/')[2]}" for line in Path("/proc/self/maps").read_text().splitlines())
    library = next((path for path in mapped if Path(path).name.startswith("libucp")), None)
    if library is None:
        raise OSError("libucp is not loaded")
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


def _require(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"UCX's {what} returned {ctypes.c_int8(status).value}")
