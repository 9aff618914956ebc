# SPDX-License-Identifier: Apache-2.0
"""side_channel_address.py: what is listened at, what peers get, and what speaks against their reaching it."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

import pytest

from kvcached_nixl import side_channel_address as module
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.side_channel_address import ADVERTISE_HOST, ADVERTISE_PORT, SideChannelAddress, look_up

OWN = "10.0.0.5"
HERE = frozenset({"127.0.0.1", "::1", OWN, "2001:db8::5", "fe80::1"})
"""Addresses of this host."""


def read(host: str, port: int = 5600, index: int = 0, own_ip: str = OWN, **environ: str) -> SideChannelAddress:
    return SideChannelAddress.of(host, port, index, environ, lambda: own_ip)


# ------------------------------------------------------------------------------------------------------- what peers get


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        *(("0.0.0.0", "0.0.0.0"), ("", "0.0.0.0"), ("*", "0.0.0.0"), (" ", "0.0.0.0"), ("0", "0")),
        *(("::", "::"), ("[::]", "::"), ("::ffff:0.0.0.0", "::ffff:0.0.0.0")),
    ],
)
def test_what_stands_for_every_address_is_never_advertised(host: str, bound: str) -> None:
    """Each peer would connect to itself (kthena#503)."""
    found = read(host)
    assert found.bound == (bound, 5600) and found.advertised == (OWN, 5600)
    assert "this host's own address" in found.origin and OWN in str(found) and str(found.bound) in str(found)
    assert read(host, **{ADVERTISE_HOST: "192.0.2.9"}).advertised == ("192.0.2.9", 5600)


@pytest.mark.parametrize("own_ip", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize(("host", "loopback"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_without_a_network_peers_get_the_loopback_address(own_ip: str, host: str, loopback: str) -> None:
    """vLLM's helper answers 0.0.0.0 where it finds no network. Engines on this host can still hand over."""
    found = read(host, own_ip=own_ip)
    assert found.advertised == (loopback, 5600) and "no other address" in found.origin
    assert [one.found for one in found.doubts([loopback], HERE) if "loopback" in one.found]
    assert read(host, own_ip=own_ip, **{ADVERTISE_HOST: "10.0.0.6"}).advertised.host == "10.0.0.6"


@pytest.mark.parametrize("told", ["0.0.0.0", "::", "*", "[::]"])
def test_what_stands_for_every_address_cannot_be_advertised(told: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){ADVERTISE_HOST} says.*connect to itself"):
        read("0.0.0.0", **{ADVERTISE_HOST: told})


def test_a_name_of_several_hosts_leads_to_the_addresses_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wake their engine there: at another host's, hand-overs would wait for the engine's next request."""
    monkeypatch.setattr(module, "look_up", lambda _: ["203.0.113.9", "127.0.0.1"])
    found = read("prefill")
    assert found.listening == ("127.0.0.1",) and found.local == ("127.0.0.1", 5600)
    assert found.advertised == ("prefill", 5600)
    monkeypatch.setattr(module, "look_up", lambda _: ["203.0.113.9"])
    assert read("prefill").listening == ("203.0.113.9",)


@pytest.mark.parametrize(
    ("host", "listening"),
    [
        *(("127.0.0.1", ("127.0.0.1",)), ("::1", ("::1",)), ("[::1]", ("::1",)), ("localhost", ("127.0.0.1",))),
        ("fe80::1%lo", ("fe80::1%lo",)),
    ],
)
def test_another_address_is_the_one_that_peers_get(host: str, listening: tuple[str, ...]) -> None:
    """As vLLM's own connector has it; an IPv6 address has no brackets in ``remote_host``, and a name stays a name."""
    found = read(host)
    assert found.listening == listening and found.advertised == found.bound == (host.strip("[]"), 5600)
    assert found.origin == "VLLM_NIXL_SIDE_CHANNEL_HOST"


@pytest.mark.parametrize(
    ("environ", "advertised"),
    [
        ({ADVERTISE_HOST: "203.0.113.7", ADVERTISE_PORT: "15600"}, ("203.0.113.7", 15603)),
        ({ADVERTISE_HOST: "[2001:db8::7]"}, ("2001:db8::7", 5603)),
        ({ADVERTISE_HOST: "prefill-0.prefill.svc"}, ("prefill-0.prefill.svc", 5603)),
        ({ADVERTISE_PORT: " 15600 "}, ("127.0.0.1", 15603)),
        ({ADVERTISE_HOST: "", ADVERTISE_PORT: ""}, ("127.0.0.1", 5603)),
    ],
    ids=["NAT", "IPv6", "a name that only others know", "only the port", "empty, as a manifest may set them"],
)
def test_the_operator_says_what_peers_get(environ: dict[str, str], advertised: tuple[str, int]) -> None:
    """The index of a data-parallel rank is added to both ports."""
    found = read("127.0.0.1", index=3, **environ)
    assert (found.bound, found.advertised) == (("127.0.0.1", 5603), advertised)


@pytest.mark.parametrize(
    ("host", "port", "index", "environ", "found"),
    [
        ("10.0.0.1:5600", 5600, 0, {}, "VLLM_NIXL_SIDE_CHANNEL_HOST='10.0.0.1:5600'"),
        ("no such host", 5600, 0, {}, "VLLM_NIXL_SIDE_CHANNEL_HOST='no such host'"),
        ("a..b", 5600, 0, {}, "VLLM_NIXL_SIDE_CHANNEL_HOST='a..b', for which there is no address"),
        ("127.0.0.1", 0, 0, {}, "VLLM_NIXL_SIDE_CHANNEL_PORT='0'"),
        ("127.0.0.1", 65_535, 1, {}, "VLLM_NIXL_SIDE_CHANNEL_PORT='65535' on data-parallel rank 1"),
        ("127.0.0.1", 5600, 0, {ADVERTISE_HOST: "tcp://10.0.0.1"}, f"{ADVERTISE_HOST}='tcp://10.0.0.1'"),
        ("127.0.0.1", 5600, 0, {ADVERTISE_HOST: "10.0.0.1:5600"}, f"{ADVERTISE_HOST}='10.0.0.1:5600'"),
        ("127.0.0.1", 5600, 0, {ADVERTISE_HOST: "x" * 254}, f"{ADVERTISE_HOST}='xxx"),
        *(("127.0.0.1", 5600, 0, {ADVERTISE_HOST: one}, f"{ADVERTISE_HOST} says") for one in ("0.0.0.0", "::", "*")),
        ("127.0.0.1", 5600, 0, {ADVERTISE_HOST: "0"}, f"{ADVERTISE_HOST} says 0"),
        *(
            ("127.0.0.1", 5600, 0, {ADVERTISE_PORT: one}, f"{ADVERTISE_PORT}='{one}'")
            for one in ("x", "0", "-1", "٥٦٠٠", "1" * 5000)
        ),
        ("127.0.0.1", 5600, 0, {ADVERTISE_PORT: "65536"}, f"{ADVERTISE_PORT}='65536'"),
        ("127.0.0.1", 5600, 8, {ADVERTISE_PORT: "65530"}, f"{ADVERTISE_PORT}='65530' on data-parallel rank 8"),
    ],
)
def test_what_cannot_be_used_is_refused(host: str, port: int, index: int, environ: dict[str, str], found: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(host, port, index, **environ)
    assert found in raised.value.found


# ----------------------------------------------------------------------------------------------------------- names


def answering(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(host: str, port: object, **_: object) -> list[Any]:
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0))
            for one in addresses
        ]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("10.0.0.1", "10.0.0.2", "10.0.0.1"), ["10.0.0.1", "10.0.0.2"]),
        (("2001:db8::1", "10.0.0.1"), ["10.0.0.1"]),
        (("2001:db8::1", "2001:db8::2"), ["2001:db8::1", "2001:db8::2"]),
    ],
    ids=["several", "both versions", "only IPv6"],
)
def test_both_ends_take_the_same_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], expected: list[str]
) -> None:
    answering(monkeypatch, *addresses)
    assert look_up("peer") == expected and read("peer").listening == tuple(expected)


# ----------------------------------------------------------------------------------------------------------- doubts


def doubts(host: str, leads_to: str, own: Collection[str] = HERE) -> list[str]:
    address = read(host, **{ADVERTISE_HOST: "peer"})
    found = list(address.doubts(leads_to.split(), own))
    assert all(one.remedy and one.consequence for one in found)
    return [next(word for word in ("loopback", "link-local", "listens at") if word in one.found) for one in found]


@pytest.mark.parametrize(
    ("host", "leads_to", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", ["loopback"]),
        ("::1", "::1", ["loopback"]),
        ("0.0.0.0", "127.0.0.1 127.0.1.1", ["loopback"]),
        ("::", "::ffff:127.0.0.1", ["loopback"]),
        ("0.0.0.0", f"127.0.1.1 {OWN}", []),
        ("0.0.0.0", "169.254.3.4", ["link-local"]),
        ("::", "fe80::1", ["link-local"]),
        ("0.0.0.0", OWN, []),
        ("::", OWN, []),
        ("::", "2001:db8::5", []),
        ("0.0.0.0", "2001:db8::5", ["listens at"]),
        ("127.0.0.1", OWN, ["listens at"]),
        ("127.0.0.2", "127.0.0.1", ["loopback", "listens at"]),
        ("127.0.0.1", "203.0.113.7", ["listens at"]),
        ("0.0.0.0", "203.0.113.7", []),
        ("192.0.2.1", "203.0.113.7", []),
        ("192.0.2.1", OWN, ["listens at"]),
    ],
)
def test_what_speaks_against_peers_reaching_it(host: str, leads_to: str, expected: list[str]) -> None:
    """203.0.113.7 is an address before a NAT: what listens on other than loopback may be forwarded to."""
    assert doubts(host, leads_to) == expected
