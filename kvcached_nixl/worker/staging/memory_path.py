# SPDX-License-Identifier: Apache-2.0
"""Chooses the memory that NIXL registers: kvcached's pages or a slab (rule R5). Once per process, before anything is
registered."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcached_nixl.errors import MemoryRefused, Unproved
from kvcached_nixl.proof.result import Proof
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath

__all__ = ["choose"]

logger = logging.getLogger(SERVER_LOGGER)


def choose(wish: MemoryPath, prove: Callable[[], Proof], staged: MemoryPath = MemoryPath.HOST) -> MemoryPath:
    """Returns ``DIRECT``, ``HOST`` or ``DEVICE``; logs a warning where transports are slow, wrong or not known.

    Args:
        wish: the setting ``memory_path``.
        prove: finds out whether registrations follow kvcached's pages; called only where that matters.
        staged: the path if nobody asked for a slab and the proof fails to run; a slab needs no proof.

    Raises:
        MemoryRefused: ``DIRECT`` is asked for, but a transport that could be chosen does not follow kvcached's pages,
            or it is not known whether it does.
        Unproved: ``DIRECT`` is asked for, but the proof could not be made.
    """
    if wish in (MemoryPath.HOST, MemoryPath.DEVICE):
        return wish
    if wish is MemoryPath.DIRECT:
        _require(prove())
        return MemoryPath.DIRECT
    try:
        proof = prove()
    except Unproved as error:
        reason = "python -m kvcached_nixl doctor repeats the proof"
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
            expected="transports that move the bytes of the currently mapped page, whenever it was mapped",
            consequence="Decode would get other bytes than prefill computed, with HTTP 200; the engine stops.",
            remedy=f"Remove memory_path: KV is then staged through other memory. {proof.remedy}",
        )
    for reason in proof.why_slow:
        logger.warning("A slow transport may be chosen for hand-overs: %s. See python -m kvcached_nixl doctor", reason)
