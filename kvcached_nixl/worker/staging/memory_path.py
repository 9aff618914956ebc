# SPDX-License-Identifier: Apache-2.0
"""What memory NIXL touches (rule R5). Once per process, before anything is registered."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcached_nixl.errors import MemoryRefused, Unproved
from kvcached_nixl.proof.result import Proof
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath

__all__ = ["choose"]

logger = logging.getLogger(SERVER_LOGGER)


def choose(wish: MemoryPath, prove: Callable[[], Proof], staged: MemoryPath = MemoryPath.HOST) -> MemoryPath:
    """``DIRECT``, ``HOST`` or ``DEVICE``; what is slow, not right or not known is said.

    Args:
        prove: finds out whether registrations follow kvcached's pages; called only where that matters.
        staged: where a slab is that nobody has asked for, which needs no proof.

    Raises:
        MemoryRefused: kvcached's pages are asked for, and something could be chosen that does not follow them, or of
            which that is not known, or cannot be found out.
    """
    if wish in (MemoryPath.HOST, MemoryPath.DEVICE):
        return wish
    if wish is MemoryPath.DIRECT:
        _require(prove())
        return MemoryPath.DIRECT
    try:
        proof = prove()
    except Unproved as error:
        reason = "python -m kvcached_nixl doctor asks again"
        logger.warning("KV is staged (memory_path %s): %s. %s", staged.value, error.found, reason)
        return staged
    if not proof.is_direct:
        logger.warning(
            "KV is staged (memory_path %s): %s. %s",
            proof.memory_path.value,
            "; ".join((*proof.why_not, *proof.why_slow)),
            proof.remedy,
        )
    return proof.memory_path


def _require(proof: Proof) -> None:
    if proof.why_not:
        raise MemoryRefused(
            found=f"memory_path {MemoryPath.DIRECT.value!r}, and " + "; ".join(proof.why_not),
            expected="transports that move the bytes of the page that is mapped, whenever it was",
            consequence="Decode would be handed other bytes than prefill computed, with HTTP 200; the engine stops.",
            remedy=f"Remove memory_path: KV is then staged through other memory. {proof.remedy}",
        )
    for reason in proof.why_slow:
        logger.warning("Hand-overs will be slow where it is chosen: %s. See python -m kvcached_nixl doctor", reason)
