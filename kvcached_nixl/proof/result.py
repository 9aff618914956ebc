# SPDX-License-Identifier: Apache-2.0
"""Questions and results of a proof. Pure data, sent between processes and stored on disk."""

from __future__ import annotations

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
    def prefers_host(self) -> bool:
        """Whether host memory is written `HOST_GAIN` times faster than the device's. A slab is written."""
        return self.rates["host"].write >= HOST_GAIN * self.rates["ordinary"].write

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
        found = [lane for lane in self.lanes if "host" in lane.rates]
        return MemoryPath.HOST if found and all(lane.prefers_host for lane in found) else self.question.staged

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
