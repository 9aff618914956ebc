# SPDX-License-Identifier: Apache-2.0
"""Which engine starts the transfer of a request's KV."""

from __future__ import annotations

from enum import Enum


class TransferMode(str, Enum):
    """``transfer_mode`` of an engine; the handshake refuses a peer with another one.

    It does not say who moves the bytes: where KV is staged, prefill writes in both modes.
    """

    PULL = "pull"
    """Decode starts it, when prefill has finished the request: it READs the blocks, or registers its own for a prefill
    that stages."""
    PUSH = "push"
    """Prefill starts it while it computes, and WRITEs into the blocks that decode has registered."""

    @property
    def is_push(self) -> bool:
        return self is TransferMode.PUSH
