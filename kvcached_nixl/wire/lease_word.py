# SPDX-License-Identifier: Apache-2.0
"""Which of its requests a rank of prefill still keeps KV for, in memory that decode reads.

Neither side's clock and no notice can tell decode that blocks it has read were still the request's: an idle prefill
reads no notices, a busy one answers late, and parameters may have waited anywhere for any time. So each rank of prefill
keeps a table of words, one per request, and removes a request's before its blocks are given back. Decode reads the
word after the blocks: if it is there, they were the request's for as long as they were read.

A word's place follows from prefill's request id, whose random end vLLM draws anew for every request. The table's
address travels with the agent's metadata.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvcached_nixl.ids import PrefillRequestId

__all__ = ["BUCKETS", "BUCKET_BYTES", "WORDS_PER_BUCKET", "LeasedAgent", "place_of"]

BUCKETS = 1024
WORDS_PER_BUCKET = 64
BUCKET_BYTES = WORDS_PER_BUCKET * 8
"""A bucket is what decode reads; it is full only where some sixty thousand requests are kept at once."""


class LeasedAgent(msgspec.Struct, frozen=True):
    """What a rank offers in place of its agent's own metadata.

    Attributes:
        agent_metadata: NIXL's own.
        table_address: of the first bucket, in the rank's host memory, registered with that agent.
    """

    agent_metadata: bytes
    table_address: int


def place_of(request_id: PrefillRequestId) -> tuple[int, int]:
    """The bucket of a request, and its word there: 64 bits, never 0."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=12).digest()
    return int.from_bytes(digest[:4], "little") % BUCKETS, int.from_bytes(digest[4:], "little") or 1
