# SPDX-License-Identifier: Apache-2.0
"""Reads keys of ``kv_connector_extra_config``. Every refusal names the key, its value and what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from kvcached_nixl.errors import SettingsError

LONGEST_SECONDS = 86_400
"""One day: the longest lease that a manifest may carry."""

_KEYS = (
    *("transfer_mode", "handover_timeout", "push_registration_timeout", "allocation_timeout", "give_way_after"),
    *("kv_lease_duration", "bidirectional_kv_xfer", "memory_path", "staging_gib", "verify_fraction", "drain_delay"),
    *("host_buffer_gib", "enforce_handshake_compat", "enable_cross_layers_blocks", "trusted_connectors"),
    *("prefill", "prefill_required", "prefill_api_key_file", "accept_kv_transfer_params", "queue_timeout"),
)
_ALMOST = 0.8


def misspelled(extra_config: Mapping[str, Any]) -> Iterator[SettingsError]:
    """Yields an error for each key that is no setting of this package and resembles one, with the setting's name."""
    for key in extra_config:
        meant = difflib.get_close_matches(str(key).lower().replace("-", "_"), _KEYS, 1, _ALMOST)
        if meant and key not in _KEYS:
            yield SettingsError(
                found=f"kv_connector_extra_config has {key!r}",
                expected=f"{meant[0]!r}, or a key that resembles none of kvcached_nixl's",
                consequence=f"Neither vLLM nor kvcached_nixl reads it, so {meant[0]} has its default.",
                remedy=f"Correct or remove {key!r} in --kv-transfer-config.",
            )


def is_flag(value: bool, extra_config: Mapping[str, Any], key: str) -> bool:
    """Whether a key has this value, or is not there. vLLM accepts "true" and "false" too, in any case."""
    return str(extra_config.get(key, value)).lower() == str(value).lower()


def read_flag(extra_config: Mapping[str, Any], key: str, consequence: str) -> bool:
    """Returns true or false; false if the key is not there."""
    if is_flag(False, extra_config, key):
        return False
    if not is_flag(True, extra_config, key):
        raise bad(key, extra_config[key], "true or false", consequence)
    return True


def read_seconds(extra_config: Mapping[str, Any], key: str, default: float, consequence: str) -> float:
    """Returns a positive number, or ``default`` if the key is not there."""
    if key not in extra_config:
        return default
    value = extra_config[key]
    # bool is an int: "kv_lease_duration": true would be a lease of one second.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_SECONDS:
        raise bad(key, value, f"a number of seconds above 0 and up to {LONGEST_SECONDS:,}", consequence)
    return float(value)


def bad(key: str, value: object, expected: str, consequence: str) -> SettingsError:
    return SettingsError(
        found=f"kv_connector_extra_config has {key}={value!r}",
        expected=expected,
        consequence=consequence,
        remedy=f"Correct or remove {key!r} in --kv-transfer-config.",
    )
