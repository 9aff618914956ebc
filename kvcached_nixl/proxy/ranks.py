# SPDX-License-Identifier: Apache-2.0
"""Which data-parallel ranks a prefill server has, and where each is: learnt from its own answers. Once per server.

A push tells decode where prefill is before prefill has said so, so it must be known which rank will compute. vLLM takes
the rank from the header ``X-data-parallel-rank`` (vllm/entrypoints, 0.19 to 0.30), which counts the ranks that this API
server has; without it vLLM chooses by itself. An engine's id ends in ``_dp`` and a number where there may be several,
but that number is the header's only in some versions and only without hybrid load balancing. So nothing is derived: a
rank is where its answer to that header said that it is, and how many there are is the server's own answer, too.

A server with one rank is never named: its only place is None.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvcached_nixl.wire.params import KvTransferParams, RemotePrefill

__all__ = ["MOST_RANKS", "RANK_HEADER", "Found", "Ranks", "range_of"]

logger = logging.getLogger("kvcached_nixl.proxy")

RANK_HEADER = b"X-data-parallel-rank"
MOST_RANKS = 1024
PULL_SECONDS = 60.0
"""How long nothing is pushed to a server whose ranks cannot be told apart, until it is tried anew."""
AGAIN_SECONDS = 1.0
"""Between two questions for the number of ranks, where the first had no answer."""
MOST_FORMER = 64
_MAY_BE_ONE_OF_SEVERAL = re.compile(r"_dp[0-9]+\Z")
_RANGE = re.compile(r"data_parallel_rank ([0-9]{1,10}) is out of range \[0, ([0-9]{1,5})\)")


@dataclass(frozen=True)
class Found:
    """What a prefill server's own answer said of it.

    Attributes:
        start: drawn when its engine started; "" where it does not say.
        pushes: it writes; decode may be asked at the same time.
    """

    where: RemotePrefill
    incarnation: str
    pushes: bool

    @classmethod
    def of(cls, params: KvTransferParams) -> Found:
        """Raises `Malformed`: a coordinate is missing."""
        manifest = params.manifest
        # A name alone leads decode to nothing at servers without this package: theirs are asked one after the other.
        pushes = params.transfer_mode == "push" and manifest is not None
        return cls(params.prefill, "" if manifest is None else manifest.incarnation, pushes)

    @property
    def may_be_one_of_several(self) -> bool:
        return _MAY_BE_ONE_OF_SEVERAL.search(self.where.engine_id) is not None


class _Error(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Error


_refused = msgspec.json.Decoder(_Refused)


def range_of(said: bytes, named: int) -> int | None:
    """How many ranks there are, as vLLM says it when it refuses the one that was named.

    Returns: None if that is not what it says: a body may quote what its client has sent.
    """
    try:
        found = _RANGE.match(_refused.decode(said).error.message)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if found is None or int(found[1]) != named or not 1 <= int(found[2]) <= MOST_RANKS:
        return None
    return int(found[2])


class Ranks:
    """See the module. For the event loop's thread.

    Args:
        name: of the server, for the log.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._known: dict[int | None, Found] = {}
        self._former: set[Found] = set()
        self._count: int | None = None
        self._is_counted = False
        self._is_asking = False
        self._not_before = 0.0
        self._pulls_until = 0.0
        self._latest: Found | None = None

    @property
    def latest(self) -> Found | None:
        """What the last answer said; None if there was none, or it may not be true any more."""
        return self._latest

    @property
    def named(self) -> tuple[int, ...]:
        """Those that a request may name; empty where there is only one, or where it is not known how many there are."""
        return () if self._count is None or self._count < 2 else tuple(range(self._count))

    def found(self, rank: int | None) -> Found | None:
        """Where a rank is, None being the only one of a server; None if that is not known for sure."""
        if rank is None and self._latest is not None and self._latest.may_be_one_of_several and self._count != 1:
            return None
        return self._known.get(rank)

    def forget(self) -> None:
        """The server may be another one than it was."""
        self._known.clear()
        self._former.clear()
        self._count, self._is_counted, self._latest = None, False, None
        self._not_before = 0.0

    def lost(self, rank: int | None) -> None:
        """A rank hands nothing over."""
        self._known.pop(rank, None)
        if not self._known:
            self._latest = None

    def learn(self, rank: int | None, found: Found) -> None:
        """What an answer said, of the rank that the request has named."""
        if rank is not None and not found.may_be_one_of_several:
            # One engine answers to every number that is left.
            self.forget()
            rank = None
        self._latest = found
        before = self._known.get(rank)
        if before == found or (rank is not None and rank not in self.named):
            return
        if not found.pushes:
            # Whoever is asked one after the other needs no names.
            self._count, self._known = None, {None: found}
            return
        if self._clock() < self._pulls_until:
            self._known.clear()
            return
        if rank is None and found.may_be_one_of_several and self._count != 1:
            # Any of them has answered. It counts if there turns out to be no other.
            if self._count is None:
                self._known = {None: found}
            return
        if found in self._former or any(one.where == found.where for key, one in self._known.items() if key != rank):
            self._pull("has several engines that answer by turns")
            return
        if before is not None:
            # Another start of it; with it the number of ranks may have changed.
            self._is_counted = False
            self._former.add(before)
            if len(self._former) > MOST_FORMER:
                self._former = {before}
        self._known[rank] = found

    # ---------------------------------------------------------------------------------------------------- their number

    @property
    def wants_count(self) -> bool:
        """Whether somebody should ask the server how many ranks it has, and nobody does."""
        return (
            not self._is_counted
            and not self._is_asking
            and self._latest is not None
            and self._latest.pushes
            and self._latest.may_be_one_of_several
            and self._clock() >= max(self._not_before, self._pulls_until)
        )

    def asking(self) -> None:
        """Somebody asks, and will call `counted`, `uncounted` or `uncountable`."""
        self._is_asking = True

    def counted(self, count: int) -> None:
        """The server has said it."""
        self._is_asking = False
        self._is_counted, self._count = True, count
        meant: tuple[int | None, ...] = self.named or (None,)
        self._known = {rank: found for rank, found in self._known.items() if rank in meant}

    def uncounted(self) -> None:
        """It has not answered."""
        self._is_asking = False
        self._not_before = self._clock() + AGAIN_SECONDS

    def uncountable(self) -> None:
        """It has answered something else."""
        self._is_asking = False
        self._pull("does not say how many data-parallel ranks it has")

    def _pull(self, reason: str) -> None:
        if not self._pulls_until:
            logger.warning(
                "prefill server %s %s; expected that X-data-parallel-rank says which one computes. Nothing is pushed "
                "to it: decode is asked when it has answered. It is tried anew every %.0f s. Let whatever stands "
                "before it pass that header on, or give each engine an address of its own. Said once.",
                self._name,
                reason,
                PULL_SECONDS,
            )
        self._known.clear()
        self._former.clear()
        self._count, self._is_counted = None, False
        self._pulls_until = self._clock() + PULL_SECONDS
