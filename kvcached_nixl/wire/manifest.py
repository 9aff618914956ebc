# SPDX-License-Identifier: Apache-2.0
"""The manifest: what prefill says of one request. Prefill makes it, decode compares it with its own request.

If the router asks prefill first, it travels in ``kv_transfer_params`` under the key ``kvcached_nixl``; if decode
registers blocks, it travels with prefill's last WRITE. Tokens are counted from the start of the prompt; each side
derives its blocks from them.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvcached_nixl.wire.checked import Count, Digest, Identifier, Incarnation, LogicalBlockNumber, Seconds, require

__all__ = ["PROTOCOL", "BlockRange", "Manifest", "as_json"]

PROTOCOL = 14
"""History: `wire.handshake`."""


class BlockRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logical blocks of one KV-cache group: ``block_ids[i]`` holds the tokens from ``first_token + i * block_size`` on,
    where ``block_size`` is the group's.

    Attributes:
        first_token: starts a block. Above 0 if the group has freed blocks that left its sliding window; the last token
            if it keeps a state (`wire.kv_groups`).
    """

    first_token: Count
    block_ids: tuple[LogicalBlockNumber, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of prefill, as far as its prompt is computed.

    Attributes:
        protocol: this package's protocol number; another one is refused.
        incarnation: drawn when prefill's engine started, or when its weights last changed.
        request_id: inside prefill's engine; vLLM draws its suffix for every request.
        digest: of the first ``num_tokens`` tokens, as `wire.digest` makes it.
        num_tokens: number of tokens, from the prompt's first one on.
        block_sizes: per KV-cache group, tokens in one of prefill's logical blocks; 1 if the group keeps a state.
        context_parallel: ranks that share one sequence, (decode, prefill) context parallelism; must be (1, 1).
        groups: per KV-cache group. Empty in the manifest of a WRITE, where prefill chose the bytes itself.
        lease_seconds: how long prefill keeps the blocks without hearing from decode.
        num_media: number of images, sounds, ... in the tokens; a request without them would compute placeholders.
    """

    protocol: int
    incarnation: Incarnation
    request_id: Identifier
    digest: Digest
    num_tokens: Count
    block_sizes: tuple[Count, ...]
    context_parallel: tuple[Count, Count]
    groups: tuple[BlockRange, ...]
    lease_seconds: Seconds
    num_media: Count

    def __post_init__(self) -> None:
        require(self.protocol == PROTOCOL, f"protocol {PROTOCOL}; the other side runs another kvcached_nixl")
        require(self.num_tokens > 0 and all(self.block_sizes), "at least one token, and blocks of at least one")
        require(self.context_parallel == (1, 1), "no context parallelism")
        require(0 < len(self.block_sizes) <= 64, "1 to 64 KV-cache groups")
        require(len(self.groups) in (0, len(self.block_sizes)), "a block size for each KV-cache group")
        for group, block_size in zip(self.groups, self.block_sizes, strict=False):
            end_token = group.first_token + len(group.block_ids) * block_size
            require(group.first_token % block_size == 0, "ranges that start a block")
            require(0 <= end_token - self.num_tokens < block_size, "blocks that end where the tokens do")
            require(len(set(group.block_ids)) == len(group.block_ids), "no block twice in a group")

    @property
    def ownership_token(self) -> int:
        """64-bit hash of the manifest, never 0. Prefill's ranks keep it in memory as long as they keep the blocks."""
        digest = hashlib.blake2b(_encoder.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1


_encoder = msgspec.msgpack.Encoder()


def as_json(manifest: Manifest) -> dict[str, object]:
    """Plain values for ``kv_transfer_params``."""
    found: dict[str, object] = msgspec.to_builtins(manifest)
    return found
