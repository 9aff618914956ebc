# SPDX-License-Identifier: Apache-2.0
"""Decode asks prefill: an engine that has the KV of a prompt computed by another server, without a router."""
