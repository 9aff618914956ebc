# SPDX-License-Identifier: Apache-2.0
"""Blocks that vLLM zeroes on the device before they are used.

It does so where states and KV share blocks: the bytes of a state, read as KV behind a request's last token, may be no
numbers, and one that is no number spoils an attention layer although its weight is 0 (vllm#35219). From 0.28 on vLLM
does not zero blocks that a connector is to load, but a hand-over fills the last one of a request only in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcached_nixl.vllm.adapter.private import private

__all__ = ["zero_first"]


def zero_first(scheduler_output: Any, block_ids: Sequence[int]) -> None:
    """Have workers zero these blocks at the beginning of the step.

    Args:
        scheduler_output: of the step that starts to load the blocks.
    """
    if block_ids:
        wanted = dict.fromkeys([*(private(scheduler_output, "new_block_ids_to_zero") or ()), *block_ids])
        scheduler_output.new_block_ids_to_zero = list(wanted)
