# SPDX-License-Identifier: Apache-2.0
"""What a decode engine that asks prefill servers says of it. Its side channel sends it with its `Headroom`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

__all__ = ["AskingFigures", "Computed", "Ended"]

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Ended(str, Enum):
    """How a question has ended: a label of the metric."""

    ANSWERED = "answered"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"


class Computed(str, Enum):
    """Why decode computes a prompt itself: a label of the metric."""

    SHORT = "short"
    CACHED = "cached"
    NOT_ASKABLE = "not_askable"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    FAILED = "failed"


class AskingFigures(msgspec.Struct, forbid_unknown_fields=True):
    """Counts are since the engine's start.

    Attributes:
        held: requests that no server is asked for at this moment.
        asked: questions that have no answer yet.
        promised_blocks: of requests that were asked for and have no blocks yet.
        ended: questions.
        computed: prompts.
    """

    held: _Number = 0
    asked: _Number = 0
    promised_blocks: _Number = 0
    ended: dict[Ended, _Number] = msgspec.field(default_factory=lambda: dict.fromkeys(Ended, 0))
    computed: dict[Computed, _Number] = msgspec.field(default_factory=lambda: dict.fromkeys(Computed, 0))
