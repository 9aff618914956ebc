# SPDX-License-Identifier: Apache-2.0
"""DECIDE: what to send, to whom, under which lease; runs in the engine-core process. No torch, no NIXL."""
