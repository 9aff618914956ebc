# SPDX-License-Identifier: Apache-2.0
"""Checks of the addresses and ports at which other servers and the router reach this one.

What the side channel's settings mean is said by `kvcached_nixl.side_channel_address` alone, as at a start.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding, of_refusal
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.side_channel_address import ADVERTISE_HOST, HOST, PORT, Endpoint, SideChannelAddress, look_up
from kvcached_nixl.this_host import own_addresses

__all__ = ["http_port", "service_links", "shown", "side_channel"]

_NAME = "side channel"
_DEFAULT_HTTP_PORT = 8000
_MOST = 65_535
_WILDCARDS = ("0.0.0.0", "::")


def shown(at: Situation) -> str:
    """Where the side channel of the first engine here would be, as text."""
    if not at.ranks:
        return "none: no engine runs here"
    try:
        return str(_address(at, at.ranks[0]))
    except SettingsError as error:
        return error.found


def _address(at: Situation, rank: int) -> SideChannelAddress:
    """As `kvcached_nixl.compat.side_channel` has it, which reads these two variables by vLLM's defaults."""
    text = at.environ.get(PORT, "5600")
    try:
        port: int | str = int(text)
    except ValueError:
        port = text
    host = at.environ.get(HOST, "localhost")
    return SideChannelAddress.of(
        host, port, rank, at.environ, lambda: at.environ.get("VLLM_HOST_IP") or at.host.own_ip()
    )


def side_channel(at: Situation) -> Iterator[Finding]:
    """Whether each engine here can listen, and whether peers reach what they are told."""
    ranks = at.ranks
    if not ranks:
        return
    try:
        first, last = _address(at, ranks[0]), _address(at, ranks[-1])
    except SettingsError as error:
        yield of_refusal(_NAME, error)
        return
    cannot = [*_cannot_listen(at, first, range(first.bound.port, last.bound.port + 1))]
    yield from cannot
    if not cannot:
        yield from _doubts(at, first)


def _cannot_listen(at: Situation, address: SideChannelAddress, ports: Sequence[int]) -> Iterator[Finding]:
    http = _http(at)
    if http is not None and http[1] in ports and _meet(http[0], address.listening):
        yield Finding(
            _NAME,
            f"port {http[1]} for HTTP and for the side channel",
            "ports of their own",
            "The server does not start.",
            f"Change --port or {PORT}.",
        )
    for one in address.listening:
        if at.host.why_not_bound(one, 0) is not None:
            yield Finding(
                _NAME,
                f"{HOST}={address.bound.host}: {one} is no address of this host",
                "an address of this host, or 0.0.0.0 or :: for all of them",
                "The server does not start.",
                f"If peers reach this host at {one} through NAT, set {HOST}=0.0.0.0 and {ADVERTISE_HOST}={one}. "
                f"Otherwise correct {HOST} (Kubernetes: status.podIP).",
            )
            continue
        for port in ports:
            if (why := at.host.why_not_bound(one, port)) is not None:
                is_taken = why == errno.EADDRINUSE
                yield Finding(
                    _NAME,
                    f"port {port} of {one} is in use" if is_taken else f"{Endpoint(one, port)}: {os.strerror(why)}",
                    "a free port for each server of a host and each of its data-parallel ranks",
                    "The server does not start, or its peers read from another engine and refuse it.",
                    f"Give each server of this host a {PORT} of its own, or stop what listens there.",
                )


def _meet(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two listeners at the same port keep each other from it."""
    return bool({*one} & {*other} or {*one, *other} & {*_WILDCARDS})


def _doubts(at: Situation, address: SideChannelAddress) -> Iterator[Finding]:
    """What a start logs. An address that only this host reaches is wrong if nobody chose it, and in a pod."""
    try:
        leads_to = look_up(address.advertised.host)
    except (OSError, UnicodeError) as error:
        yield replace(of_refusal(_NAME, address.unresolved(error)), is_wrong=False)
        return
    is_chosen = HOST in at.environ or bool(at.environ.get(ADVERTISE_HOST, "").strip())
    is_only_here = all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in leads_to)
    for doubt in address.doubts(leads_to, own_addresses()):
        yield replace(of_refusal(_NAME, doubt), is_wrong=is_only_here and (at.is_in_cluster or not is_chosen))


def _http(at: Situation) -> tuple[Sequence[str], int] | None:
    """The HTTP server's addresses and port; None if it has none, or if they are not known."""
    if at.command is None or at.is_dynamo_worker or at.has("--headless") or at.value("--uds"):
        return None
    host = at.value("--host") or ""
    try:
        # An empty host and a name are IPv4's for vLLM, and of several addresses it takes the first.
        addresses = look_up(host)[:1] if host else ["0.0.0.0"]
    except (OSError, UnicodeError):
        addresses = []
    return addresses, at.number("--port", _DEFAULT_HTTP_PORT)


def http_port(at: Situation) -> Iterator[Finding]:
    """Only with a command line: without one there may be no port of its own."""
    http = _http(at)
    if http is None:
        return
    addresses, port = http
    if not addresses:
        why: str | None = f"--host {at.value('--host')}: no address"
    elif port > _MOST:
        why = f"port {port}: no port"
    else:
        number = at.host.why_not_bound(addresses[0], port)
        why = None if number is None else f"port {port} of {addresses[0]}: {os.strerror(number)}"
    if why is not None:
        yield Finding(
            "HTTP port",
            why,
            "an address of this host, and a port that this user may listen at, and that is free",
            "The server does not start.",
            "Change --host or --port, or stop what listens there.",
        )


def service_links(at: Situation) -> Iterator[Finding]:
    """Kubernetes gives a pod variables named after each Service; those of one called "vllm" are read by vLLM."""
    found = at.environ.get("VLLM_PORT")
    if found is not None and not found.isdecimal():
        yield Finding(
            "VLLM_PORT",
            f"VLLM_PORT={found}",
            "a number, or no such variable",
            "vLLM does not start.",
            "Set enableServiceLinks: false in the pod, or rename the Service.",
        )
