# SPDX-License-Identifier: Apache-2.0
"""Decode: whether what has come from one rank of prefill is what it sent. On the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Written
from kvcached_nixl.worker.decode.attempt import Attempt
from kvcached_nixl.worker.transfer.checksums import ChecksumRequest, Range
from kvcached_nixl.worker.transfer.context import WorkerContext

__all__ = ["compare"]


def compare(
    context: WorkerContext,
    attempt: Attempt,
    asked: ChecksumRequest,
    written: Sequence[Written],
    ended: Callable[[HandOverFailed | None], None],
) -> None:
    """Compare digests, range by range. The blocks are read until ``ended`` is called, with what is wrong, or None.

    Args:
        asked: of the rank.
        written: the last WRITE of each range, in order, as the rank has told of them.
    """
    begin = min(group.first_token for group in attempt.blocks)
    ranges: list[Range] = []
    for one in written:
        if not begin < one.end_token <= attempt.spec.end_token:
            # Else a few words of a peer would cost the reading of the whole request each.
            break
        ranges.append(([(here, max(begin, here.first_token)) for here in attempt.blocks], one.end_token))
        begin = one.end_token
    said = [one.digest for one in written]
    if begin != attempt.spec.end_token or len(ranges) != len(written) or None in said:
        ended(HandOverFailed(FailureCause.PROTOCOL, "prefill was asked what it sent, and has not said it"))
        return

    def found(checksums: list[str], failed: str) -> None:
        if failed:
            ended(HandOverFailed(FailureCause.DEFECT, failed))
        elif checksums != said:
            local = next(i for i, pair in enumerate(zip(checksums, said, strict=True)) if pair[0] != pair[1])
            reason = (
                f"the bytes of the tokens before {written[local].end_token} are not those that prefill sent: found "
                f"{checksums[local]}; expected {said[local]}"
            )
            ended(HandOverFailed(FailureCause.CHECKSUM, reason))
        else:
            ended(None)

    context.checksums.of_received(asked, ranges, found)
