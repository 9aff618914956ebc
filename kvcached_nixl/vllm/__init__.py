# SPDX-License-Identifier: Apache-2.0
"""What is needed of vLLM and kvcached before anything else can be imported: names of modules, and kvcached's switch.
No imports here."""

from __future__ import annotations

# Like typing.TYPE_CHECKING.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

KV_TRANSFER = "vllm.distributed.kv_transfer.kv_connector"

NIXL_PREFIX = f"{KV_TRANSFER}.v1.nixl"
"""Prefix of the dotted name of every module of the NIXL connector, in each vLLM version."""

KVCACHED_NIXL_COMPAT = "kvcached.integration.vllm.nixl_compat"

ROOTS = ("vllm", KVCACHED_NIXL_COMPAT)
"""The patches are loaded when either is imported. Until then an interpreter start only pays for the import hooks."""


def is_kvcached_on(environ: Mapping[str, str]) -> bool:
    """Read ENABLE_KVCACHED exactly as kvcached itself does, once vLLM has been imported."""
    return environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true")
