# SPDX-License-Identifier: Apache-2.0
"""What a worker stages through: slots, copies, and who waits for slots, in order. On the transfer thread."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.worker.geometry.descriptors import Blocks
from kvcached_nixl.worker.staging.copier import Copy
from kvcached_nixl.worker.staging.slots import Slots, Use

__all__ = ["Copies", "Held", "Staging"]

WINDOW_BLOCKS = 512
"""Slots that one range takes at most: the next one is copied while it travels."""
_SHARES = 4
"""One of them is the most that one range takes of what there is for its use, and that one peer is given to write into:
what a host that has vanished may still write stays taken, and others have to be served."""


class Copies(Protocol):
    """What copies; `copier.Copier`."""

    def submit(self, copy: Copy) -> None: ...
    def turn(self) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Held:
    """Slots that hold the KV of a range of tokens.

    Attributes:
        owner: the engine that writes into them, or "".
        groups: per KV-cache group, the slots of those tokens that are moved of it.
        staged_token: the tokens before this one are in the slots.
        asked_token: of a whole offer's, the tokens before this one are in the slots or being copied there.
        copies: under way, into the slots or out of them.
        jobs: WRITEs from the slots that have not ended.
        is_stuck: nobody wants what comes into the slots, and somebody may still write it.
    """

    use: Use
    owner: str
    first_token: int
    end_token: int
    groups: tuple[KernelBlockRange, ...]
    staged_token: int
    asked_token: int = 0
    copies: int = 0
    jobs: int = 0
    is_stuck: bool = False

    @property
    def slots(self) -> list[int]:
        return [slot for group in self.groups for slot in group.block_ids]


@dataclass
class Staging:
    """See the module.

    Attributes:
        block_size: tokens in a slot, and in a block of the attention kernel.
    """

    slots: Slots
    copier: Copies
    block_size: int
    _waiting: dict[tuple[Use, str], dict[object, Callable[[], bool]]] = field(default_factory=dict)
    _owned: Counter[str] = field(default_factory=Counter)
    _freed: bool = False
    _stuck: int = 0

    def take(
        self,
        use: Use,
        first_tokens: Sequence[int],
        first_token: int,
        end_token: int,
        step: int,
        *,
        is_whole: bool = False,
        owner: str = "",
    ) -> Held | None:
        """Slots for tokens from ``first_token`` on, up to ``end_token`` if there are as many; None for now.

        Args:
            first_tokens: per KV-cache group; tokens before are not moved of it.
            step: what is taken ends at a multiple of it, or at ``end_token``.
            is_whole: all or nothing.
            owner: the engine that will write into them, if that is another one.

        Raises:
            ValueError: there will never be as many.
        """
        ends = range(first_token // step * step + step, end_token + step, step)
        if is_whole:
            ends = ends[-1:]

        def count(end: int) -> int:
            return self._count(first_tokens, first_token, min(end, end_token))

        # Of what is left by those that are not heard of: however many there are, there is something for the next one.
        left = self.slots.most(use) - (self._stuck if use is Use.RECEIVING else 0)
        part = max(left // _SHARES, count(ends[0]))
        most = min(self.slots.available(use), max(min(WINDOW_BLOCKS, part), count(ends[0])))
        if owner:
            most = min(most, part - self._owned[owner])
        place = bisect_right(ends, most, key=count)
        if place:
            return self._take(use, owner, first_tokens, first_token, min(ends[place - 1], end_token))
        if not self.fits(use, first_tokens, first_token, min(ends[0], end_token)):
            raise ValueError(
                f"found a slab of {self.slots.count} slots; expected enough for the tokens {first_token} to "
                f"{min(ends[0], end_token) - 1} alone: raise staging_gib"
            )
        return None

    def fits(self, use: Use, first_tokens: Sequence[int], first_token: int, end_token: int) -> bool:
        """Whether there may ever be slots for all of these tokens."""
        return self._count(first_tokens, first_token, end_token) <= self.slots.most(use)

    def wait(self, use: Use, who: object, retry: Callable[[], bool], owner: str = "") -> None:
        """Try again when slots are free, those that waited before first. ``retry`` says whether it does not wait.

        Args:
            who: waits once for each use, however often it is said.
            owner: as for `take`; one owner's wait for each other, and for nobody else's.
        """
        self._waiting.setdefault((use, owner), {}).setdefault(who, retry)

    def forget(self, use: Use, who: object, owner: str = "") -> None:
        """It does not wait any more."""
        waiting = self._waiting.get((use, owner), {})
        waiting.pop(who, None)
        if not waiting:
            self._waiting.pop((use, owner), None)

    def is_waiting(self, use: Use, who: object) -> bool:
        """Whether it waits for slots."""
        return who in self._waiting.get((use, ""), ())

    def mark_stuck(self, held: Held) -> None:
        """What comes into its slots is not wanted any more; they are kept until nobody writes them."""
        if not held.is_stuck:
            held.is_stuck = True
            self._stuck += len(held.slots)

    def give_back(self, held: Held) -> None:
        """Nothing touches its slots any more."""
        if held.is_stuck:
            held.is_stuck = False
            self._stuck -= len(held.slots)
        self.slots.give_back(held.slots, held.use)
        self._owned -= Counter({held.owner: len(held.slots)})
        self._freed = True

    def gather(
        self, held: Held, blocks: Sequence[Sequence[KernelBlock]], to_token: int, ended: Callable[[str], None]
    ) -> None:
        """Copy the tokens from ``held.staged_token`` on out of blocks.

        Args:
            blocks: per KV-cache group, from the prompt's first token on.
        """
        self._copy(held, [Blocks(group) for group in blocks], held.staged_token, to_token, True, ended)

    def scatter(self, held: Held, blocks: Sequence[Blocks], ended: Callable[[str], None]) -> None:
        """Copy what is held into blocks of the attention kernel."""
        self._copy(held, blocks, held.first_token, held.end_token, False, ended)

    def turn(self) -> None:
        """Tell the ends of copies, and let those try again that wait for slots."""
        self.copier.turn()
        if not self._freed:
            return
        self._freed = False
        for (use, owner), waiting in list(self._waiting.items()):
            while waiting:
                who, retry = next(iter(waiting.items()))
                if not retry():
                    break
                self.forget(use, who, owner)

    def _take(self, use: Use, owner: str, first_tokens: Sequence[int], first_token: int, end_token: int) -> Held:
        size = self.block_size
        count = self._count(first_tokens, first_token, end_token)
        taken = self.slots.take(count, use, at_least=count)
        groups = []
        for first in first_tokens:
            begin = max(first, first_token) // size * size
            here = max(0, -(-end_token // size) - begin // size)
            groups.append(KernelBlockRange(begin, tuple(map(KernelBlock, taken[:here]))))
            taken = taken[here:]
        if owner:
            self._owned[owner] += count
        return Held(use, owner, first_token, end_token, tuple(groups), first_token)

    def _count(self, first_tokens: Sequence[int], first_token: int, end_token: int) -> int:
        size = self.block_size
        return sum(max(0, -(-end_token // size) - max(first, first_token) // size) for first in first_tokens)

    def _copy(
        self,
        held: Held,
        blocks: Sequence[Blocks],
        first_token: int,
        end_token: int,
        is_gather: bool,
        ended: Callable[[str], None],
    ) -> None:
        size = self.block_size
        sources: list[KernelBlock] = []
        slots: list[KernelBlock] = []
        for mine, theirs in zip(held.groups, blocks, strict=True):
            begin, end = max(first_token // size, mine.first_token // size), -(-end_token // size)
            if begin < end:
                slots += mine.block_ids[begin - mine.first_token // size : end - mine.first_token // size]
                sources += theirs.ids[begin - theirs.first_token // size : end - theirs.first_token // size]
        held.copies += 1

        def copied(failed: str) -> None:
            held.copies -= 1
            ended(failed)

        self.copier.submit(Copy(is_gather, sources, slots, copied))
