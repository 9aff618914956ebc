# SPDX-License-Identifier: Apache-2.0
"""Carries what engines say. `agent`: bytes and notifications, with NIXL; `side_channel`: handshakes, in `zmtp`."""
