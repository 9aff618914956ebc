# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.settings`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import Gate, Settings, TransferMode, read_gate


@pytest.mark.parametrize("word", ["1", "true", "True", "TRUE"])
def test_the_gate_opens_for_one_and_true_in_any_case(word: str) -> None:
    """Exactly kvcached's own words."""
    assert read_gate({"ENABLE_KVCACHED": word}) is Gate.ON


@pytest.mark.parametrize("environ", [{}, *({"ENABLE_KVCACHED": w} for w in ("", "0", "false", "yes", "on", " 1"))])
def test_the_gate_stays_closed_for_everything_else(environ: dict[str, str]) -> None:
    """Where kvcached would stay off, so does this package."""
    assert read_gate(environ) is Gate.KVCACHED_OFF


@pytest.mark.parametrize("word", ["0", "false", "False"])
def test_kvcached_nixl_zero_turns_this_package_off_alone(word: str) -> None:
    """kvcached stays on."""
    assert read_gate({"ENABLE_KVCACHED": "1", "KVCACHED_NIXL": word}) is Gate.PACKAGE_OFF


def test_an_unclear_word_is_refused_only_when_it_matters() -> None:
    """With kvcached off there is nothing to decide."""
    assert read_gate({"KVCACHED_NIXL": "maybe"}) is Gate.KVCACHED_OFF
    with pytest.raises(SettingsError, match="maybe"):
        read_gate({"ENABLE_KVCACHED": "1", "KVCACHED_NIXL": "maybe"})


def test_defaults_are_pull_and_thirty_seconds() -> None:
    """An empty configuration is a valid one; vLLM's own keys are not ours to judge."""
    assert Settings.from_extra_config({"backends": ["UCX"]}) == Settings(TransferMode.PULL, 30.0)


@pytest.mark.parametrize("value", ["push", "PULL", "", None, 1])
def test_a_transfer_mode_other_than_pull_is_refused(value: Any) -> None:
    """Asking for push and getting pull in silence would be a lie."""
    with pytest.raises(SettingsError, match="transfer_mode"):
        Settings.from_extra_config({"transfer_mode": value})


@pytest.mark.parametrize("value", [0, -1, True, "30", None, float("nan"), float("inf")])
def test_a_lease_that_is_no_positive_number_of_seconds_is_refused(value: Any) -> None:
    """A boolean would be a lease of one second, infinity memory that never comes back."""
    with pytest.raises(SettingsError, match="kv_lease_duration"):
        Settings.from_extra_config({"kv_lease_duration": value})


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 10**9))
def test_a_positive_lease_is_taken_as_it_is(value: float) -> None:
    """Seconds in, seconds out."""
    assert Settings.from_extra_config({"kv_lease_duration": value}).kv_lease_duration_seconds == value


def test_host_buffers_are_refused_in_words() -> None:
    """Staging that is asked for and not done would move blocks another way."""
    with pytest.raises(SettingsError, match="host_buffer_gib"):
        Settings.from_extra_config({"host_buffer_gib": 4})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enforce_handshake_compat", False),
        ("enforce_handshake_compat", "False"),
        ("enable_cross_layers_blocks", True),
        ("enable_cross_layers_blocks", "true"),
    ],
)
def test_vllm_keys_that_would_undo_the_geometry_are_refused(key: str, value: Any) -> None:
    """Without the handshake's comparison peers exchange rubbish; cross-layer blocks are allocated past kvcached."""
    with pytest.raises(SettingsError, match=key):
        Settings.from_extra_config({key: value})
    assert Settings.from_extra_config({key: str(value).lower() != "true"}) == Settings()
