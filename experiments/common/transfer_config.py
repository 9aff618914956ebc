# SPDX-License-Identifier: Apache-2.0
"""The value of ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping

EXTRA = "kv_connector_extra_config"


def extra_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return its extra config."""
    extra = config.get(EXTRA) or {}
    assert isinstance(extra, Mapping)
    return extra


def with_extra(config: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """Return ``config`` with more extra config, which counts where both say something."""
    return {**config, EXTRA: {**extra_of(config), **extra}}
