# SPDX-License-Identifier: Apache-2.0
"""Carries what engines say. `base`: bytes and notifications; `agent`: makes NIXL agents; `side_channel`: handshakes."""
