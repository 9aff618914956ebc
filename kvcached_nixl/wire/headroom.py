# SPDX-License-Identifier: Apache-2.0
"""The free capacity of an engine, which its side channel sends on request."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from kvcached_nixl.wire.checked import Malformed, decoder

__all__ = ["BlockUsage", "Headroom", "encode_headroom", "read_headroom"]


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


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
    """

    free_tokens: _Number
    used_tokens: _Number
    queued_tokens: _Number
    kept_offers: _Number
    kept_tokens: _Number
    free_bytes: _Number


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(Headroom)


def encode_headroom(headroom: Headroom) -> bytes:
    return _encoder.encode(headroom)


def read_headroom(said: bytes) -> Headroom:
    """Decodes an answer.

    Raises:
        Malformed: the bytes are no valid headroom message.
    """
    if not said:
        raise Malformed("found nothing; expected an engine's headroom")
    found: Headroom = _decode(said)
    return found
