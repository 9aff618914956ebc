# SPDX-License-Identifier: Apache-2.0
"""Staging: moves KV through a slab of other memory where the KV cache itself must not be registered with NIXL."""
