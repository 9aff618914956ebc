# SPDX-License-Identifier: Apache-2.0
"""Distinct types for ids that look alike.

One request has a different id at the router, in the prefill engine and in the decode engine. A table keyed by one and
asked with another misses in silence (vllm#53095), so the three are different types here and mypy tells them apart.
"""

from __future__ import annotations

from typing import NewType

__all__ = [
    "DecodeRequestId",
    "EngineId",
    "KernelBlock",
    "LogicalBlock",
    "PrefillRequestId",
    "RouterRequestId",
]

RouterRequestId = NewType("RouterRequestId", str)
"""The id the client or the proxy gave."""
PrefillRequestId = NewType("PrefillRequestId", str)
"""The id inside the prefill engine."""
DecodeRequestId = NewType("DecodeRequestId", str)
"""The id inside the decode engine."""
EngineId = NewType("EngineId", str)
"""vLLM's ``kv_transfer_config.engine_id``."""
LogicalBlock = NewType("LogicalBlock", int)
"""A block as the scheduler counts: always below ``kv_cache_config.num_blocks``."""
KernelBlock = NewType("KernelBlock", int)
"""A block as the attention kernel counts: one logical block may be several of these."""
