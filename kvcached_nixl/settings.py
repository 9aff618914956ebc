# SPDX-License-Identifier: Apache-2.0
"""Everything an operator can set, but where the side channel is (`side_channel_address`) and who is asked for KV
(`scheduler.asking.settings`). Read once, checked and frozen. ``docs/configuration.md`` says what each key means.

A key that is almost one of ours is reported (`misspelled`), since vLLM ignores whatever it does not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm import is_kvcached_on

SERVER_LOGGER = "vllm.kvcached_nixl"
"""A child of vLLM's logger, so that our messages reach the server's log without further configuration."""

MOST_GIB = 65_536
LONGEST_SECONDS = 86_400
"""The longest lease that a manifest may carry."""
_E = TypeVar("_E", bound=Enum)


class ActivationGate(Enum):
    """Whether this package may patch anything, and which variable turned it off."""

    ON = "on"
    KVCACHED_OFF = "off: ENABLE_KVCACHED is not 1 or true"
    PACKAGE_OFF = "off: KVCACHED_NIXL=0"


def read_gate(environ: Mapping[str, str]) -> ActivationGate:
    """Read the gate. Raises SettingsError: KVCACHED_NIXL has none of the accepted values."""
    if not is_kvcached_on(environ):
        return ActivationGate.KVCACHED_OFF
    word = environ.get("KVCACHED_NIXL", "")
    if word.lower() in ("", "1", "true"):
        return ActivationGate.ON
    if word.lower() in ("0", "false"):
        return ActivationGate.PACKAGE_OFF
    raise SettingsError(
        found=f"KVCACHED_NIXL={word!r}",
        expected="0 or false to turn this package off; 1, true or unset to leave it on",
        consequence="It is not clear whether the NIXL connector may be patched.",
        remedy="Correct or unset KVCACHED_NIXL.",
    )


class TransferMode(str, Enum):
    """Which engine starts the transfer of a request's KV; the handshake refuses a peer with another one.

    It does not say who moves the bytes: where KV is staged, prefill writes in both modes.
    """

    PULL = "pull"
    """Decode starts it, when prefill has finished the request: it READs the blocks, or registers its own for a prefill
    that stages."""
    PUSH = "push"
    """Prefill starts it while it computes, and WRITEs into the blocks that decode has registered."""

    @property
    def is_push(self) -> bool:
        return self is TransferMode.PUSH


class MemoryPath(str, Enum):
    """Which memory NIXL is to use, as the operator configured it."""

    AUTO = "auto"
    DIRECT = "direct"
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class Settings:
    """The extra configuration of one connector.

    Attributes:
        kv_lease_duration_seconds: how long prefill keeps blocks without a heartbeat from decode.
        handover_timeout_seconds: a hand-over whose KV has not come after this fails.
        allocation_timeout_seconds: a request that nothing frees blocks for fails after this; None: half of
            ``handover_timeout_seconds``.
        give_way_after_seconds: how long memory is short before prefill takes back what nobody fetches.
        staging_gib: size of the slab, if one is used; None to derive it from the engine's limits.
        verify_fraction: of decode's hand-overs.
        drain_delay_seconds: how long a server that shuts down still takes new requests.
    """

    transfer_mode: TransferMode = TransferMode.PULL
    kv_lease_duration_seconds: float = 30.0
    handover_timeout_seconds: float = 120.0
    allocation_timeout_seconds: float | None = None
    give_way_after_seconds: float = 2.0
    memory_path: MemoryPath = MemoryPath.AUTO
    staging_gib: float | None = None
    verify_fraction: float = 0.0
    drain_delay_seconds: float = 5.0

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Read ``kv_connector_extra_config``; other keys are ignored. Raises SettingsError: one of ours has an unusable
        value."""
        if "host_buffer_gib" in extra_config:
            raise _bad(extra_config, "host_buffer_gib", "staging_gib, for the slab of memory_path")
        for key in ("enable_cross_layers_blocks", "bidirectional_kv_xfer"):
            if not is_flag(False, extra_config, key):
                raise _bad(extra_config, key, "false while kvcached is on")
        own_seconds = _seconds(extra_config, "handover_timeout", cls.handover_timeout_seconds)
        seconds = _seconds(extra_config, "push_registration_timeout", own_seconds)
        if "handover_timeout" in extra_config and seconds != own_seconds:
            expected = f"{own_seconds:g}, equal to handover_timeout, or unset"
            raise _bad(extra_config, "push_registration_timeout", expected)
        allocation_seconds = _seconds(extra_config, "allocation_timeout", seconds)
        if allocation_seconds > seconds:
            raise _bad(extra_config, "allocation_timeout", f"at most handover_timeout, {seconds:g}")
        verify_fraction = extra_config.get("verify_fraction", cls.verify_fraction)
        if not _is_number(verify_fraction, 1):
            raise _bad(extra_config, "verify_fraction", "a number from 0 to 1")
        return cls(
            transfer_mode=_choice(extra_config, "transfer_mode", cls.transfer_mode),
            kv_lease_duration_seconds=_seconds(extra_config, "kv_lease_duration", cls.kv_lease_duration_seconds),
            handover_timeout_seconds=seconds,
            allocation_timeout_seconds=allocation_seconds if "allocation_timeout" in extra_config else None,
            give_way_after_seconds=_seconds(extra_config, "give_way_after", cls.give_way_after_seconds),
            memory_path=_choice(extra_config, "memory_path", cls.memory_path),
            staging_gib=_staging_gib(extra_config),
            verify_fraction=float(verify_fraction),
            drain_delay_seconds=_seconds(extra_config, "drain_delay", cls.drain_delay_seconds),
        )


_OTHERWISE = MappingProxyType(
    {
        "transfer_mode": "It is not known which side starts transfers.",
        "kv_lease_duration": "Blocks would be reused while decode still reads them, or never be freed.",
        "handover_timeout": "Requests would fail before prefill can serve them, or wait for ever.",
        "push_registration_timeout": "Requests would fail before prefill can serve them, or wait for ever.",
        "allocation_timeout": "Requests of decode would be given up at once, or never for lack of blocks.",
        "give_way_after": "Offers would be taken back before decode can fetch them, or never.",
        "memory_path": "It is not known which memory NIXL may use.",
        "staging_gib": "There would be no memory to stage through, or more than any host has.",
        "verify_fraction": "It is not known how many hand-overs are to be verified.",
        "drain_delay": "Routers would not notice in time that the server shuts down, or it would never end.",
        "host_buffer_gib": "KV would not move through the buffer that was asked for.",
        "enable_cross_layers_blocks": "vLLM would allocate the KV cache itself, and kvcached would wait for tensors "
        "that never come. kvcached's contiguous layout already moves all layers of a block as one.",
        "bidirectional_kv_xfer": "A request would count as prefill's and as decode's at once, and wait for KV that no "
        "engine sends.",
    }
)
"""Our keys in the extra configuration, and what would happen with an unusable value."""


def unheeded(extra_config: Mapping[str, Any]) -> Iterator[SettingsError]:
    """Yields an error for each key that asks for what is not done. The connector starts all the same."""
    yield from misspelled(extra_config)
    key = "enforce_handshake_compat"
    if not is_flag(True, extra_config, key):
        consequence = "kvcached_nixl compares peers all the same, and refuses KV of those that differ."
        yield bad(key, extra_config[key], "true, or the key left out", f"It is not followed: {consequence}")
    for key in _BESIDE_PREFILL if "prefill" not in extra_config else ():
        if not is_flag(False, extra_config, key):
            yield bad(key, extra_config[key], "prefill beside it", "It is not followed: nobody is asked for KV.")


def misplaced(extra_config: Mapping[str, Any]) -> Iterator[SettingsError]:
    """Yields an error for each key of a ``MultiConnector`` that is read of its NIXL connector alone."""
    for key in extra_config:
        if key in _KEYS and key not in ("trusted_connectors", "drain_delay"):
            expected = "it in the kv_connector_extra_config of NixlConnector, below connectors"
            yield bad(key, extra_config[key], expected, "It is not followed here.")


def staged_on_host(extra_config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the extra configuration with ``memory_path`` set to a slab on the host, for ``kv_buffer_device="cpu"``.
    Raises SettingsError: ``memory_path`` asks for something else."""
    path = _choice(extra_config, "memory_path", Settings.memory_path)
    if path not in (MemoryPath.AUTO, MemoryPath.HOST):
        raise _bad(extra_config, "memory_path", f'"host" or unset, together with kv_buffer_device="cpu" on {device}')
    return {**extra_config, "memory_path": MemoryPath.HOST.value}


def _choice(extra_config: Mapping[str, Any], key: str, default: _E) -> _E:
    try:
        return type(default)(extra_config.get(key, default.value))
    except ValueError:
        *others, last = (f'"{one.value}"' for one in type(default))
        raise _bad(extra_config, key, f"{', '.join(others)} or {last}") from None


def _staging_gib(extra_config: Mapping[str, Any]) -> float | None:
    key = "staging_gib"
    value = extra_config.get(key)
    if value is None:
        return None
    if not _is_number(value, MOST_GIB) or not value:
        raise _bad(extra_config, key, f"a number of GiB above 0 and up to {MOST_GIB:,}")
    if _choice(extra_config, "memory_path", Settings.memory_path) is MemoryPath.DIRECT:
        raise bad(key, value, 'unset with "memory_path": "direct"', "Nothing is staged with it.")
    return float(value)


def _is_number(value: object, most: float) -> bool:
    # bool is an int: "kv_lease_duration": true would be a lease of one second.
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= most


def _seconds(extra_config: Mapping[str, Any], key: str, default: float) -> float:
    return read_seconds(extra_config, key, default, _OTHERWISE[key])


def _bad(extra_config: Mapping[str, Any], key: str, expected: str) -> SettingsError:
    return bad(key, extra_config[key], expected, _OTHERWISE[key])


# ---------------------------------------------------------------------------------------------------------- single keys

_BESIDE_PREFILL = ("prefill_required", "prefill_api_key_file", "queue_timeout", "max_local_prefill_tokens")
_KEYS = (
    *(*_OTHERWISE, *_BESIDE_PREFILL),
    *("enforce_handshake_compat", "trusted_connectors", "prefill", "accept_kv_transfer_params"),
)
_ALMOST = 0.8


def misspelled(extra_config: Mapping[str, Any]) -> Iterator[SettingsError]:
    """Yields an error for each key that is no setting of this package and resembles one, with the setting's name."""
    for key in extra_config:
        said = str(key).lower().replace("-", "_")
        meant = difflib.get_close_matches(said, _KEYS, 1, _ALMOST)
        meant += [one for one in _KEYS if said.startswith(f"{one}_") or one.startswith(f"{said}_")]
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
    if not _is_number(value, LONGEST_SECONDS) or not value:
        raise bad(key, value, f"a number of seconds above 0 and up to {LONGEST_SECONDS:,}", consequence)
    return float(value)


def bad(key: str, value: object, expected: str, consequence: str) -> SettingsError:
    return SettingsError(
        found=f"kv_connector_extra_config has {key}={value!r}",
        expected=expected,
        consequence=consequence,
        remedy=f"Correct or remove {key!r} in --kv-transfer-config.",
    )
