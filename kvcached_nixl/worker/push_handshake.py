# SPDX-License-Identifier: Apache-2.0
"""Who writes to whom, and what the ranks of a push must know of each other. Once per peer.

The question goes over vLLM's own side channel, so a peer that pulls is met there and refused in words. What vLLM's
worker would build for it (a descriptor for every block of the peer) is not needed: a push names ranges.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvcached_nixl.errors import PeerRefused
from kvcached_nixl.wire.handshake import PushHandshake
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.push import Peer
from kvcached_nixl.worker.push_commands import Connected, PeerGone

__all__ = ["Query", "connector", "contributors"]

Query = Callable[[str, int, int], tuple[str, bytes]]
"""(host, port, tensor-parallel rank) -> (compatibility string, the rank's metadata)."""


def connector(query: Query, compatibility: str) -> Callable[[Peer], Connected]:
    """The ``connect`` of `Push`.

    Args:
        query: asks a side channel; blocks for seconds at most. Raises `ConnectionRefusedError` if nobody listens.
        compatibility: this rank's own string, which a peer must equal.
    """

    def connect(peer: Peer) -> Connected:
        try:
            theirs, metadata = query(peer.host, peer.port, peer.tp_rank)
        except ConnectionRefusedError as cause:
            raise PeerGone(f"nobody listens at {peer.host}:{peer.port}") from cause
        if theirs != compatibility:
            raise PeerRefused(
                found=f"engine {peer.engine_id} at {peer.host}:{peer.port} offers {theirs!r}",
                expected=f"a peer that offers {compatibility!r}",
                consequence="No block is written; its requests fail or are recomputed, as kv_load_failure_policy says.",
                remedy="Run the same vLLM, kvcached, kvcached_nixl and model with the same KVCACHED_CONTIGUOUS_LAYOUT "
                'and "transfer_mode": "push" on both sides; `python -m kvcached_nixl` prints what each has.',
            )
        found = msgspec.msgpack.decode(metadata, type=PushHandshake)
        if (found.engine_id, found.tp_size, found.tp_rank) != (peer.engine_id, peer.tp_size, peer.tp_rank):
            raise PeerGone(
                f"engine {found.engine_id} (rank {found.tp_rank} of {found.tp_size}) answers at {peer.host}:{peer.port}"
            )
        return Connected(found.agent_metadata, found.device_id, found.planes)

    return connect


def contributors(
    prefill: RemotePrefill, *, tp_rank: int, tp_size: int, is_latent: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks of prefill that write into a rank of decode, and ranks that have to be told that they need not.

    Every rank of prefill is in the answer of at least one rank of decode, so that it learns when it is done. A latent
    is the same on all ranks, so one of those that have it is enough.

    Raises:
        ValueError: neither tensor-parallel size divides the other.
    """
    if prefill.tp_size <= tp_size and tp_size % prefill.tp_size == 0:
        return (tp_rank // (tp_size // prefill.tp_size),), ()
    if prefill.tp_size % tp_size:
        raise ValueError(f"prefill's tensor-parallel size {prefill.tp_size} and decode's {tp_size} do not divide")
    share = prefill.tp_size // tp_size
    ranks = tuple(range(tp_rank * share, (tp_rank + 1) * share))
    return (ranks[:1], ranks[1:]) if is_latent else (ranks, ())
