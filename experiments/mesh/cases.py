# SPDX-License-Identifier: Apache-2.0
"""One hand-over of the mesh, from the router's point of view."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.mesh.members import Member, Task


class End(enum.Enum):
    """What the client got.

    FAILED: the request got no KV, although both engines stayed alive and neither they nor their connection had a fault.
    """

    RIGHT = "right bytes"
    WRONG = "wrong bytes"
    DISTURBED = "none: an engine ended, stood still or lost a connection"
    ABORTED = "none: the client had gone"
    FAILED = "none, though nothing was done to it"


@dataclass(eq=False)
class Case:
    """One hand-over.

    Attributes:
        seed: determines its prompt.
        is_decode_first: both sides get their requests together, decode a little earlier.
        aborts_at: round in which its client disconnects; None if it does not.
        troubles: number of faults of its two engines when it began.
        is_cut: the connection of the two engines was lost, and neither has noticed yet.
        waiting: number of its requests that have not ended.
    """

    number: int
    seed: int
    num_tokens: int
    prefill: Member
    decode: Member
    is_decode_first: bool
    aborts_at: int | None
    troubles: tuple[int, int]
    is_cut: bool = False
    prefill_task: Task | None = None
    decode_task: Task | None = None
    waiting: int = 0
    is_aborted: bool = False
    has_kv: bool = False
    is_wrong: bool = False

    @property
    def name(self) -> str:
        return f"hand-over-{self.number}"

    @property
    def is_moved(self) -> bool:
        """Whether decode has KV that it did not have before."""
        return self.has_kv and self.decode_task is not None and self.decode_task.num_cached < self.num_tokens

    @property
    def end(self) -> End:
        if self.is_wrong:
            return End.WRONG
        if self.has_kv:
            return End.RIGHT
        sides = (self.prefill, self.decode)
        lived = all(side.is_alive for side in sides)
        if self.is_cut or not lived or tuple(side.troubles for side in sides) != self.troubles:
            return End.DISTURBED
        return End.ABORTED if self.is_aborted else End.FAILED
