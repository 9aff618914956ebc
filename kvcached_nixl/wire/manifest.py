# SPDX-License-Identifier: Apache-2.0
"""The manifest: what prefill says of one request. Prefill makes it, decode compares it with its own request.

If the router asks prefill first, it travels in ``kv_transfer_params`` under the key ``kvcached_nixl``; if decode
registers blocks, it travels with prefill's last WRITE. Tokens are counted from the start of the prompt; each side
derives its blocks from them.

Its digest is a 128-bit hash of everything that a prompt's KV depends on, equal in every process. vLLM's own block
hashes differ between processes: the first one is random unless PYTHONHASHSEED is set.

Which of a request's blocks it names depends on what a KV-cache group keeps; the groups of an engine are the same for
every request:

    EVERYTHING   full attention: a block for each stretch of tokens
    WINDOW       sliding windows and chunks: blocks are freed when the window has left them
    STATE        Mamba, linear attention: the last block, which holds the state behind the last computed token

A state is overwritten by each step, and cannot be taken back by a token. To peers its block is one that holds one
token, the last one: so it is moved as any other block.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvcached_nixl.ids import LogicalBlock
from kvcached_nixl.wire.checked import Count, Digest, Identifier, Incarnation, LogicalBlockNumber, Seconds, require

_CHUNK_BYTES = 256 << 10


class Embeddings:
    """The embeddings that a prompt consists of, hashed when this is made: about a millisecond a MiB.

    Args:
        kind: of their numbers, such as "torch.bfloat16".
        data: their bytes, one token behind the other.
        token_bytes: of one token.
    """

    def __init__(self, kind: str, data: memoryview, token_bytes: int) -> None:
        self._data, self._token_bytes = data, token_bytes
        self._hashers = [hashlib.blake2b(kind.encode() + b" ", digest_size=16)]
        for begin in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
            hasher = self._hashers[-1].copy()
            hasher.update(data[begin : begin + _CHUNK_BYTES])
            self._hashers.append(hasher)

    def hash_of(self, num_tokens: int) -> bytes:
        """The hash of the first ``num_tokens`` tokens. Hashes less than a chunk."""
        end = min(num_tokens * self._token_bytes, len(self._data))
        chunk = end // _CHUNK_BYTES
        hasher = self._hashers[chunk].copy()
        hasher.update(self._data[chunk * _CHUNK_BYTES : end])
        return hasher.digest()


def digest_of(
    token_ids: Sequence[int] | None,
    num_tokens: int,
    *,
    embeddings: bytes = b"",
    are_tokens: Sequence[bool] | None = None,
    features: Iterable[tuple[str, int, int]] = (),
    lora: str = "",
    salt: str = "",
) -> str:
    """The digest of the first ``num_tokens`` tokens of a prompt: 32 hexadecimal digits.

    Args:
        token_ids: of the prompt; None if it is given as embeddings only.
        embeddings: `Embeddings.hash_of` these tokens, for a prompt that has them.
        are_tokens: for a prompt that has both, which positions are token ids and which embeddings.
        features: (vLLM's hash, first token, number of tokens) of each image, sound, ... of the prompt. Those that begin
            after the first ``num_tokens`` tokens are left out.
        lora: identity of the adapter's content (`identity.adapters`), not its name.
        salt: vLLM's ``cache_salt``.

    It takes about 30 ns a token.
    """
    hasher = hashlib.blake2b(digest_size=16)
    here = sorted((one for one in features if one[1] < num_tokens), key=lambda one: (one[1], one[0]))
    for text in (lora, salt, *(f"{first_token}:{count}:{name}" for name, first_token, count in here)):
        # Each part follows its length, so that no two lists of parts give the same bytes.
        part = text.encode(errors="surrogatepass")
        hasher.update(len(part).to_bytes(8, "little") + part)
    hasher.update(num_tokens.to_bytes(8, "little") + len(embeddings).to_bytes(8, "little"))
    hasher.update(embeddings)
    if are_tokens is not None:
        hasher.update(bytes(map(bool, are_tokens[:num_tokens])))
    if token_ids is not None:
        hasher.update(array("q", token_ids[:num_tokens]).tobytes())
    return hasher.hexdigest()


PROTOCOL = 16
"""See `wire.handshake`."""


class BlockRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logical blocks of one KV-cache group: ``block_ids[i]`` holds the tokens from ``first_token + i * block_size`` on,
    where ``block_size`` is the group's.

    Attributes:
        first_token: starts a block. Above 0 if the group has freed blocks that left its sliding window; the last token
            if it keeps a state.
    """

    first_token: Count
    block_ids: tuple[LogicalBlockNumber, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of prefill, as far as its prompt is computed.

    Attributes:
        incarnation: drawn when prefill's engine started, or when its weights last changed.
        request_id: inside prefill's engine; vLLM draws its suffix for every request.
        digest: of the first ``num_tokens`` tokens, as `wire.manifest` makes it.
        num_tokens: from the prompt's first one on.
        block_sizes: per KV-cache group, tokens in one of prefill's logical blocks; 1 if the group keeps a state.
        context_parallel: ranks that share one sequence, (decode, prefill) context parallelism; must be (1, 1).
        groups: per KV-cache group. Empty in the manifest of a WRITE, where prefill chose the bytes itself.
        lease_seconds: how long prefill keeps the blocks without hearing from decode.
        num_media: images, sounds, ... in the tokens; a request without them would compute placeholders.
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

FEWEST_TOKENS = 3
"""Of a prompt whose states are handed over. Prefill computes one token less, and vLLM takes a request of one token for
one that goes on: gated delta nets and linear attention then read the state that another request has left in its block
(vllm#51562)."""

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it holds no token's KV. Every request with a sliding window has it in its block table."""


class Keeps(Enum):
    EVERYTHING = "everything"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class KVGroup:
    """One KV-cache group.

    Attributes:
        table_block_size: tokens in a block of vLLM's block table.
    """

    table_block_size: int
    keeps: Keeps = Keeps.EVERYTHING

    @property
    def block_size(self) -> int:
        """Tokens in a block, as peers count them."""
        return 1 if self.keeps is Keeps.STATE else self.table_block_size

    def range(self, blocks: list[LogicalBlock], first_token: int, end_token: int) -> BlockRange:
        """The blocks that hold the tokens from ``first_token`` on, which starts a block; of a state the last one. If
        ``blocks``, vLLM's block table of the request, is too short, so is the range."""
        size = self.table_block_size
        if self.keeps is Keeps.STATE:
            place = (end_token - 1) // size
            return BlockRange(end_token - 1, tuple(blocks[place : place + 1]))
        return BlockRange(first_token, tuple(blocks[first_token // size : -(-end_token // size)]))


@dataclass(frozen=True)
class KVGroups:
    """In vLLM's order."""

    all: tuple[KVGroup, ...]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Per group, tokens in a block, as peers count them."""
        return tuple(group.block_size for group in self.all)

    @property
    def step_tokens(self) -> int:
        """A hand-over begins at a multiple of this many tokens: where blocks of all groups begin."""
        return math.lcm(*self.block_sizes)

    @property
    def tokens_per_block(self) -> float:
        """Tokens whose KV fits into one block of the pool, on average over the groups: each has blocks of its own.

        Groups that keep only a window or a state count where no other keeps everything.
        """
        whole = [group for group in self.all if group.keeps is Keeps.EVERYTHING] or self.all
        return 1 / sum(1 / group.block_size for group in whole)

    @property
    def drop_blocks(self) -> bool:
        """Whether vLLM frees blocks of some group while a request is computed."""
        return any(group.keeps is not Keeps.EVERYTHING for group in self.all)

    @property
    def have_windows(self) -> bool:
        return any(group.keeps is Keeps.WINDOW for group in self.all)

    @property
    def have_states(self) -> bool:
        return any(group.keeps is Keeps.STATE for group in self.all)

    def ranges(
        self, block_ids: tuple[list[LogicalBlock], ...], first_tokens: tuple[int, ...], end_token: int
    ) -> tuple[BlockRange, ...]:
        """Per group `KVGroup.range`. Raises ValueError: there are not as many lists as groups."""
        pairs = zip(self.all, block_ids, first_tokens, strict=True)
        return tuple(group.range(blocks, first, end_token) for group, blocks, first in pairs)

    def growing(self, block_ids: tuple[list[LogicalBlock], ...], num_tokens: int) -> tuple[BlockRange, ...]:
        """Per group the blocks of a prompt of ``num_tokens`` tokens while it is computed; no state is ready yet."""
        return tuple(
            BlockRange(num_tokens - 1, ()) if group.keeps is Keeps.STATE else BlockRange(0, tuple(blocks))
            for group, blocks in zip(self.all, block_ids, strict=True)
        )
