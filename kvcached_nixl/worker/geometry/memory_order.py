# SPDX-License-Identifier: Apache-2.0
"""Token-major or head-major: what kvcached's memory is, in the connector's words. Once per process."""

from __future__ import annotations


def required_memory_order(stock_choice: str | None) -> str | None:
    """The layout to ask vLLM for on versions whose caches keep K and V apart (vLLM <= 0.25).

    Args:
        stock_choice: the connector's own answer; None leaves the backend its default (multi-latent attention).

    Returns:
        ``"NHD"`` in place of ``"HND"``: kvcached lays such caches out token-major and ignores the stride order.
    """
    return "NHD" if stock_choice == "HND" else stock_choice
