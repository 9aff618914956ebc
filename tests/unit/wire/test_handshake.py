# SPDX-License-Identifier: Apache-2.0
"""wire/handshake.py: peers that differ never compare equal, and say why."""

from __future__ import annotations

import msgspec
import pytest

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.handshake import PROTOCOL, PeerTag, PushHandshake, PushTag, is_tagged
from kvcached_nixl.wire.planes import Planes

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


PUSH_TAG = PushTag(num_planes=16, cell_bytes=128, kv_cache_dtype="auto")
OTHER_PUSH = {"num_planes": 32, "cell_bytes": 64, "kv_cache_dtype": "fp8"}


def test_the_tags_of_protocol_3_are_these_bytes() -> None:
    """Golden: a change of this text is a change of protocol."""
    assert PROTOCOL == 3
    assert TAG.sign("abc123") == (
        "kvcached_nixl/3 pull [contiguous; NHD 2@0x32@1x4@2x32@3 auto; 32 tokens a block; 1 regions of 65536 bytes a "
        "block; tensor parallel 1] abc123"
    )
    assert PUSH_TAG.sign("abc123") == "kvcached_nixl/3 push [auto; 16 planes of cells of 128 bytes] abc123"


@pytest.mark.parametrize("field", sorted(OTHER))
def test_every_field_tells_peers_apart(field: str) -> None:
    """A peer that differs in one field offers another string."""
    assert set(OTHER) == set(PeerTag.__struct_fields__)
    assert msgspec.structs.replace(TAG, **{field: OTHER[field]}).sign("abc123") != TAG.sign("abc123")


@pytest.mark.parametrize("field", sorted(OTHER_PUSH))
def test_every_field_tells_pushing_peers_apart(field: str) -> None:
    """The same for push, which does not look at block sizes, layouts and shares of the heads."""
    assert set(OTHER_PUSH) == set(PushTag.__struct_fields__)
    assert msgspec.structs.replace(PUSH_TAG, **{field: OTHER_PUSH[field]}).sign("abc123") != PUSH_TAG.sign("abc123")


def test_a_stock_peer_has_no_tag() -> None:
    """The stock connector offers a bare hash."""
    assert is_tagged(TAG.sign("abc123"))
    assert is_tagged(PUSH_TAG.sign("abc123"))
    assert not is_tagged("abc123")


def test_a_rank_is_described_to_its_peers_and_read_back() -> None:
    """Through the bytes that vLLM's side channel carries."""
    planes = Planes((0, 4096), 512, 128, 64, 64, 8, 4, 2, first_head=2)
    said = PushHandshake(EngineId("e"), 2, 1, b"\x00nixl", 3, planes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=PushHandshake) == said
