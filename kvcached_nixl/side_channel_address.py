# SPDX-License-Identifier: Apache-2.0
"""Where the side channel listens, and the address that peers get. The two differ behind NAT, and where it listens on
every address of the host.

vLLM has one setting for both (vllm#53018). Its address is the one to listen at; peers get it, too, unless it stands
for every address or the operator names another one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcached_nixl.errors import SettingsError

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
ADVERTISE_HOST = "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_HOST"
ADVERTISE_PORT = "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_PORT"

_NAME = re.compile(r"[\w.-]{1,253}")


class Endpoint(NamedTuple):
    """A host, as a name or as an address without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class SideChannelAddress:
    """Of one engine's side channel.

    Attributes:
        bound: where it listens, as configured.
        listening: the numeric addresses of ``bound.host`` that this host has.
        advertised: where peers reach it.
        origin: what ``advertised`` was taken from, as text.
    """

    bound: Endpoint
    listening: tuple[str, ...]
    advertised: Endpoint
    origin: str

    @classmethod
    def of(
        cls, host: str, port: int | str, index: int, environ: Mapping[str, str], own_ip: Callable[[], str]
    ) -> SideChannelAddress:
        """Read the settings. Raises SettingsError: one has an unusable value, or no address for peers can be found.

        Args:
            host, port: vLLM's settings; the text of a port that vLLM cannot read is refused here.
            index: of the data-parallel rank. It is added to both ports.
            own_ip: this host's own address as vLLM sees it, or 0.0.0.0.
        """
        bound = Endpoint(_host(HOST, host) or "0.0.0.0", _port(PORT, str(port), index))
        try:
            listening = _of_this_host(look_up(bound.host))
        except (OSError, UnicodeError) as error:
            raise SettingsError(
                found=f"{HOST}={host!r}, for which there is no address: {error}",
                expected="an address of this host, a name that leads to one, or 0.0.0.0 or :: for all of them",
                consequence="The side channel cannot listen, and no peer could hand KV over.",
                remedy=f"Correct {HOST}, or the name service of this host.",
            ) from error
        told = environ.get(ADVERTISE_HOST, "").strip()
        if told:
            advertised, origin = _host(ADVERTISE_HOST, told), ADVERTISE_HOST
            if not advertised or _is_wildcard(advertised):
                raise _nowhere(advertised)
        elif any(map(_is_wildcard, listening)):
            # get_ip may give a name: VLLM_HOST_IP is not checked by vLLM.
            advertised, origin = own_ip().strip("[]"), f"this host's own address: {bound.host} stands for all of them"
            if not advertised or _is_wildcard(advertised):
                advertised, origin = reached(listening[0]), "vLLM finds no other address of this host"
        else:
            advertised, origin = bound.host, HOST
        told = environ.get(ADVERTISE_PORT, "").strip()
        to = _port(ADVERTISE_PORT, told, index) if told else bound.port
        return cls(bound, listening, Endpoint(advertised, to), origin)

    @property
    def local(self) -> Endpoint:
        """Where processes of this host reach it."""
        return Endpoint(reached(self.listening[0]), self.bound.port)

    def __str__(self) -> str:
        return f"listens at {self.bound}, and peers get {self.advertised} ({self.origin})"

    def unresolved(self, error: Exception) -> SettingsError:
        """What follows if this host finds no address of ``advertised.host``."""
        return SettingsError(
            found=f"the side channel is advertised as {self.advertised} ({self.origin}), and this host finds no "
            f"address for that: {error}",
            expected="a name that every server resolves",
            consequence="Hand-overs fail with the cause unreachable, unless the other servers' name service knows it.",
            remedy=f"Correct {ADVERTISE_HOST} or {HOST}, or use an address.",
        )

    def doubts(self, leads_to: Sequence[str], own: Collection[str]) -> Iterator[SettingsError]:
        """Yields what speaks against peers on other hosts reaching it, where ``advertised.host`` leads to these numeric
        addresses here, and this host has its ``own``."""
        where = f"the side channel is advertised as {self.advertised} ({self.origin}), which is "
        expected = "an address of this host that servers on other hosts reach"
        remedy = (
            f"If all servers run on this host, ignore this. Otherwise set {HOST} to such an address; or set it to "
            f"0.0.0.0 (or ::) and {ADVERTISE_HOST} to what peers reach."
        )
        if all(map(_is_loopback, leads_to)):
            yield SettingsError(
                found=where + "a loopback address",
                expected=expected,
                consequence="Only servers on this host can hand over KV with this one. With others, hand-overs fail "
                "with the cause unreachable.",
                remedy=remedy,
            )
        elif all(ipaddress.ip_address(one).is_link_local for one in leads_to):
            yield SettingsError(
                found=where + "a link-local address",
                expected=expected,
                consequence="It means another host, or none, in another network, and through another card.",
                remedy=remedy,
            )
        if not self._may_receive(leads_to, own):
            yield SettingsError(
                found=f"the side channel listens at {self.bound} ({', '.join(self.listening)}), and is advertised "
                f"as {self.advertised} ({', '.join(leads_to)})",
                expected="a listener that receives what is sent to the advertised address",
                consequence="Peers find nobody there, unless something on this host forwards to the listener.",
                remedy=f"Set {HOST} to the address that is advertised, or to 0.0.0.0 (or :: for IPv6).",
            )

    def is_elsewhere(self, leads_to: Sequence[str], own: Collection[str]) -> bool:
        """Whether the advertised address does not belong to this host: NAT, a load balancer, or a mistake."""
        return not any(_is_own(one, own) for one in leads_to)

    def _may_receive(self, leads_to: Sequence[str], own: Collection[str]) -> bool:
        here = [one for one in leads_to if _is_own(one, own)]
        if not here:
            # Something before this host forwards to one of its addresses, but hardly to its loopback.
            return not all(map(_is_loopback, self.listening))
        return any(_receives(listening, one) for listening in self.listening for one in here)


def own_addresses() -> frozenset[str]:
    """The addresses of this host's interfaces; empty if they are not known."""
    found: set[str] = set()
    interfaces: dict[str, list[Any]] = {}
    with contextlib.suppress(OSError, ImportError):
        # Comes with vLLM, which the report runs without, too.
        import psutil

        interfaces = psutil.net_if_addrs()
    for addresses in interfaces.values():
        for one in addresses:
            with contextlib.suppress(ValueError):
                found.add(str(ipaddress.ip_address(one.address.partition("%")[0])))
    return frozenset(found)


def look_up(host: str) -> list[str]:
    """All IPv4 addresses of a name, else its IPv6 ones. Both ends go by this: listeners, and those who connect. Raises
    OSError, UnicodeError: there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    if "%" in host:
        # getaddrinfo leaves the scope out, without which a link-local address cannot be used.
        return [host]
    fourth = [one for one in found if one[0] == socket.AF_INET]
    return list(dict.fromkeys(str(address[0]) for *_, address in fourth or found))


def _host(variable: str, text: str) -> str:
    """A name or a numeric address without brackets; "" for every address of the host in ZMQ's spelling."""
    host = text.strip().removeprefix("[").removesuffix("]")
    if host in ("", "*"):
        return ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise SettingsError(
                found=f"{variable}={text!r}",
                expected="a host name or an address, without a port",
                consequence="Nobody could reach the side channel.",
                remedy=f"Correct {variable}; a port has a variable of its own.",
            ) from None
    return host


def _port(variable: str, text: str, index: int) -> int:
    # Python reads digits of every script, and fails on thousands of them.
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65_535 - index):
        rank = f" on data-parallel rank {index}, whose port is the {index}th after it" if index else ""
        raise SettingsError(
            found=f"{variable}={text!r}{rank}",
            expected=f"a port from 1 to {65_535 - index:,}",
            consequence="Nobody could reach the side channel.",
            remedy=f"Correct {variable}.",
        )
    return int(text) + index


def _nowhere(advertised: str) -> SettingsError:
    return SettingsError(
        found=f"{ADVERTISE_HOST} says {advertised or '*'}, a wildcard, which stands for every address",
        expected="one address for peers to connect to",
        consequence="Each peer would connect to itself.",
        remedy=f"Set {ADVERTISE_HOST} (in Kubernetes from status.podIP), or VLLM_HOST_IP, to what peers reach.",
    )


def _of_this_host(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those that this host has; all of them if it has none, or if that is not known."""
    own = own_addresses()
    return tuple(one for one in addresses if _is_wildcard(one) or _is_own(one, own)) or tuple(addresses)


def reached(address: str) -> str:
    """The address under which processes of this host reach a listener at this one."""
    if not _is_wildcard(address):
        return address
    return "::1" if isinstance(_ip(address), ipaddress.IPv6Address) else "127.0.0.1"


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _is_wildcard(host: str) -> bool:
    found = _ip(host)
    if found is None and host.replace(".", "").isalnum():
        # Short forms such as "0", which the system's resolver knows.
        try:
            return socket.inet_aton(host) == bytes(4)
        except OSError:
            return False
    return found is not None and found.is_unspecified


def _is_loopback(address: str) -> bool:
    found = _ip(address)
    return found is not None and found.is_loopback


def _is_own(address: str, own: Collection[str]) -> bool:
    return _is_loopback(address) or str(_ip(address)) in own


def _receives(listening: str, address: str) -> bool:
    if _is_wildcard(listening):
        # A listener on :: receives IPv4 as well.
        return ":" in listening or ":" not in address
    return _ip(listening) == _ip(address)
