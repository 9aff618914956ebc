# SPDX-License-Identifier: Apache-2.0
"""What an operator can set about asking prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.scheduler.asking.settings import KEY_VARIABLE, AskSettings


def read(extra_config: dict[str, Any], *, is_consumer: bool = True) -> AskSettings:
    return AskSettings.from_extra_config(extra_config, is_consumer=is_consumer, is_producer=False)


@pytest.mark.parametrize(
    ("extra", "accepts"),
    [({}, True), ({"accept_kv_transfer_params": False}, False), ({"prefill_required": "false"}, True)],
)
def test_nobody_is_asked(extra: dict[str, Any], accepts: bool) -> None:
    """Then clients may name a prefill server, unless they may not."""
    assert read(extra) == AskSettings(accepts_params=accepts)


@pytest.mark.parametrize(
    ("said", "servers"),
    [
        ("http://a:8000", ("http://a:8000",)),
        (["http://a:8000/", "https://b", "http://A:8000"], ("http://a:8000", "https://b")),
        ("http://[::1]:8000", ("http://[::1]:8000",)),
    ],
)
def test_servers(said: Any, servers: tuple[str, ...]) -> None:
    found = read({"prefill": said})
    assert found.servers == servers
    assert not found.is_required and not found.accepts_params


NO_SERVERS = ["a:8000", "ftp://a", "http://", "http://a:99999", "http://a/v1", "http://:p@a", "http://a?b", [1], {}, 7]


@pytest.mark.parametrize(
    "said", [*NO_SERVERS, {"a": 1}, [], None, "http://a\n", "http://a b", "http://a..b", "http://."]
)
def test_what_is_no_server(said: Any) -> None:
    with pytest.raises(SettingsError, match="URLs of servers without a path"):
        read({"prefill": said})


@pytest.mark.parametrize("key", ["prefill_required", "accept_kv_transfer_params"])
def test_flags(key: str) -> None:
    with pytest.raises(SettingsError, match="true or false"):
        read({"prefill": "http://a", key: "yes"})
    asked = read({"prefill": "http://a", key: True})
    assert asked != read({"prefill": "http://a"}) and asked == read({"prefill": "http://a", key: "True"})


def test_the_key_is_in_a_file_or_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "from the environment")
    found = read({"prefill": "http://a"})
    assert found.api_key == "from the environment"
    file = tmp_path / "key"
    file.write_text("secret\n")
    found = read({"prefill": "http://a", "prefill_api_key_file": str(file)})
    assert found.api_key == "secret" and "secret" not in repr(found)
    file.write_text("")
    for path in (str(file), str(tmp_path / "none"), 7.5):
        with pytest.raises(SettingsError, match="prefill_api_key_file"):
            read({"prefill": "http://a", "prefill_api_key_file": path})


@pytest.mark.parametrize("key", ["secret\nsecond", "secr\x00et", "schlüssel"])
def test_what_is_no_key_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    extra = {"prefill": "http://a"}
    for more in ({"prefill_api_key_file": str(file)}, {}):
        with pytest.raises(SettingsError, match="printable ASCII") as refusal:
            read({**extra, **more})
        assert key not in str(refusal.value) and key[:4] not in str(refusal.value)
        if "\x00" in key:
            return
        monkeypatch.setenv(KEY_VARIABLE, key)


def test_a_producer_asks_nobody() -> None:
    assert read({}, is_consumer=False) == AskSettings()
    with pytest.raises(SettingsError, match="kv_producer"):
        read({"prefill": "http://a"}, is_consumer=False)
