# SPDX-License-Identifier: Apache-2.0
"""Decode: compares checksums of the KV that arrived from one rank of prefill with those that the rank sent. On the
transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Written
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.transfer.checksums import ChecksumRequest, Range
from kvcached_nixl.worker.transfer.context import WorkerContext

__all__ = ["compare"]


def compare(
    context: WorkerContext,
    blocks: Sequence[KernelBlocks],
    end_token: int,
    asked: ChecksumRequest,
    written: Sequence[Written],
    ended: Callable[[HandOverFailed | None], None],
) -> None:
    """Compare checksums, range by range.

    Args:
        blocks: per KV-cache group those that were filled, up to ``end_token``.
        asked: the rank, its planes, and whether the result is still wanted.
        written: the rank's notification of the last WRITE of each range, in order.
        ended: called with the failure, or None if all are equal. The blocks are being read until then.
    """
    begin = min(group.first_token for group in blocks)
    ranges: list[Range] = []
    for one in written:
        if not begin < one.end_token <= end_token:
            # Ranges must grow: else each short message of a peer could make this rank read the whole request again.
            break
        ranges.append(([(here, max(begin, here.first_token)) for here in blocks], one.end_token))
        begin = one.end_token
    said = [one.digest for one in written]
    if begin != end_token or len(ranges) != len(written) or None in said:
        ended(HandOverFailed(FailureCause.PROTOCOL, "prefill did not send the checksums that it was asked for"))
        return

    def found(checksums: list[str], failed: str) -> None:
        if failed:
            ended(HandOverFailed(FailureCause.DEFECT, failed))
        elif checksums != said:
            local = next(i for i, pair in enumerate(zip(checksums, said, strict=True)) if pair[0] != pair[1])
            reason = (
                f"the KV of the tokens before {written[local].end_token} is not what prefill sent: found checksum "
                f"{checksums[local]}; expected {said[local]}"
            )
            ended(HandOverFailed(FailureCause.CHECKSUM, reason))
        else:
            ended(None)

    context.checksums.of_received(asked, ranges, found)
