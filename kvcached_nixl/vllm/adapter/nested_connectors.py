# SPDX-License-Identifier: Apache-2.0
"""Connectors inside a connector (vLLM's ``MultiConnector``), as configured. Any process; imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["with_children"]


def with_children(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The ``--kv-transfer-config`` of a connector and those of the connectors inside it, however deep. What is no
    configuration is passed over.
    """
    yield config
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping):
            yield from with_children(child)
