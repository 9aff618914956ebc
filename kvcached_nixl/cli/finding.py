# SPDX-License-Identifier: Apache-2.0
"""One thing that a report of the doctor names, with the four sentences of a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_nixl.errors import Refused

__all__ = ["Finding", "of_refusal"]


@dataclass(frozen=True)
class Finding:
    """What was found on this host or in its configuration.

    Attributes:
        name: what it is about, in a word or two.
        is_wrong: a server would not start, or hand-overs would fail. Otherwise it is advice.
    """

    name: str
    found: str
    expected: str
    consequence: str
    remedy: str
    is_wrong: bool = True


def of_refusal(name: str, refusal: Refused) -> Finding:
    """The finding for what a server would refuse at its start."""
    return Finding(name, refusal.found, refusal.expected, refusal.consequence, refusal.remedy)
