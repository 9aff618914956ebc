# SPDX-License-Identifier: Apache-2.0
"""Whether kvcached's own pages are registered with NIXL (rule R5). Once per process, before anything is registered."""

from __future__ import annotations

import logging

from kvcached_nixl.errors import MemoryRefused
from kvcached_nixl.proof.result import Proof
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath

__all__ = ["require_direct"]

logger = logging.getLogger(SERVER_LOGGER)


def require_direct(wish: MemoryPath, proof: Proof) -> None:
    """Go on only if whatever could be chosen to carry KV moves the bytes of kvcached's pages; say what is slow.

    Raises:
        MemoryRefused: something could be chosen that does not, or of which that is not known.
    """
    if proof.why_not:
        raise MemoryRefused(
            found=f"memory_path {wish.value!r}, and " + "; ".join(proof.why_not),
            expected="transports that move the bytes of the page that is mapped, whenever it was",
            consequence="Decode would be handed other bytes than prefill computed, with HTTP 200; the engine stops.",
            remedy=f"{proof.remedy} Or serve without ENABLE_KVCACHED; staging is not provided yet.",
        )
    for words in proof.why_slow:
        logger.warning("Hand-overs will be slow where it is chosen: %s. See python -m kvcached_nixl doctor", words)
