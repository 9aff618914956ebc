# SPDX-License-Identifier: Apache-2.0
"""Decides what to send, to whom, and under which lease. Runs in the engine-core process. No torch, no NIXL."""
