# SPDX-License-Identifier: Apache-2.0
"""Decode: whether what has come from one rank of prefill is what it sent. On the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.messages import Written
from kvcached_nixl.wire.step import Wanted
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.digests import Asked, Range
from kvcached_nixl.worker.handover.local import as_blocks

__all__ = ["compare"]


def compare(
    side: Side,
    wanted: Wanted,
    asked: Asked,
    written: Sequence[Written],
    ended: Callable[[HandOverFailed | None], None],
) -> None:
    """Compare digests, range by range. The blocks are read until ``ended`` is called, with what is wrong, or None.

    Args:
        asked: of the rank.
        written: the last WRITE of each range, in order, as the rank has told of them.
    """
    blocks = [as_blocks(group, side.place.kernel_blocks_per_block) for group in wanted.groups]
    begin = min(group.first_token for group in wanted.groups)
    ranges: list[Range] = []
    for one in written:
        if not begin < one.end_token <= wanted.end_token:
            # Else a few words of a peer would cost the reading of the whole request each.
            break
        ranges.append(([(here, max(begin, here.first_token)) for here in blocks], one.end_token))
        begin = one.end_token
    said = [one.digest for one in written]
    if begin != wanted.end_token or len(ranges) != len(written) or None in said:
        ended(HandOverFailed(Cause.PROTOCOL, "prefill was asked what it sent, and has not said it"))
        return

    def found(digests: list[str], failed: str) -> None:
        if failed:
            ended(HandOverFailed(Cause.DEFECT, failed))
        elif digests != said:
            place = next(i for i, pair in enumerate(zip(digests, said, strict=True)) if pair[0] != pair[1])
            words = (
                f"the bytes of the tokens before {written[place].end_token} are not those that prefill sent: found "
                f"{digests[place]}; expected {said[place]}"
            )
            ended(HandOverFailed(Cause.BYTES, words))
        else:
            ended(None)

    side.digests.of_received(asked, ranges, found)
