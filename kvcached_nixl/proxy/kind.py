# SPDX-License-Identifier: Apache-2.0
"""Which servers can hand over to each other, from what their metrics say of the handshake (`compat.metrics`)."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Capacity", "Kind", "capacity_of", "kind_of"]

_GAUGE = re.compile(
    rb"^kvcached_nixl:(compatibility|checkpoint|weights)_id(?:\{[^\n]*\})? "
    rb"([0-9]{1,17}(?:\.[0-9]{1,17})?(?:e\+?[0-9]{1,3})?)$",
    re.M,
)


_TOKENS = re.compile(
    rb"^kvcached_nixl:(free|used|queued)_tokens(?:\{[^\n]*\})? ([0-9]{1,17}(?:\.[0-9]{1,17})?(?:e\+?[0-9]{1,2})?)$",
    re.M,
)


class Capacity(NamedTuple):
    """What a server's metrics say of its memory, in tokens of KV, of all its engines.

    Attributes:
        tokens: that it can hold: those in use, and those that it could take now. Changes with other engines' needs; 0
            if they have taken all of the device.
        demand_tokens: in use or queued.
        num_engines: how many it has said it of.
    """

    tokens: float
    demand_tokens: float
    num_engines: int = 1

    @property
    def is_filling(self) -> bool:
        """Whether it should be looked at often."""
        return self.demand_tokens >= self.tokens / 2


def capacity_of(metrics: bytes) -> Capacity | None:
    """Returns the capacity of a server; None if its ``/metrics`` do not say it of each of its engines."""
    found: dict[bytes, list[float]] = {b"free": [], b"used": [], b"queued": []}
    for name, value in _TOKENS.findall(metrics):
        found[name].append(float(value))
    free, used, queued = found.values()
    if not free or not len(free) == len(used) == len(queued):
        return None
    return Capacity(sum(free) + sum(used), sum(used) + sum(queued), len(free))


class Kind(NamedTuple):
    """What a handshake compares, as numbers of 52 bits; 0 is not known.

    Attributes:
        compatibility: of everything but the weights: protocol, direction, versions, configuration, layout.
        checkpoint: of the content of the files that the weights were loaded from.
        weights: of the content of the weights, and of how they lie in memory.
    """

    compatibility: float
    checkpoint: float
    weights: float

    def fits(self, other: Kind) -> bool:
        """Whether the handshake of such servers would succeed."""
        if self.compatibility != other.compatibility:
            return False
        return 0 < self.weights == other.weights or 0 < self.checkpoint == other.checkpoint

    @property
    def group(self) -> tuple[float, float]:
        """Equal for servers that differ only in how they lay the same model out."""
        return self.compatibility, self.checkpoint or self.weights


def kind_of(metrics: bytes) -> Kind | None:
    """Returns the kind of a server; None if its metrics do not say it, or if its engines differ.

    Engines with expert parallelism have other weights each, of one checkpoint.

    Args:
        metrics: its ``/metrics``.
    """
    found: dict[bytes, set[float]] = {}
    for name, value in _GAUGE.findall(metrics):
        found.setdefault(name, set()).add(float(value))
    said = [found.get(name, set()) for name in (b"compatibility", b"checkpoint", b"weights")]
    if len(said[2]) > 1:
        said[2] = {0.0}
    if any(len(one) != 1 for one in said) or said[0] == {0.0}:
        return None
    return Kind(*(one.pop() for one in said))
