# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree on before bytes move, and what their ranks tell each other then.

Protocol history (one line per change of meaning; the number is part of the tag):

    1: kvcached geometry: blocks narrowed to the planned ones, contiguous or non-contiguous, equal splits on both sides.
    2: the tag names who moves the bytes, pull or push; push offers its own metadata in place of vLLM's.
    3: pull: each rank keeps a word per request for decode to look at, in front of the agent's metadata.
    4: one hand-over in two directions, which says what it is (`wire.manifest`); no metadata of vLLM's any more.
    5: each side says what memory KV is moved from and to; what a side stages is written, in pull, too.
    6: a registration may ask for a digest of the bytes that are sent, of such as were READ already, too.
    7: weights are known by their content (`Weights`), which may change; prefill may take an offer back at any time.
    8: fields in the words of docs/design/glossary.md: incarnation, checksum, ownership token, staging grant.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.checked import Count, Incarnation, Rank, TpSize, decoder, require
from kvcached_nixl.wire.manifest import PROTOCOL
from kvcached_nixl.wire.planes import Planes

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
"""NIXL's words for memory of the host, and of an accelerator."""


class Tag(msgspec.Struct, frozen=True):
    """Everything in which two engines must be equal. It stands in place of vLLM's compatibility hash.

    vLLM's own comparison refuses a peer that differs, and its message shows both tags in words; a stock peer has a hash
    of its own and never compares equal.

    Attributes:
        direction: who moves the bytes, ``pull`` or ``push``.
        facts: what the bytes follow from beside the weights, each as (name, value): vLLM, configuration, dtype, ...
        arrangement: how kvcached laid the blocks out.
        planes: (number, bytes of a cell) of each kind of plane.
    """

    direction: str
    facts: tuple[tuple[str, str], ...]
    arrangement: str
    planes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        facts = "; ".join(f"{name} {value}" for name, value in self.facts)
        planes = ", ".join(f"{count} planes of cells of {size} bytes" for count, size in self.planes)
        return f"{_NAME}/{PROTOCOL} {self.direction} [{facts}; {self.arrangement}; {planes}]"


Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""Of something's content; "" where that is not known."""


class Weights(msgspec.Struct, frozen=True):
    """What a rank's weights are, draft models' that compute KV among them. Not what they are called, or where they lie.

    Attributes:
        layout: how they lie in the rank's memory: names, types, shapes, place in the tensor-parallel group, device.
        content: of what is there. Two ranks of one layout are compared by it.
        checkpoint: of the files that they were loaded from, if that is what they are. Ranks of other layouts, as of
            other tensor-parallel sizes, are compared by it.
        origin: of the files that they were loaded from, also where what can be read of them has changed since and not
            all of them can; "" where that is not known, or ``content`` is of all of them and they have changed.
    """

    layout: Checksum
    content: Checksum
    checkpoint: Checksum
    origin: Checksum = ""

    def misfit(self, theirs: Weights) -> str:
        """Why KV that was computed with these is not for those, in words; "" if it is."""
        if self.layout == theirs.layout and self.content and theirs.content:
            if self.content != theirs.content:
                return f"found weights whose content is {theirs.content}; expected {self.content}, as here"
            if self.origin == theirs.origin or not (self.origin and theirs.origin):
                return ""
            return f"found weights that were loaded from files whose content is {theirs.origin}; expected {self.origin}"
        if not (self.checkpoint and theirs.checkpoint):
            return (
                "the weights lie otherwise in memory there (another tensor-parallel size, device or way of loading), "
                "and not both sides hold what a checkpoint on a file system holds, so nothing can be compared"
            )
        if self.checkpoint == theirs.checkpoint:
            return ""
        return f"found weights of a checkpoint whose content is {theirs.checkpoint}; expected {self.checkpoint}"


class Process(msgspec.Struct, frozen=True):
    """Which process a rank is, for whoever shares its kernel. "" and 0 where that could not be found out.

    Attributes:
        boot_id: of the kernel, drawn when it started; UCX tells hosts apart by it, too.
        namespaces: of process ids, and of time where there are such.
        pid: in that namespace.
        started: in the kernel's ticks. With ``pid``, no other process's.
    """

    boot_id: str = ""
    namespaces: str = ""
    pid: Count = 0
    started: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.started < 2**62, "ticks of 62 bits")
        require(len(self.boot_id) <= 128 and len(self.namespaces) <= 128, "a boot id and namespaces of 128 letters")


class RankHandshake(msgspec.Struct, frozen=True):
    """What a rank tells one that wants to move bytes to or from it.

    Attributes:
        agent_metadata: NIXL's own.
        device_id: of ``memory``, as NIXL counts devices.
        memory: the kinds of planes of this rank, in an order that both sides have.
        kernel_blocks_per_block: blocks of the attention kernel in a block of the scheduler.
        words_address: of the table of words (`worker.transfer.ownership_tokens`), in registered host memory.
        memory_type: of ``memory``, NIXL's word.
        is_staged: ``memory`` is a slab, through which KV passes; else the KV cache itself.
        weights: what it computes with.
        process: which one reads and writes.
    """

    engine_id: EngineId
    tp_size: TpSize
    tp_rank: Rank
    agent_metadata: bytes
    device_id: Count
    memory: tuple[Planes, ...]
    kernel_blocks_per_block: Count
    token_table_address: int
    memory_type: MemoryType
    is_staged: bool
    weights: Weights
    process: Process

    def __post_init__(self) -> None:
        require(self.tp_rank < self.tp_size, "a rank below the tensor-parallel size")
        require(0 < len(self.memory) <= 64 and self.kernel_blocks_per_block > 0, "planes, and kernel blocks in a block")
        # Whoever looks a word up adds to it, in 64 bits.
        require(0 <= self.token_table_address < 2**62, "an address of 62 bits")


class Answer(msgspec.Struct, frozen=True):
    """What a side channel answers: a rank's handshake, and the start of its engine."""

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
    """What of two tags differs, in words; both in full where that cannot be told."""
    ours, theirs = ({part.strip() for part in re.split(r"; |, |[\[\]]", tag)} for tag in (expected, found))
    if not is_tagged(found) or ours == theirs:
        return f"found {found!r:.2000}; expected {expected!r}"
    there, here = (", ".join(sorted(one)) or "nothing" for one in (theirs - ours, ours - theirs))
    return f"found {there:.1000}; expected {here:.1000}"


def is_tagged(compatibility: str) -> bool:
    """Whether a peer's compatibility string was signed by this package, in any protocol."""
    return compatibility.startswith(f"{_NAME}/")
