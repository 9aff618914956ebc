# SPDX-License-Identifier: Apache-2.0
"""CARRY: bytes and notifications between two agents. `base` says how, `agent` is NIXL, `memory` stands in for it."""
