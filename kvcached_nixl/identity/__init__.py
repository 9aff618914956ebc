# SPDX-License-Identifier: Apache-2.0
"""KNOW: what made the KV, by its content: weights, configuration, adapters (rule R11). No vLLM, no NIXL."""
