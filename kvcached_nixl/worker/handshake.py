# SPDX-License-Identifier: Apache-2.0
"""A peer that was refused, in words. Once per peer, on the connector's handshake thread."""

from __future__ import annotations

from kvcached_nixl.errors import PeerRefused


def peer_refused(cause: Exception, *, host: str, port: int, engine_id: str, local: str) -> PeerRefused:
    """What to raise in place of a failed check of the stock handshake.

    Args:
        cause: the check's own error; it names what differs.
        host, port, engine_id: the peer's side channel and engine.
        local: this side's compatibility string.
    """
    return PeerRefused(
        found=f"engine {engine_id} at {host}:{port}: {cause}",
        expected=f"a peer that offers {local!r}",
        consequence="no block is read from it; its requests fail or are recomputed, as kv_load_failure_policy says",
        remedy="run the same vLLM, kvcached and kvcached_nixl with the same KVCACHED_CONTIGUOUS_LAYOUT, block size and "
        "tensor-parallel size on both sides; `python -m kvcached_nixl` prints what each has",
    )
