# SPDX-License-Identifier: Apache-2.0
"""wire/handshake.py: peers that differ never compare equal, and say why."""

from __future__ import annotations

import msgspec
import pytest

from kvcached_nixl.wire.handshake import PeerTag, is_tagged

TAG = PeerTag(
    arrangement="contiguous",
    memory_order="NHD",
    block_order=((0, 2), (1, 32), (2, 4), (3, 32)),
    block_size=32,
    region_block_bytes=(65536,),
    tp_size=1,
    kv_cache_dtype="auto",
)
OTHER = {
    "arrangement": "non-contiguous",
    "memory_order": "HND",
    "block_order": ((0, 2), (2, 4), (1, 32), (3, 32)),
    "block_size": 64,
    "region_block_bytes": (32768, 32768),
    "tp_size": 2,
    "kv_cache_dtype": "fp8",
}


def test_the_tag_of_protocol_1_is_these_bytes() -> None:
    """Golden: a change of this text is a change of protocol."""
    assert TAG.sign("abc123") == (
        "kvcached_nixl/1 [contiguous; NHD 2@0x32@1x4@2x32@3 auto; 32 tokens a block; 1 regions of 65536 bytes a block; "
        "tensor parallel 1] abc123"
    )


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_tells_peers_apart(field: str) -> None:
    """A peer that differs in one field offers another string."""
    assert set(OTHER) == set(PeerTag.__struct_fields__)
    assert msgspec.structs.replace(TAG, **{field: OTHER[field]}).sign("abc123") != TAG.sign("abc123")


def test_a_stock_peer_has_no_tag() -> None:
    """The stock connector offers a bare hash."""
    assert is_tagged(TAG.sign("abc123"))
    assert not is_tagged("abc123")
