# SPDX-License-Identifier: Apache-2.0
"""The handshake: what two engines must have in common before bytes move, and what their ranks tell each other.

The protocol's number (`wire.manifest.PROTOCOL`) is part of the tag. Whatever changes the meaning of a message, of a
manifest or of this handshake needs another number: two that mean different things would move wrong bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Count, Incarnation, Rank, TpSize, decoder, require
from kvcached_nixl.wire.manifest import PROTOCOL
from kvcached_nixl.wire.planes import GroupMemory

_NAME = "kvcached_nixl"
MOST_NAMED_TENSORS, MOST_NAMED_FILES = 1 << 14, 1024

Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""Checksum of a content, 32 hexadecimal digits; "" if it is not known."""
MemoryType: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's names for host memory and for accelerator memory."""
Answers: TypeAlias = Mapping[tuple[int, int], tuple[str, bytes]]
"""What an engine answers peers: (pipeline stage, rank) -> (tag, `Answer`, encoded)."""


class Tag(msgspec.Struct, frozen=True):
    """Everything in which two engines must be equal. It takes the place of vLLM's compatibility hash, so a stock peer
    refuses it with a message that shows both as text.

    Attributes:
        mode: ``pull`` or ``push``.
        facts: everything but the weights that the bytes depend on, as (name, value): vLLM, configuration, dtype, ...
        cells: per KV-cache group, bytes of a cell of each kind of plane; of states, of their parts if known.
    """

    mode: str
    facts: tuple[tuple[str, str], ...]
    cells: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        facts = "; ".join(f"{name} {value}" for name, value in self.facts)
        groups = (" and ".join(f"cells of {size} bytes" for size in one) for one in self.cells)
        cells = ", ".join(f"group {place}: {group}" for place, group in enumerate(groups))
        return f"{_NAME}/{PROTOCOL} {self.mode} [{facts}; {cells}]"


class Tensors(msgspec.Struct, frozen=True):
    """Tensors in a rank's memory.

    Attributes:
        layout: checksum of names, types, shapes, and place in the tensor- and expert-parallel groups.
        content: checksum of all their bytes; "" if not all can be read, or what could not be read may have changed.
        each: 4 bytes of each tensor's checksum, in the order of their names; empty of more than `MOST_NAMED_TENSORS`.
    """

    layout: Checksum = ""
    content: Checksum = ""
    each: Annotated[bytes, msgspec.Meta(max_length=4 * MOST_NAMED_TENSORS)] = b""

    def is_comparable(self, other: Tensors) -> bool:
        return bool(self.layout == other.layout and self.content and other.content)


class Weights(msgspec.Struct, frozen=True):
    """Identity of a rank's weights by content, not by name or path. Includes draft models that compute KV.

    Attributes:
        memory: as they are now.
        loaded: as they were loaded, before kernels rewrote them; without content if they have changed since.
        files: checksum of the files that they were loaded from; "" if they have changed since, or if it is unknown.
        each_file: (name, 8 digits of its checksum) of each file, for `misfit` to name one.
        code: checksum of Python code of the model and of what is not vLLM's, and of choices that follow from the
            longest prompt (`adapter.computes`); "" if it was not read.
        note: why something of this is not known, as text.
    """

    memory: Tensors = Tensors()
    loaded: Tensors = Tensors()
    files: Checksum = ""
    each_file: Annotated[tuple[tuple[str, str], ...], msgspec.Meta(max_length=MOST_NAMED_FILES)] = ()
    code: Checksum = ""
    note: Annotated[str, msgspec.Meta(max_length=1000)] = ""

    def misfit(self, theirs: Weights, names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> str:
        """Why KV that was computed with these weights cannot be used with those, as text; "" if it can. ``names``: of
        this side's tensors in order, by their `Tensors.layout`.

        Equal memory fits, and so does what was loaded if it was equal: kernels may rewrite it as they like. Files
        decide where neither can be compared: they are read in part.
        """
        if self.code != theirs.code:
            found, expected = theirs.code or "none", self.code or "none"
            return f"found code of the model, or rotary angles, with checksum {found}; expected {expected}"
        pairs = (self.memory, theirs.memory), (self.loaded, theirs.loaded)
        comparable = [(ours, other) for ours, other in pairs if ours.is_comparable(other)]
        if comparable:
            is_equal = any(ours.content == other.content for ours, other in comparable)
            return "" if is_equal else _other_tensor(*comparable[0], names)
        if self.files and theirs.files:
            if self.files == theirs.files:
                return ""
            here, there = dict(self.each_file), dict(theirs.each_file)
            differ = sorted(name for name in here.keys() & there.keys() if here[name] != there[name])
            named = f"{differ[0]} differs" if differ else f"{len(there)} files there, {len(here)} here"
            return f"found weights of files with checksum {theirs.files}; expected {self.files} ({named:.300})"
        unknown = [f"{whose}: {one.note or 'no files are known'}" for whose, one in (("here", self), ("there", theirs))]
        return (
            "their weights lie otherwise in memory (tensor-parallel size, kernels), or not all of them can be "
            "read, and files cannot be compared (" + "; ".join(unknown) + ")"
        )


def _other_tensor(ours: Tensors, theirs: Tensors, names: Mapping[str, Sequence[str]]) -> str:
    known = names.get(ours.layout, ())
    here, there = ([one.each[at : at + 4] for at in range(0, len(ours.each), 4)] for one in (ours, theirs))
    differ = [name for name, one, other in zip(known, here, there, strict=False) if one != other]
    shown = f" ({len(differ)} of {len(known)} tensors differ, the first is {differ[0]:.200})" if differ else ""
    return f"found weights with checksum {theirs.content}; expected {ours.content}{shown}"


class Process(msgspec.Struct, frozen=True):
    """Identifies a rank's process for peers on the same kernel. "" and 0 if that could not be found out.

    Attributes:
        boot_id: the kernel's, drawn when it booted; UCX tells hosts apart by it, too.
        namespaces: the process's pid namespace, and its time namespace if there is one.
        pid, started: in that namespace; its start time in clock ticks since boot. Together they are unique.
    """

    boot_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    namespaces: Annotated[str, msgspec.Meta(max_length=128)] = ""
    pid: Count = 0
    started: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0


class RankHandshake(msgspec.Struct, frozen=True):
    """What a rank tells a peer's rank that wants to move bytes to or from it.

    Attributes:
        device_id: device of ``groups``, as NIXL counts devices.
        groups: where this rank keeps each KV-cache group, in the same order on both sides.
        token_table_address: address of the table of ownership tokens (`worker.transfer.ownership_tokens`), in
            registered host memory.
        memory_type: NIXL's name for the kind of memory that ``groups`` are in.
        is_staged: ``groups`` are in a slab that KV is staged through; else it is the KV cache itself.
    """

    engine_id: EngineId
    tp_size: TpSize
    tp_rank: Rank
    agent_metadata: bytes
    device_id: Count
    groups: Annotated[tuple[GroupMemory, ...], msgspec.Meta(min_length=1, max_length=64)]
    # Readers add an offset to it in 64 bits.
    token_table_address: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    memory_type: MemoryType
    is_staged: bool
    weights: Weights
    process: Process
    pp_size: TpSize
    pp_rank: Rank

    def __post_init__(self) -> None:
        require(self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")
        require(self.pp_rank < self.pp_size, "a stage below the pipeline-parallel size")
        for one in (planes for group in self.groups for planes in group.all):
            is_placed = self.tp_size % one.copies == 0 and one.copy == self.tp_rank % one.copies
            require(is_placed, "its place among the copies")


class Answer(msgspec.Struct, frozen=True):
    """What a side channel answers: a rank's encoded handshake, and its engine's incarnation."""

    incarnation: Incarnation
    rank: bytes


read_answer: decoder[Answer] = decoder(Answer)
read_rank: decoder[RankHandshake] = decoder(RankHandshake)


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


class Kind(NamedTuple):
    """What a handshake compares, as numbers for metrics: they say which engines' handshakes would succeed. Numbers of
    52 bits, which a float keeps; 0 is not known. Equal texts have equal numbers in every process.

    Attributes:
        compatibility: of the tag: everything but the weights.
        checkpoint: of the content of the files that the weights were loaded from.
        weights: of the content of the weights in memory, and of their layout, of all ranks.
    """

    compatibility: int
    checkpoint: int
    weights: int

    @classmethod
    def of(cls, answers: Sequence[tuple[str, bytes]]) -> Kind:
        """Returns the kind of an engine whose side channel answers so for each of its ranks, in their order: (tag,
        metadata). Raises `Malformed`: metadata cannot be read."""
        weights = [read_rank(read_answer(metadata).rank).weights for _, metadata in answers]
        checkpoints = {one.files for one in weights}
        is_whole = all(one.memory.content for one in weights)
        return cls(
            _number("\n".join(sorted({tag for tag, _ in answers}))),
            _number(checkpoints.pop()) if len(checkpoints) == 1 else 0,
            _number("\n".join(f"{one.memory.layout} {one.memory.content}" for one in weights)) if is_whole else 0,
        )


def _number(text: str) -> int:
    if not text:
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 12 or 1
