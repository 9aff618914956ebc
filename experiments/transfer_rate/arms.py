# SPDX-License-Identifier: Apache-2.0
"""The arms, layouts, transports and load that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BLOCK_SIZE = 16
LAYERS = 32
CELL_BYTES = 256
"""K or V of one token in one layer on one rank: one head of 128 numbers of 16 bits."""
PLANES = 2 * LAYERS
PAGE_BYTES = BLOCK_SIZE * CELL_BYTES
BLOCK_BYTES = PLANES * PAGE_BYTES
SPARE_BLOCKS = 1.25
"""Blocks in a pool, as a multiple of those that one hand-over needs."""

CONTIGUOUS, APART = "contiguous", "non-contiguous"
LAYOUTS = (CONTIGUOUS, APART)
DIRECTIONS = ("pull", "push")


@dataclass(frozen=True)
class Over:
    """A transport, selected by environment variables that UCX reads."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


TRANSPORTS = (Over("shared memory"), Over("TCP", {"UCX_TLS": "tcp"}))


@dataclass(frozen=True)
class Arm:
    """One arm. ``batched``: plain NIXL with the descriptors cut into transfers as this package cuts them."""

    name: str
    is_ours: bool = False
    batched: bool = False
    computing: bool = False


PLAIN, OURS = Arm("plain NIXL"), Arm("hand-over", is_ours=True)
PLAIN_BATCHED = Arm("plain NIXL, in batches", batched=True)
PLAIN_COMPUTING = Arm("plain NIXL, engine computing", computing=True)
OURS_COMPUTING = Arm("hand-over, engine computing", is_ours=True, computing=True)
ARMS = (PLAIN, OURS, PLAIN_BATCHED, OURS_COMPUTING, PLAIN_COMPUTING)


@dataclass(frozen=True)
class Load:
    tokens: int
    rounds: int

    @property
    def num_bytes(self) -> int:
        return self.tokens // BLOCK_SIZE * BLOCK_BYTES


FULL, QUICK = Load(65_536, 5), Load(8_192, 3)


@dataclass(frozen=True)
class Sample:
    """One measured transfer.

    Attributes:
        parts: seconds of a hand-over, by what they were spent on.
        piece_seconds: how long after it was due each piece of the engine's work had ended meanwhile, on the side that
            moves the bytes; see `timing.Computing`.
    """

    transport: str
    direction: str
    layout: str
    arm: str
    seconds: float
    descriptors: int
    parts: Mapping[str, float] = field(default_factory=dict)
    piece_seconds: tuple[float, ...] = ()
