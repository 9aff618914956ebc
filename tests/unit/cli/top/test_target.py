# SPDX-License-Identifier: Apache-2.0
"""URLs of the command line, names that routers give, and the options."""

from __future__ import annotations

import argparse

import pytest

from kvcached_nixl.cli.top.options import add_arguments, from_arguments
from kvcached_nixl.cli.top.target import printable, target_of_name, target_of_url
from kvcached_nixl.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "name", "asked"),
    [
        ("http://router:8000", "router:8000", "http://router:8000/metrics"),
        ("http://router", "router:80", "http://router:80/metrics"),
        ("https://router/", "router:443", "https://router:443/metrics"),
        ("http://[2001:db8::1]:8000", "[2001:db8::1]:8000", "http://[2001:db8::1]:8000/metrics"),
        ("https://gate:8443/kv/one/", "gate:8443/kv/one", "https://gate:8443/kv/one/metrics"),
        ("http://router:8000/metrics", "router:8000", "http://router:8000/metrics"),
        ("http://ROUTER:8000", "router:8000", "http://router:8000/metrics"),
    ],
)
def test_a_url_says_where_to_ask(url: str, name: str, asked: str) -> None:
    assert target_of_url(url) == (name, asked)


@pytest.mark.parametrize(
    "url",
    [
        *("router:8000", "", "ftp://router", "http://", "http://router:x", "http://router:70000", "http://router:0"),
        *("http://user:secret@router", "http://router?x=1", "http://router#x", "http://r\x1b[2J:80", "http://[::1"),
        *("http://router/a b", "http://rout\u00e9r"),
    ],
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        target_of_url(url)
    assert "http://127.0.0.1:8000" in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("10.0.0.1:8100", "http://10.0.0.1:8100/metrics"),
        ("[::1]:8100", "http://[::1]:8100/metrics"),
        ("engine-1.pod:443", "https://engine-1.pod:443/metrics"),
        ("10.0.0.1:0", ""),
        ("10.0.0.1:99999", ""),
        ("10.0.0.1", ""),
        ("evil/../x:80", ""),
        ("user@host:80", ""),
        ("\x1b]0;x\x07:80", ""),
        ("host:80\n", ""),
        ("host:\u0661\u0662", ""),
    ],
)
def test_only_a_host_and_a_port_is_asked_because_a_router_names_it(name: str, url: str) -> None:
    assert target_of_name(name) == (name, url)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[bold]x[/]", "[bold]x[/]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\x07", "a\\nb\\tc\\x07"),
        ("\u202egnp", "\\u202egnp"),
        ("\x9b2J", "\\x9b2J"),
        ("\ud800", "\\ud800"),
        ("\U0001f600", "\\U0001f600"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def options(*arguments: str, is_terminal: bool = True) -> tuple[list[str], float, bool, bool]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = from_arguments(parser.parse_args(arguments), is_terminal=is_terminal)
    return [one.name for one in found.targets], found.interval_seconds, found.once, found.as_json


def test_the_command_line() -> None:
    assert options("http://a:1", "http://b:2", "http://a:1/") == (["a:1", "b:2"], 2.0, False, False)
    assert options("http://a:1", "--once", "--interval", "0.5") == (["a:1"], 0.5, True, False)
    assert options("http://a:1", "--json")[2:] == (True, True)
    assert options("http://a:1", is_terminal=False)[2:] == (True, False)


@pytest.mark.parametrize("arguments", [(), ("http://a:1", "--interval", "0"), ("http://a:1", "--interval", "nan")])
def test_wrong_usage_has_status_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options(*arguments)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err
