# SPDX-License-Identifier: Apache-2.0
"""The KV cache layout, NHD (token-major) or HND (head-major), that vLLM must use with kvcached. Once per process."""

from __future__ import annotations


def required_memory_order(stock_choice: str | None) -> str | None:
    """Returns the layout to require of vLLM on versions whose caches keep K and V apart (vLLM <= 0.25).

    Args:
        stock_choice: what vLLM's connector requires; None for the backend's default (multi-latent attention).

    Returns:
        ``"NHD"`` in place of ``"HND"``: kvcached lays such caches out token-major and ignores the stride order.
    """
    return "NHD" if stock_choice == "HND" else stock_choice
