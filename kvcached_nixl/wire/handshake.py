# SPDX-License-Identifier: Apache-2.0
"""The handshake: what two engines must have in common before bytes move, and what their ranks tell each other.

Protocol history (one line per change of meaning; the number is part of the tag):

    1: kvcached geometry: blocks narrowed to the planned ones, contiguous or non-contiguous, equal splits on both sides.
    2: the tag names the direction, pull or push; push sends its own metadata in place of vLLM's.
    3: pull: each rank keeps an ownership token per request for decode to read, in front of the agent's metadata.
    4: one hand-over for both directions, described by a manifest (`wire.manifest`); vLLM's metadata is not used.
    5: each side names the memory that KV is moved from and to; if a side stages, KV is written, in pull, too.
    6: a registration may ask for checksums of the bytes that are sent, or that were READ already.
    7: weights are identified by their content (`Weights`), which may change; prefill may revoke an offer at any time.
    8: fields named as in docs/design/glossary.md: incarnation, checksum, ownership token, staging grant.
    9: memory, manifests and registrations are described by KV-cache group, with a block size of its own for each.
    10: a group may keep states: blocks of one token, the last one, with padding behind their cell.
    11: the tag has no arrangement: planes say where cells are, so peers may lay their blocks out differently. States
        are described by part, too, for peers with another tensor-parallel size.
    12: planes say how many ranks hold the same heads; of prefill's ranks with copies one moves them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Count, Incarnation, Rank, TpSize, decoder, require
from kvcached_nixl.wire.manifest import PROTOCOL
from kvcached_nixl.wire.planes import GroupMemory, Planes

__all__ = [
    "Answer",
    "MemoryType",
    "Process",
    "RankHandshake",
    "Tag",
    "Weights",
    "differences",
    "is_tagged",
    "read_answer",
    "read_rank",
]

_NAME = "kvcached_nixl"

MemoryType: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's names for host memory and for accelerator memory."""


class Tag(msgspec.Struct, frozen=True):
    """Everything in which two engines must be equal. It takes the place of vLLM's compatibility hash.

    vLLM's own comparison refuses a peer that differs, and its message shows both tags as text; a stock peer has its own
    hash and never compares equal.

    Attributes:
        direction: ``pull`` or ``push``.
        facts: everything but the weights that the bytes depend on, as (name, value): vLLM, configuration, dtype, ...
        planes: per KV-cache group (number, bytes of a cell) of each kind of plane; of states, of their parts if known.
    """

    mode: str
    facts: tuple[tuple[str, str], ...]
    planes: tuple[tuple[tuple[int, int], ...], ...]

    def __str__(self) -> str:
        facts = "; ".join(f"{name} {value}" for name, value in self.facts)
        groups = (
            " and ".join(f"{count} planes of cells of {size} bytes" for count, size in one) for one in self.planes
        )
        planes = ", ".join(f"group {place}: {group}" for place, group in enumerate(groups))
        return f"{_NAME}/{PROTOCOL} {self.mode} [{facts}; {planes}]"


Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""Checksum of a content, 32 hexadecimal digits; "" if it is not known."""


class Weights(msgspec.Struct, frozen=True):
    """Identity of a rank's weights by content, not by name or path. Includes draft models that compute KV.

    Attributes:
        layout: checksum of how they lie in the rank's memory: names, types, shapes, place in the tensor-parallel group,
            device.
        content: checksum of the weights in memory. Compares two ranks with equal layouts.
        checkpoint: checksum of the files that they were loaded from, if the weights still are what the files hold.
            Compares ranks with different layouts, such as other tensor-parallel sizes.
        origin: checksum of the files that they were loaded from; kept if the weights that can be read have changed
            since, but not all weights can be read. "" if it is not known, or if ``content`` covers all weights and they
            have changed.
    """

    layout: Checksum
    content: Checksum
    checkpoint: Checksum
    origin: Checksum = ""

    def misfit(self, theirs: Weights) -> str:
        """Why KV that was computed with these weights cannot be used with those, as text; "" if it can."""
        if self.layout == theirs.layout and self.content and theirs.content:
            if self.content != theirs.content:
                return f"found weights whose content is {theirs.content}; expected {self.content}, as here"
            if self.origin == theirs.origin or not (self.origin and theirs.origin):
                return ""
            return f"found weights that were loaded from files whose content is {theirs.origin}; expected {self.origin}"
        if not (self.checkpoint and theirs.checkpoint):
            return (
                "the peer's weights have another layout in memory (another tensor-parallel size, device or way of "
                "loading), and at least one side's weights are not those of a checkpoint on a file system, so nothing "
                "can be compared"
            )
        if self.checkpoint == theirs.checkpoint:
            return ""
        return f"found weights of a checkpoint whose content is {theirs.checkpoint}; expected {self.checkpoint}"


class Process(msgspec.Struct, frozen=True):
    """Identifies a rank's process for peers on the same kernel. "" and 0 if that could not be found out.

    Attributes:
        boot_id: the kernel's, drawn when it booted; UCX tells hosts apart by it, too.
        namespaces: the process's pid namespace, and its time namespace if there is one.
        pid: in that namespace.
        started: start time in clock ticks since boot. Together with ``pid`` it is unique.
    """

    boot_id: str = ""
    namespaces: str = ""
    pid: Count = 0
    started: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.started < 2**62, "ticks of 62 bits")
        require(len(self.boot_id) <= 128 and len(self.namespaces) <= 128, "a boot id and namespaces of 128 letters")


class RankHandshake(msgspec.Struct, frozen=True):
    """What a rank tells a peer's rank that wants to move bytes to or from it.

    Attributes:
        agent_metadata: the NIXL agent's metadata.
        device_id: device of ``groups``, as NIXL counts devices.
        groups: where this rank keeps each KV-cache group, in the same order on both sides.
        token_table_address: address of the table of ownership tokens (`worker.transfer.ownership_tokens`), in
            registered host memory.
        memory_type: NIXL's name for the kind of memory that ``groups`` are in.
        is_staged: ``groups`` are in a slab that KV is staged through; else it is the KV cache itself.
        weights: the weights that it computes with.
        process: the process that reads and writes.
    """

    engine_id: EngineId
    tp_size: TpSize
    tp_rank: Rank
    agent_metadata: bytes
    device_id: Count
    groups: tuple[GroupMemory, ...]
    token_table_address: int
    memory_type: MemoryType
    is_staged: bool
    weights: Weights
    process: Process

    def __post_init__(self) -> None:
        require(self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")
        require(0 < len(self.groups) <= 64, "1 to 64 KV-cache groups")
        require(all(self._is_placed(one) for group in self.groups for one in group.all), "its place among the copies")
        # Readers add an offset to it in 64 bits.
        require(0 <= self.token_table_address < 2**62, "an address of 62 bits")

    def _is_placed(self, planes: Planes) -> bool:
        return self.tp_size % planes.copies == 0 and planes.copy == self.tp_rank % planes.copies


class Answer(msgspec.Struct, frozen=True):
    """What a side channel answers: a rank's encoded handshake, and its engine's incarnation."""

    incarnation: Incarnation
    rank: bytes


_read_answer, _read_rank = decoder(Answer), decoder(RankHandshake)


def read_answer(encoded: bytes) -> Answer:
    """Raises `Malformed`."""
    found: Answer = _read_answer(encoded)
    return found


def read_rank(encoded: bytes) -> RankHandshake:
    """Raises `Malformed`."""
    found: RankHandshake = _read_rank(encoded)
    return found


def differences(found: str, expected: str) -> str:
    """The parts in which two tags differ, as text; both tags in full if the parts cannot be compared."""
    ours, theirs = ({part.strip() for part in re.split(r"; |, |[\[\]]", tag)} for tag in (expected, found))
    if not is_tagged(found) or ours == theirs:
        return f"found {found!r:.2000}; expected {expected!r}"
    there, here = (", ".join(sorted(one)) or "nothing" for one in (theirs - ours, ours - theirs))
    return f"found {there:.1000}; expected {here:.1000}"


def is_tagged(compatibility: str) -> bool:
    """Whether a peer's compatibility string is a tag of this package, of any protocol number."""
    return compatibility.startswith(f"{_NAME}/")
