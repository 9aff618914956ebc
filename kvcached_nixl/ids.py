# SPDX-License-Identifier: Apache-2.0
"""Distinct types for ids that look alike.

One request has a different id in the prefill engine and in the decode engine. A lookup with the wrong one silently
finds nothing (vllm#53095), so they are different types here and mypy tells them apart.
"""

from __future__ import annotations

from typing import NewType

PrefillRequestId = NewType("PrefillRequestId", str)
"""The id inside the prefill engine."""
DecodeRequestId = NewType("DecodeRequestId", str)
"""The id inside the decode engine."""
EngineId = NewType("EngineId", str)
"""vLLM's ``kv_transfer_config.engine_id``."""
LogicalBlock = NewType("LogicalBlock", int)
"""A block as vLLM's scheduler counts: always below ``kv_cache_config.num_blocks``."""
KernelBlock = NewType("KernelBlock", int)
"""A block as the attention kernel counts: one logical block is one or more of these."""
