# SPDX-License-Identifier: Apache-2.0
"""Checks of the addresses and ports at which other servers and the router reach this one."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Iterator

from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "HOST",
    "PORT",
    "http_port",
    "service_links",
    "side_channel_host",
    "side_channel_ports",
]

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_HOST, DEFAULT_PORT, _DEFAULT_HTTP_PORT = "localhost", 5600, 8000
_REMEDY = f"Set {HOST} to an address of this host that the other servers reach (Kubernetes: status.podIP)."


def side_channel_host(at: Situation) -> Iterator[Finding]:
    """Whether peers can connect to the address that this server tells them, which is the one that it listens at."""
    given = at.environ.get(HOST)
    name = given or DEFAULT_HOST
    shown = f"{HOST}={given}" if given else f"{HOST} is not set, so vLLM takes {DEFAULT_HOST}"
    try:
        addresses = [ipaddress.ip_address(one.partition("%")[0]) for one in at.host.addresses(name)]
    except OSError as error:
        yield _of_host(f"{shown}, which has no address: {error}", "The server does not start.")
        return
    if any(one.is_unspecified for one in addresses):
        yield _of_host(
            f"{shown}, the address of no host",
            "Peers are told to connect to it, and reach themselves or nobody: hand-overs fail as unreachable.",
        )
        return
    # ZeroMQ listens at the first address of a name.
    address = str(addresses[0])
    if at.host.why_not_bound(address, 0) == errno.EADDRNOTAVAIL:
        yield _of_host(f"{shown}: {address} is no address of this host", "The server does not start.")
    elif addresses[0].is_loopback:
        # A name that was chosen on purpose is fine where every server is on one machine.
        yield _of_host(
            f"{shown}, which only this {'pod' if at.is_in_cluster else 'machine'} reaches",
            "Servers elsewhere cannot fetch from it: hand-overs fail as unreachable.",
            is_wrong=not given or at.is_in_cluster,
        )


def _of_host(found: str, consequence: str, *, is_wrong: bool = True) -> Finding:
    return Finding("side channel", found, "an address that the other servers reach", consequence, _REMEDY, is_wrong)


def side_channel_ports(at: Situation) -> Iterator[Finding]:
    """One port for each data-parallel rank that runs here, from the given one on."""
    text = at.environ.get(PORT, str(DEFAULT_PORT))
    ranks = at.number("--data-parallel-size-local", at.number("--data-parallel-size", 1))
    if not text.isdecimal() or not 0 < int(text) <= 65_536 - ranks:
        yield Finding(
            "side channel",
            f"{PORT}={text!r}, for {ranks} data-parallel ranks",
            "a number, with all ports up to 65535",
            "The server does not start.",
            f"Correct or unset {PORT}.",
        )
        return
    ports = range(int(text), int(text) + ranks)
    http = at.number("--port", _DEFAULT_HTTP_PORT)
    if at.command is not None and http in ports:
        yield Finding(
            "side channel",
            f"port {http} for HTTP and for the side channel",
            "ports of their own",
            "The server does not start.",
            f"Change --port or {PORT}.",
        )
    address = _listens_at(at)
    for port in ports:
        if address is not None and at.host.why_not_bound(address, port) == errno.EADDRINUSE:
            yield Finding(
                "side channel",
                f"port {port} of {address} is in use",
                "a free port for each server of a host and each of its data-parallel ranks",
                "The server does not start, or its peers read from another engine and refuse it.",
                f"Give each server of this host a {PORT} of its own, or stop what listens there.",
            )


def _listens_at(at: Situation) -> str | None:
    try:
        found = at.host.addresses(at.environ.get(HOST) or DEFAULT_HOST)
    except OSError:
        return None
    return found[0] if found else None


def http_port(at: Situation) -> Iterator[Finding]:
    """Only with a command line: without one there may be no port of its own."""
    port = at.number("--port", _DEFAULT_HTTP_PORT)
    if at.command is not None and (why := at.host.why_not_bound("0.0.0.0", port)) is not None:
        yield Finding(
            "HTTP port",
            f"port {port}: {os.strerror(why)}",
            "a port that this user may listen at, and that is free",
            "The server does not start.",
            "Change --port, or stop what listens there.",
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
