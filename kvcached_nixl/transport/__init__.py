# SPDX-License-Identifier: Apache-2.0
"""Moves bytes and notifications between two agents. `base`: the protocols; `agent`: NIXL; `memory`: for tests."""
