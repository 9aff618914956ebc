# SPDX-License-Identifier: Apache-2.0
"""The data-parallel ranks of a prefill server and their coordinates, learned from its responses. Once per server.

In push, decode is told where prefill is before prefill has answered, so the router must choose the rank that computes.
vLLM takes the rank from the header ``X-data-parallel-rank`` (vllm/entrypoints, 0.26 to 0.30), which counts the ranks of
this API server; without the header vLLM chooses the rank. An engine id ends in ``_dp`` and a number where there may be
several ranks, but that number equals the header's only in some versions, and only without hybrid load balancing. So
nothing is derived from it. The coordinates of a rank are those in its response to a request that named it, and the
number of ranks is what the server itself reports.

A server that is known to have one rank is not sent the header: its only rank is None.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.params import KvTransferParams, RemotePrefill

__all__ = ["MOST_RANKS", "RANK_HEADER", "Found", "Ranks", "range_of"]

logger = logging.getLogger("kvcached_nixl.proxy")

RANK_HEADER = "X-data-parallel-rank"
MOST_RANKS = 1024
PULL_SECONDS = 60.0
"""How long a server whose ranks cannot be told apart is used in pull only, before push is tried again."""
AGAIN_SECONDS = 1.0
"""Pause before asking for the number of ranks again, if there was no answer."""
MOST_FORMER = 64
_MAY_BE_ONE_OF_SEVERAL = re.compile(r"_dp[0-9]+\Z")
_RANGE = re.compile(r"data_parallel_rank ([0-9]{1,10}) is out of range \[0, ([0-9]{1,5})\)")


@dataclass(frozen=True)
class Found:
    """Where an engine of a prefill server is, from its own response.

    Attributes:
        where: engine id, side channel and tensor-parallel size.
        incarnation: drawn when the engine started; "" if the response has no manifest.
        mode: in push, the engine is in push mode, so decode may be asked at the same time.
    """

    where: RemotePrefill
    incarnation: str
    mode: TransferMode

    @classmethod
    def of(cls, params: KvTransferParams) -> Found:
        """Returns what ``params`` say. Raises `Malformed` if a coordinate is missing."""
        manifest = params.manifest
        # A server without this package cannot find a request by its transfer_id alone, so it is not used in push.
        mode = (
            TransferMode.PUSH
            if params.transfer_mode is TransferMode.PUSH and manifest is not None
            else TransferMode.PULL
        )
        return cls(params.prefill, "" if manifest is None else manifest.incarnation, mode)

    @property
    def may_be_one_of_several(self) -> bool:
        return _MAY_BE_ONE_OF_SEVERAL.search(self.where.engine_id) is not None


class _Error(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Error


_refused = msgspec.json.Decoder(_Refused)


def range_of(said: bytes, named: int) -> int | None:
    """Returns the number of ranks from vLLM's refusal of the rank that was named.

    None if the response is not that refusal. The format is checked strictly: an error may quote the client's text.
    """
    try:
        found = _RANGE.match(_refused.decode(said).error.message)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if found is None or int(found[1]) != named or not 1 <= int(found[2]) <= MOST_RANKS:
        return None
    return int(found[2])


class Ranks:
    """See the module. Use it on the event loop's thread only.

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
        """What the last response said; None if there was none, or it may be outdated."""
        return self._latest

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that a request may name; empty if there is only one, or their number is not known."""
        return () if self._count is None or self._count < 2 else tuple(range(self._count))

    def found(self, rank: int | None) -> Found | None:
        """Returns the coordinates of a rank, or of the only rank (``rank`` is None); None if they are not certain."""
        if rank is None and self._latest is not None and self._latest.may_be_one_of_several and self._count != 1:
            return None
        return self._known.get(rank)

    def forget(self) -> None:
        """Discard everything: the server may have been restarted."""
        self._known.clear()
        self._former.clear()
        self._count, self._is_counted, self._latest = None, False, None
        self._not_before = 0.0

    def lost(self, rank: int | None) -> None:
        """Discard the coordinates of a rank that answered without kv_transfer_params."""
        self._known.pop(rank, None)
        if not self._known:
            self._latest = None

    def learn(self, rank: int | None, found: Found) -> None:
        """Learn from a response. ``rank`` is the rank that the request named, or None."""
        if rank is not None and not found.may_be_one_of_several:
            # The engine is not one of several any more, so the server has only one rank now.
            self.forget()
            rank = None
        self._latest = found
        before = self._known.get(rank)
        if before == found or (rank is not None and rank not in self.named):
            return
        if not found.mode.is_push:
            # In pull the ranks need not be known: decode gets prefill's response.
            self._count, self._known = None, {None: found}
            return
        if self._clock() < self._pulls_until:
            self._known.clear()
            return
        if rank is None and found.may_be_one_of_several and self._count != 1:
            # Any of several ranks may have answered. Kept in case there turns out to be only one.
            if self._count is None:
                self._known = {None: found}
            return
        if found in self._former or any(one.where == found.where for key, one in self._known.items() if key != rank):
            self._pull("has several engines that answer in turn")
            return
        if before is not None:
            # The engine was restarted, and the number of ranks may have changed, so it is asked again.
            self._is_counted = False
            self._former.add(before)
            if len(self._former) > MOST_FORMER:
                self._former = {before}
        self._known[rank] = found

    # ---------------------------------------------------------------------------------------------------- their number

    @property
    def wants_count(self) -> bool:
        """Whether the server should be asked for its number of ranks, and no request is asking already."""
        return (
            not self._is_counted
            and not self._is_asking
            and self._latest is not None
            and self._latest.mode.is_push
            and self._latest.may_be_one_of_several
            and self._clock() >= max(self._not_before, self._pulls_until)
        )

    def asking(self) -> None:
        """A request starts asking; it must call `counted`, `uncounted` or `uncountable` afterwards."""
        self._is_asking = True

    def counted(self, count: int) -> None:
        """The server reported its number of ranks."""
        self._is_asking = False
        self._is_counted, self._count = True, count
        meant: tuple[int | None, ...] = self.named or (None,)
        self._known = {rank: found for rank, found in self._known.items() if rank in meant}

    def uncounted(self) -> None:
        """The server did not answer; ask again after `AGAIN_SECONDS`."""
        self._is_asking = False
        self._not_before = self._clock() + AGAIN_SECONDS

    def uncountable(self) -> None:
        """The server answered without its number of ranks; use it in pull for `PULL_SECONDS`."""
        self._is_asking = False
        self._pull("does not say how many data-parallel ranks it has")

    def _pull(self, reason: str) -> None:
        if not self._pulls_until:
            logger.warning(
                "prefill server %s %s; expected that X-data-parallel-rank selects the rank that computes. The server "
                "is used in pull, not in push. Push is tried again every %.0f s. Let the gateway in front of it pass "
                "that header on, or give each engine its own URL. This is logged once.",
                self._name,
                reason,
                PULL_SECONDS,
            )
        self._known.clear()
        self._former.clear()
        self._count, self._is_counted = None, False
        self._pulls_until = self._clock() + PULL_SECONDS
