# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.settings`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import (
    ActivationGate,
    MemoryPath,
    Settings,
    TransferMode,
    misspelled,
    read_gate,
    staged_on_host,
    unheeded,
)


@pytest.mark.parametrize("word", ["1", "true", "True", "TRUE"])
def test_the_gate_opens_for_one_and_true_in_any_case(word: str) -> None:
    """Exactly kvcached's own values."""
    assert read_gate({"ENABLE_KVCACHED": word}) is ActivationGate.ON


@pytest.mark.parametrize("environ", [{}, *({"ENABLE_KVCACHED": w} for w in ("", "0", "false", "yes", "on", " 1"))])
def test_the_gate_stays_closed_for_everything_else(environ: dict[str, str]) -> None:
    """Where kvcached would stay off, so does this package."""
    assert read_gate(environ) is ActivationGate.KVCACHED_OFF


@pytest.mark.parametrize("word", ["0", "false", "False"])
def test_kvcached_nixl_zero_turns_this_package_off_alone(word: str) -> None:
    """kvcached stays on."""
    assert read_gate({"ENABLE_KVCACHED": "1", "KVCACHED_NIXL": word}) is ActivationGate.PACKAGE_OFF


def test_an_unclear_word_is_refused_only_when_it_matters() -> None:
    """With kvcached off there is nothing to decide."""
    assert read_gate({"KVCACHED_NIXL": "maybe"}) is ActivationGate.KVCACHED_OFF
    with pytest.raises(SettingsError, match="maybe"):
        read_gate({"ENABLE_KVCACHED": "1", "KVCACHED_NIXL": "maybe"})


def test_defaults_are_pull_and_thirty_seconds_and_two_minutes() -> None:
    """An empty configuration is a valid one; vLLM's own keys are not ours to judge."""
    others = {"backends": ["UCX"], "enable_cross_layers_blocks": False, "bidirectional_kv_xfer": False}
    assert Settings.from_extra_config(others) == Settings(TransferMode.PULL, 30.0, 120.0)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        *(({"transfer_mode": mode.value}, Settings(mode)) for mode in TransferMode),
        *(({"memory_path": path.value}, Settings(memory_path=path)) for path in MemoryPath),
        *(
            ({"memory_path": path, "staging_gib": 2}, Settings(memory_path=MemoryPath(path), staging_gib=2.0))
            for path in ("auto", "host", "device")
        ),
        *(({"verify_fraction": value}, Settings(verify_fraction=value)) for value in (0, 1, 0.25)),
    ],
    ids=str,
)
def test_what_is_said_is_taken(extra: dict[str, Any], expected: Settings) -> None:
    assert Settings.from_extra_config(extra) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("memory_path", value) for value in ("", "Direct", "HOST", "dram", None, 1, True, ["direct"])),
        *(("staging_gib", value) for value in (0, -1, True, "4", [1], float("nan"), float("inf"), 65_537)),
        *(("verify_fraction", value) for value in (-0.1, 1.01, True, "1", None, [1], float("nan"), float("inf"))),
        *(("transfer_mode", value) for value in ("PUSH", "PULL", "both", "", None, 1, True)),
        *(("enable_cross_layers_blocks", value) for value in (True, "true")),
        *(("bidirectional_kv_xfer", value) for value in (True, "True")),
        ("host_buffer_gib", 4),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(key: str, value: Any) -> None:
    """A silent fallback would do something else than what was asked for."""
    with pytest.raises(SettingsError, match=key):
        Settings.from_extra_config({key: value})


def test_a_slab_beside_direct_is_refused() -> None:
    with pytest.raises(SettingsError, match=r'unset with "memory_path": "direct"'):
        Settings.from_extra_config({"memory_path": "direct", "staging_gib": 1})


SECONDS = {
    "kv_lease_duration": "kv_lease_duration_seconds",
    "handover_timeout": "handover_timeout_seconds",
    "push_registration_timeout": "handover_timeout_seconds",
    "allocation_timeout": "allocation_timeout_seconds",
    "give_way_after": "give_way_after_seconds",
    "drain_delay": "drain_delay_seconds",
}


@pytest.mark.parametrize("value", [0, -1, True, "30", None, float("nan"), float("inf"), 86_400.1, 10**400])
@pytest.mark.parametrize("key", SECONDS)
def test_what_is_no_positive_number_of_seconds_is_refused(key: str, value: Any) -> None:
    """A boolean would be one second, infinity memory that never comes back, decode reads no lease of over a day."""
    with pytest.raises(SettingsError, match=key):
        Settings.from_extra_config({key: value})


@pytest.mark.parametrize("key", SECONDS)
@given(value=st.floats(min_value=0, max_value=86_400, exclude_min=True) | st.integers(1, 86_400))
@settings(deadline=None)
def test_a_positive_number_of_seconds_is_taken_as_it_is(key: str, value: float) -> None:
    """Seconds in, seconds out, and the others keep their defaults."""
    asked = {key: value, **({"handover_timeout": value} if key == "allocation_timeout" else {})}
    expected: dict[str, Any] = {SECONDS[name]: value for name in asked}
    assert Settings.from_extra_config(asked) == Settings(**expected)


def test_vllms_name_for_the_timeout_means_the_same() -> None:
    """Both may be there if they agree; which of two is meant is not guessed."""
    both = {"handover_timeout": 60, "push_registration_timeout": 60.0}
    assert Settings.from_extra_config(both) == Settings(handover_timeout_seconds=60.0)
    with pytest.raises(SettingsError, match="push_registration_timeout=61") as refusal:
        Settings.from_extra_config(both | {"push_registration_timeout": 61})
    assert refusal.value.expected == "60, equal to handover_timeout, or unset"
    with pytest.raises(SettingsError, match="handover_timeout=0"):
        Settings.from_extra_config({"handover_timeout": 0, "push_registration_timeout": 60})


def test_blocks_are_not_awaited_for_longer_than_the_whole_hand_over() -> None:
    assert Settings.from_extra_config({"allocation_timeout": 120}).allocation_timeout_seconds == 120.0
    with pytest.raises(SettingsError, match="allocation_timeout=121") as refusal:
        Settings.from_extra_config({"allocation_timeout": 121})
    assert refusal.value.expected == "at most handover_timeout, 120"


@pytest.mark.parametrize("value", [False, "False", "false", 0])
def test_a_comparison_that_is_unwanted_is_done_and_said_so(value: Any) -> None:
    """Operators of other projects set the key. Nothing depends on it here, so it is no reason to refuse the start."""
    extra = {"enforce_handshake_compat": value}
    assert Settings.from_extra_config(extra) == Settings()
    (error,) = unheeded(extra)
    assert "enforce_handshake_compat" in error.found and "all the same" in error.consequence
    assert not list(unheeded({"enforce_handshake_compat": True})) + list(unheeded({"enforce_handshake_compat": "True"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("prefill_required", True), ("prefill_api_key_file", "f"), ("queue_timeout", 5), ("max_local_prefill_tokens", 0)],
)
def test_what_needs_prefill_servers_is_named_without_them(key: str, value: Any) -> None:
    (error,) = unheeded({key: value})
    assert key in error.found and "prefill" in error.expected and "nobody is asked" in error.consequence
    assert not [*unheeded({key: value, "prefill": "http://a"}), *unheeded({"prefill_required": "False"})]


def test_a_buffer_on_the_host_of_an_accelerator_is_a_slab_there() -> None:
    asked = {"transfer_mode": "push"}
    assert staged_on_host(asked, "cuda") == {"transfer_mode": "push", "memory_path": "host"}
    assert asked == {"transfer_mode": "push"}
    for path in ("auto", "host"):
        assert staged_on_host({"memory_path": path}, "cuda") == {"memory_path": "host"}
    for path in ("direct", "device", "elsewhere"):
        with pytest.raises(SettingsError, match="memory_path"):
            staged_on_host({"memory_path": path}, "cuda")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("transfer_mod", "transfer_mode"),
        ("transfer-mode", "transfer_mode"),
        ("Transfer_Mode", "transfer_mode"),
        ("kv_lease_duraton", "kv_lease_duration"),
        ("verify_fractions", "verify_fraction"),
        ("handover_time_out", "handover_timeout"),
        ("prefil", "prefill"),
        *((f"prefill_{one}", "prefill") for one in ("url", "urls", "servers")),
        ("kv_lease", "kv_lease_duration"),
        ("prefill_requried", "prefill_required"),
    ],
)
def test_a_key_that_is_almost_one_of_ours_is_named_with_what_was_meant(key: str, meant: str) -> None:
    """Nobody reads it: what was asked for would not be done, and nothing would say so."""
    (error,) = misspelled({key: 1})
    assert repr(key) in error.found and repr(meant) in error.expected and error.consequence and error.remedy


def test_keys_of_ours_and_of_others_are_no_mistakes() -> None:
    ours = {name.removesuffix("_seconds"): 1 for name in (one.name for one in dataclasses.fields(Settings))}
    others = ("backends", "num_threads", "backend_params", "connectors", "trusted_connectors", "shared_storage_path")
    assert not list(misspelled({**ours, **dict.fromkeys(others)}))
