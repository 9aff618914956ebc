# SPDX-License-Identifier: Apache-2.0
"""Memory beside the cache through which KV travels where the cache itself must not be registered."""
