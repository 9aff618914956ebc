# SPDX-License-Identifier: Apache-2.0
"""The digest of a prompt: a 128-bit hash of everything that its KV depends on, equal in every process.

vLLM's own block hashes differ between processes: the first one is random unless PYTHONHASHSEED is set.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["Embeddings", "digest_of"]

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
        begin = end // _CHUNK_BYTES * _CHUNK_BYTES
        hasher = self._hashers[begin // _CHUNK_BYTES].copy()
        hasher.update(self._data[begin:end])
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

    It takes time in proportion to the prompt: about 30 ns a token.
    """
    hasher = hashlib.blake2b(digest_size=16)
    parts: list[bytes] = [lora.encode(errors="surrogatepass"), salt.encode(errors="surrogatepass")]
    for name, first_token, count in sorted(features, key=lambda one: (one[1], one[0])):
        if first_token < num_tokens:
            parts.append(f"{first_token}:{count}:{name}".encode(errors="surrogatepass"))
    for part in parts:
        # Each part follows its length, so that no two lists of parts give the same bytes.
        hasher.update(len(part).to_bytes(8, "little") + part)
    hasher.update(num_tokens.to_bytes(8, "little") + len(embeddings).to_bytes(8, "little"))
    hasher.update(embeddings)
    if are_tokens is not None:
        hasher.update(bytes(map(bool, are_tokens[:num_tokens])))
    if token_ids is not None:
        hasher.update(array("q", token_ids[:num_tokens]).tobytes())
    return hasher.hexdigest()
