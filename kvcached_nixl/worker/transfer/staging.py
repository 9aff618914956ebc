# SPDX-License-Identifier: Apache-2.0
"""Staging of a worker: takes slots for ranges of tokens, copies on a thread of its own, and queues whatever waits for
slots. On the transfer thread.

On decode, prefill's ranks write into slots, range by range, and these are then copied into blocks (`StagingWindow`).
Each rank says which tokens are ready. Slots are taken only for tokens that are ready on all of them, so no slot waits
for tokens that are not computed yet. They are copied when all ranks have written them, because one block may have heads
of several ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.geometry.descriptors import split
from kvcached_nixl.worker.transfer.peers import contained
from kvcached_nixl.worker.transfer.slab import Slab, SlabUse, Slots, Use

WINDOW_BLOCKS = 512
"""Most kernel blocks in the slots of one range: so the next range can be copied while this one is transferred."""
_SHARES = 4
"""A quarter of the slots for a use is the most that one peer has, and half of that the most that one range takes: slots
that a vanished host may still write, or is still sent, stay taken, and other peers have to be served."""


@dataclass(eq=False)
class Held:
    """Slots that hold the KV of a range of tokens.

    Attributes:
        owner: the engine (`Peer.engine`) that writes into the slots or is sent them; "" if they are parked.
        groups: per KV-cache group, the slab's blocks of the tokens that are moved of it.
        slots: that these blocks are in.
        staged_token: tokens before this one are in the slots.
        asked_token: for a parked offer: tokens before this one are in the slots or being copied into them.
        copies: copies under way, into the slots or out of them.
        jobs: WRITEs from the slots that have not ended.
        is_stuck: the KV is not wanted any more, but a transfer or a copy may still use the slots.
    """

    use: Use
    owner: str
    first_token: int
    end_token: int
    groups: tuple[KernelBlockRange, ...]
    slots: list[int]
    staged_token: int
    asked_token: int = 0
    copies: int = 0
    jobs: int = 0
    is_stuck: bool = False


@dataclass
class Staging:
    """See the module.

    Attributes:
        copier: its thread copies between blocks and slots.
        num_waits: how often a hand-over has begun to wait for slots.
        block_sizes: per KV-cache group, tokens in a kernel block.
        blocks_in_slot: per KV-cache group, its blocks that a slot has room for; 1 for each where it is left out. Of a
            group with states it is one, which is split into as many kernel blocks as a slot has.
    """

    slots: Slots
    slab: Slab
    copier: Background
    block_sizes: tuple[int, ...]
    blocks_in_slot: tuple[int, ...] = ()
    num_waits: int = 0
    _waiting: dict[tuple[Use, str], dict[object, Callable[[], bool]]] = field(default_factory=dict)
    _owned: Counter[tuple[Use, str]] = field(default_factory=Counter)
    _stuck: Counter[Use] = field(default_factory=Counter)
    _freed: bool = False

    def __post_init__(self) -> None:
        self.blocks_in_slot = self.blocks_in_slot or (1,) * len(self.block_sizes)

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
        """Take slots for the tokens from ``first_token`` on, up to ``end_token`` if there are enough; if ``is_whole``,
        for all or none. Returns None if there are too few now. Raises `ValueError`: the slab is too small for even the
        smallest range.

        Args:
            first_tokens: per KV-cache group, its first token that is moved.
            step: the range ends at a multiple of this, or at ``end_token``.
            owner: the engine that will write into the slots or be sent them, if that is known.
        """
        ends = range(first_token // step * step + step, end_token + step, step)
        if is_whole:
            ends = ends[-1:]

        def count(end: int) -> int:
            return self._count(first_tokens, first_token, min(end, end_token))

        # A part of what is left besides stuck slots: so however many peers have vanished, the next one still gets some.
        part, least = (self.slots.most(use) - self._stuck[use]) // _SHARES, count(ends[0])
        most = min(self.slots.available(use), max(min(WINDOW_BLOCKS // max(self.blocks_in_slot), part // 2), least))
        if owner:
            most = min(most, max(part, least) - self._owned[use, owner])
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
        """Whether the slab is large enough for all of these tokens at once."""
        return self._count(first_tokens, first_token, end_token) <= self.slots.most(use)

    def wait(self, use: Use, who: object, retry: Callable[[], bool], owner: str = "") -> None:
        """Call ``retry`` when slots are free, in the order of `wait`. It returns False if it still has to wait. ``who``
        waits once for each use, however often it calls. ``owner``: as in `take`; each use and owner has a queue."""
        waiting = self._waiting.setdefault((use, owner), {})
        self.num_waits += who not in waiting
        waiting.setdefault(who, retry)

    def forget(self, use: Use, who: object, owner: str = "") -> None:
        """``who`` does not wait any more. Idempotent."""
        waiting = self._waiting.get((use, owner), {})
        waiting.pop(who, None)
        if not waiting:
            self._waiting.pop((use, owner), None)

    @property
    def use(self) -> SlabUse:
        return SlabUse(
            num_bytes=self.slab.extent[1],
            num_slots=self.slots.count,
            parked=self.slots.used(Use.PARKED),
            sending=self.slots.used(Use.SENDING),
            receiving=self.slots.used(Use.RECEIVING),
            waiting=sum(map(len, self._waiting.values())),
        )

    def is_waiting(self, use: Use, who: object, owner: str = "") -> bool:
        return who in self._waiting.get((use, owner), ())

    def mark_stuck(self, held: Held) -> None:
        """The KV is not wanted any more, but the slots stay taken until no transfer or copy uses them."""
        if not held.is_stuck:
            held.is_stuck = True
            self._stuck[held.use] += len(held.slots)

    def give_back(self, held: Held) -> None:
        """Free slots that no copy or transfer touches any more."""
        if held.is_stuck:
            held.is_stuck = False
            self._stuck -= Counter({held.use: len(held.slots)})
        self.slots.give_back(held.slots, held.use)
        self._owned -= Counter({(held.use, held.owner): len(held.slots)})
        self._freed = True

    def gather(
        self, held: Held, blocks: Sequence[KernelBlockRange], to_token: int, ended: Callable[[str], None]
    ) -> None:
        """Copy the tokens from ``held.staged_token`` up to ``to_token`` from kernel blocks into the slots."""
        self._copy(held, blocks, held.staged_token, to_token, True, ended)

    def scatter(self, held: Held, blocks: Sequence[KernelBlockRange], ended: Callable[[str], None]) -> None:
        """Copy all tokens of the slots into kernel blocks."""
        self._copy(held, blocks, held.first_token, held.end_token, False, ended)

    def turn(self) -> None:
        """Report copies that have ended, and call ``retry`` of those that wait for slots if some were freed."""
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
        count = self._count(first_tokens, first_token, end_token)
        taken = self.slots.take(count, use, at_least=count)
        groups = []
        left = taken
        for first, size, room in zip(first_tokens, self.block_sizes, self.blocks_in_slot, strict=True):
            begin = max(first, first_token) // size * size
            here = max(0, -(-end_token // size) - begin // size)
            within, left = left[: -(-here // room)], left[-(-here // room) :]
            ids = [KernelBlock(slot * room + place) for slot in within for place in range(room)]
            groups.append(KernelBlockRange(begin, tuple(ids[:here])))
        if owner:
            self._owned[use, owner] += count
        return Held(use, owner, first_token, end_token, tuple(groups), taken, first_token)

    def _count(self, first_tokens: Sequence[int], first_token: int, end_token: int) -> int:
        return sum(
            max(0, -(-(-(-end_token // size) - max(first, first_token) // size) // room))
            for first, size, room in zip(first_tokens, self.block_sizes, self.blocks_in_slot, strict=True)
        )

    def _copy(
        self,
        held: Held,
        blocks: Sequence[KernelBlockRange],
        first_token: int,
        end_token: int,
        is_gather: bool,
        ended: Callable[[str], None],
    ) -> None:
        sources: list[int] = []
        staged: list[int] = []
        most = max(self.blocks_in_slot)
        for mine, theirs, size, room in zip(held.groups, blocks, self.block_sizes, self.blocks_in_slot, strict=True):
            begin, end = max(first_token // size, mine.first_token // size), -(-end_token // size)
            if begin < end:
                for found, group in ((staged, mine), (sources, theirs)):
                    before = group.first_token // size
                    found += split(group.block_ids[begin - before : end - before], most // room)
        held.copies += 1

        def copied(_: object, failed: str) -> None:
            held.copies -= 1
            ended(failed)

        do = partial(self.slab.gather, sources, staged) if is_gather else partial(self.slab.scatter, staged, sources)
        self.copier.submit(Work(f"a copy of {len(sources)} blocks", do, copied))


@dataclass(eq=False)
class _Writer:
    """A rank of prefill that was told of the attempt.

    Attributes:
        give: sends it the slots of a range.
        changed: called when a range was copied, with "", or could not be, with the reason.
        ready_token, written_token: tokens before this one are ready on the rank, or have been written by it.
    """

    give: Callable[[Held], None]
    changed: Callable[[str], None]
    ready_token: int
    written_token: int
    may_write: bool = True


@dataclass(eq=False)
class StagingWindow:
    """The slots that an attempt's KV arrives in.

    Attributes:
        blocks: per KV-cache group, the kernel blocks to fill.
        step: ranges end at multiples of this many tokens (`LocalRank.step_tokens`).
        num_writers, engine: ranks of prefill that have some of the bytes, and their engine.
    """

    staging: Staging
    blocks: Sequence[KernelBlockRange]
    end_token: int
    step: int
    num_writers: int
    engine: str
    _writers: dict[int, _Writer] = field(default_factory=dict)
    _given: list[Held] = field(default_factory=list)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._first_token = self._given_token = min(group.first_token for group in self.blocks)

    @property
    def is_copying(self) -> bool:
        return any(held.copies for held in self._given)

    @property
    def is_filled(self) -> bool:
        """Whether all wanted tokens have been copied into their blocks."""
        return not self._given and self._given_token >= self.end_token

    def join(self, rank: int, give: Callable[[Held], None], changed: Callable[[str], None]) -> None:
        """Add a rank of prefill that is told of the attempt."""
        self._writers[rank] = _Writer(give, changed, self._first_token, self._first_token)

    def ready(self, rank: int, first_token: int, end_token: int) -> None:
        """These tokens are ready on a rank. Ignored if repeated, or if they do not begin where the last grant ended."""
        writer = self._writers[rank]
        if not self._is_closed and first_token == self._given_token and end_token > writer.ready_token:
            writer.ready_token = end_token
            self._give()

    def written(self, rank: int, end_token: int) -> None:
        """All tokens before ``end_token`` have arrived from a rank. Copies the ranges that all ranks have written."""
        self._writers[rank].written_token = end_token
        arrived = min(writer.written_token for writer in self._writers.values())
        for held in self._given:
            if held.end_token <= arrived and held.staged_token < held.end_token and not self._is_closed:
                held.staged_token = held.end_token
                self.staging.scatter(held, self.blocks, partial(self._copied, held))

    def stop(self) -> None:
        """Grant no more slots, and do not copy what still arrives."""
        self._is_closed = True
        for held in self._given:
            self.staging.mark_stuck(held)
        self.staging.forget(Use.RECEIVING, self, self.engine)

    def close(self, rank: int) -> None:
        """A rank does not write any more, and no more tokens are wanted. Frees the slots after the last rank's call."""
        self.stop()
        self._writers[rank].may_write = False
        self._let_go()

    def _give(self) -> bool:
        """Grant the next range that is ready on all ranks, if there are slots. Returns False if it waits for slots."""
        ready = min(writer.ready_token for writer in self._writers.values())
        if self._is_closed or len(self._writers) < self.num_writers or self._given_token >= ready:
            return True
        firsts = [group.first_token for group in self.blocks]
        held = self.staging.take(Use.RECEIVING, firsts, self._given_token, ready, self.step, owner=self.engine)
        if held is None:
            self.staging.wait(Use.RECEIVING, self, self._give_late, self.engine)
            return False
        self._given.append(held)
        self._given_token = held.end_token
        for writer in self._writers.values():
            # Reset: each rank asks again for the tokens that follow this range.
            writer.ready_token = held.end_token
            writer.give(held)
        return True

    def _give_late(self) -> bool:
        def failed(failure: HandOverFailed) -> None:
            for writer in list(self._writers.values()):
                writer.changed(f"no slots were granted: {failure}")

        with contained(failed):
            return self._give()
        return True

    def _copied(self, held: Held, failed: str) -> None:
        self._given.remove(held)
        self.staging.give_back(held)
        self._let_go()
        for writer in list(self._writers.values()):
            writer.changed(failed)

    def _let_go(self) -> None:
        if self._is_closed and not any(writer.may_write for writer in self._writers.values()):
            for held in [one for one in self._given if not one.copies]:
                self._given.remove(held)
                self.staging.give_back(held)
