# SPDX-License-Identifier: Apache-2.0
"""What is asked, and what was found. Pure data; it travels between processes and is kept on disk."""

from __future__ import annotations

import msgspec

from kvcached_nixl.settings import MemoryPath

__all__ = ["AS_CONFIGURED", "SLOW", "LaneFound", "Proof", "Question", "Rates", "Said", "Ucx"]

AS_CONFIGURED = "as configured"
"""All transports that UCX may choose from, together: what it chooses of them on this host."""
SLOW = 4.0
"""A staged hand-over is one copy on the device longer; how many times as long a direct one may take."""


class Question(msgspec.Struct, frozen=True):
    """What would carry KV in the process that asks.

    Attributes:
        device: ``cpu`` or torch's name of an accelerator.
        device_index: which one.
        memory_type: NIXL's word for where the KV cache is.
        backends: NIXL's, as the connector is configured.
    """

    device: str
    device_index: int
    memory_type: str
    backends: tuple[str, ...]

    @property
    def staged(self) -> MemoryPath:
        """Where a slab is, unless it is said: where KV stays longest on the device."""
        return MemoryPath.HOST if self.device == "cpu" else MemoryPath.DEVICE


class Ucx(msgspec.Struct, frozen=True):
    """What UCX could choose from.

    Attributes:
        library: its version, and which build of it.
        resources: ``TRANSPORT/DEVICE``.
    """

    library: str
    resources: tuple[str, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """Its transports between two processes, each once."""
        names = (resource.partition("/")[0] for resource in self.resources)
        # Both ends of `self` are one endpoint; two engines never are.
        return tuple(name for name in dict.fromkeys(names) if name != "self")


class Rates(msgspec.Struct, frozen=True):
    """Of one kind of memory on the side that prefill's KV is on; in bytes a second, and descriptors a second.

    Attributes:
        read, write: by the peer, a few MiB in one descriptor a page.
        descriptors: of 4 KiB each, read.
    """

    read: float
    write: float
    descriptors: float

    def best_of(self, other: Rates | None) -> Rates:
        """The higher ones of two takings."""
        if other is None:
            return self
        return Rates(
            *(max(pair) for pair in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )


class LaneFound(msgspec.Struct, frozen=True):
    """What was found of one lane.

    Attributes:
        name: UCX's word for a transport, or a NIXL backend's.
        transports: ``UCX_TLS`` that it was proved under; "" for a backend.
        unusable: why nothing could be moved over it alone; "" if it could.
        never: why it is never chosen, so that nothing has to be known of it; "" if it may be.
        wrong: what arrived as something else than it is, in words.
        rates: ``elastic`` for kvcached's pages, ``ordinary`` for other memory of the device, ``host`` where that is
            another one.
    """

    name: str
    transports: str
    unusable: str = ""
    never: str = ""
    wrong: tuple[str, ...] = ()
    rates: dict[str, Rates] = {}

    @property
    def is_slow(self) -> bool:
        """Whether kvcached's pages are moved at less than a `SLOW`-th of what other memory is."""
        if self.never:
            return False
        elastic, ordinary = self.rates["elastic"], self.rates["ordinary"]
        return elastic.read * SLOW < ordinary.read or elastic.write * SLOW < ordinary.write

    @property
    def why_not(self) -> str:
        """Why kvcached's pages must not be registered where this may be chosen, in words; "" if they may."""
        if self.unusable:
            return f"nothing is known of {self.name}: {self.unusable}"
        if self.wrong:
            return f"{self.name} does not move the bytes of a page that was {', or '.join(self.wrong)}"
        return ""

    @property
    def why_slow(self) -> str:
        """The same of what is right, and not worth to be used so."""
        if self.why_not or not self.is_slow:
            return ""
        rates = {place: f"{min(one.read, one.write) / 1e9:.3g} GB/s" for place, one in self.rates.items()}
        return f"{self.name} moves kvcached's pages at {rates['elastic']}, and other memory at {rates['ordinary']}"


class Said(msgspec.Struct, frozen=True):
    """What a prover says. ``ucx``: None where UCX is not among the backends."""

    lanes: tuple[LaneFound, ...]
    ucx: Ucx | None


class Proof(msgspec.Struct, frozen=True):
    """The answer to a `Question`.

    Attributes:
        environment: versions and settings that it holds for; another one is another question.
        ucx: what the prover's UCX could choose from.
        seconds: that it took.
    """

    question: Question
    environment: dict[str, str]
    lanes: tuple[LaneFound, ...]
    ucx: Ucx | None
    seconds: float

    @property
    def why_not(self) -> tuple[str, ...]:
        """Of every lane that could be chosen, and must not be used with kvcached's pages."""
        return tuple(filter(None, (lane.why_not for lane in self.lanes)))

    @property
    def unusable(self) -> tuple[str, ...]:
        """The names of the lanes over which nothing could be moved; some other time it may be."""
        return tuple(lane.name for lane in self.lanes if lane.unusable)

    @property
    def is_direct(self) -> bool:
        """Whether kvcached's pages may be registered, and are worth it."""
        return not (self.why_not or self.why_slow)

    @property
    def memory_path(self) -> MemoryPath:
        """What ``auto`` comes to: kvcached's pages, or a slab."""
        return MemoryPath.DIRECT if self.is_direct else self.question.staged

    @property
    def remedy(self) -> str:
        """How to have UCX choose from the lanes that follow only, in words; where that changes something."""
        good = [lane.name for lane in self.lanes if lane.transports and not (lane.why_not or lane.never)]
        bad = [lane.name for lane in self.lanes if lane.transports and lane.why_not]
        if not (good and bad):
            return "python -m kvcached_nixl doctor shows what was found of each transport."
        return (
            f"Have UCX choose from what follows, with UCX_TLS={','.join(good)} in the environment of every server "
            f"(without {', '.join(bad)}; python -m kvcached_nixl doctor shows what was found)."
        )

    @property
    def why_slow(self) -> tuple[str, ...]:
        """Of every lane that is a copy path for kvcached's pages, and for them only."""
        return tuple(filter(None, (lane.why_slow for lane in self.lanes)))
