# SPDX-License-Identifier: Apache-2.0
"""The manifest: what prefill says of one request. Prefill makes it, decode compares it with its own request.

If the router asks prefill first, it travels in ``kv_transfer_params`` under the key ``kvcached_nixl``; if decode
registers blocks, it travels with prefill's last WRITE. Tokens are counted from the start of the prompt; each side
derives its blocks from them.

Its digest is a 128-bit hash of everything that a prompt's KV depends on, equal in every process. vLLM's own block
hashes differ between processes: the first one is random unless PYTHONHASHSEED is set.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from kvcached_nixl.wire.checked import Count, Digest, Identifier, Incarnation, LogicalBlockNumber, Seconds, require

__all__ = ["BlockRange", "Embeddings", "Manifest", "PROTOCOL", "digest_of"]

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
            if it keeps a state (`wire.kv_groups`).
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
