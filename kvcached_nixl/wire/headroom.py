# SPDX-License-Identifier: Apache-2.0
"""The free capacity of an engine, what waits in it, and what a decode engine says of asking prefill servers. Its side
channel sends all of it on request.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from kvcached_nixl.wire.checked import decoder

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


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


class BlockUsage(NamedTuple):
    """Blocks that could be allocated now, and those in use; bytes of the device that could still be mapped; prompts'
    tokens of requests that have no blocks."""

    num_free: int
    num_used: int
    free_bytes: int
    queued_tokens: int


class Headroom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of one engine at one moment. Tokens are those whose KV fits into blocks.

    Attributes:
        free_tokens: that blocks could be allocated for now: of the pool, and of the device's memory.
        used_tokens: in blocks that requests have, or that are kept or held for peers.
        queued_tokens: of the prompts of requests that have no blocks yet.
        kept_offers, kept_tokens: requests that prefill keeps for decode, and their KV; part of ``used_tokens``.
        free_bytes: memory of the device that kvcached could map, whatever the pool's size.
        mapped_bytes: memory of the device that kvcached has mapped for KV, with its reserve of free pages.
        map_bytes, unmap_bytes: rises and falls of ``mapped_bytes`` since the engine's start.
        waiting_fetches: requests of decode whose KV has not arrived, with blocks or without.
        oldest_fetch_seconds: for how long the first timeout of those with blocks has run; 0 if there is none.
        oldest_offer_seconds: since the first of the kept ones ended; 0 if there is none.
        asking: None if the engine asks no prefill servers.
    """

    free_tokens: _Number
    used_tokens: _Number
    queued_tokens: _Number
    kept_offers: _Number
    kept_tokens: _Number
    free_bytes: _Number
    mapped_bytes: _Number
    map_bytes: _Number
    unmap_bytes: _Number
    waiting_fetches: _Number
    oldest_fetch_seconds: _Seconds
    oldest_offer_seconds: _Seconds
    asking: AskingFigures | None = None


encode_headroom = msgspec.msgpack.Encoder().encode
read_headroom: decoder[Headroom] = decoder(Headroom)
