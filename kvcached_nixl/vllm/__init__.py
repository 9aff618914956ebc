# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM's and kvcached's modules that are needed before anything else can be imported. No imports here."""

from __future__ import annotations

KV_TRANSFER = "vllm.distributed.kv_transfer.kv_connector"

NIXL_PREFIX = f"{KV_TRANSFER}.v1.nixl"
"""Prefix of the dotted name of every module of the NIXL connector, in each vLLM version."""

KVCACHED_NIXL_COMPAT = "kvcached.integration.vllm.nixl_compat"

ROOTS = ("vllm", KVCACHED_NIXL_COMPAT)
"""The patches are loaded when either is imported. Until then an interpreter start only pays for the import hooks."""
