# SPDX-License-Identifier: Apache-2.0
"""Reads and extends the value of ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping

EXTRA = "kv_connector_extra_config"


def role(name: str) -> str:
    """Return the ``kv_role`` of a server by its name: a prefill server's, a decode server's, or that of both."""
    return "kv_producer" if "prefill" in name else "kv_consumer" if "decode" in name else "kv_both"


def nixl(name: str, extra: Mapping[str, object] | None = None, **more: object) -> dict[str, object]:
    """Return the config of a NIXL connector in the role of ``name``; ``more`` are further fields.

    With ``num_threads`` 0, NIXL has no threads besides its progress thread: servers here share few cores.
    """
    config = {"kv_connector": "NixlConnector", "kv_role": role(name), EXTRA: {"num_threads": 0, **(extra or {})}}
    return {**config, **more}


def extra_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the ``kv_connector_extra_config`` of ``config``."""
    extra = config.get(EXTRA) or {}
    assert isinstance(extra, Mapping)
    return extra


def with_extra(config: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """Return ``config`` with ``extra`` merged into its extra config; ``extra`` wins where both have a key."""
    return {**config, EXTRA: {**extra_of(config), **extra}}
