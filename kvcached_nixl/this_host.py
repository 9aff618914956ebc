# SPDX-License-Identifier: Apache-2.0
"""What this host's kernel says of its network: its addresses, and which processes have a port."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

_USER = re.compile(r"//[^/@]*@")
_PROGRAM_WORDS = 4
"""As in ``python -m vllm.entrypoints.openai.api_server`` and ``python .../bin/vllm serve MODEL``."""
_SHOWN_FLAGS = ("--data-parallel-rank", "--host", "--model", "--port", "--served-model-name")
_SHOWN = 300
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class PortHolder:
    """A socket that has a port.

    Attributes:
        address: its own.
        process: the process, as text.
        is_engine: the process belongs to an engine with this package: it holds the lock on an engine's name
            (``kvcached_nixl.naming.claim``).
    """

    address: str
    process: str
    is_engine: bool = False


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


def port_holders(port: int, addresses: Collection[str]) -> list[PortHolder]:
    """The sockets that keep others from listening at a TCP port on these addresses, listeners first.

    Returns: none as well if this process may not know.
    """
    import psutil

    try:
        sockets = psutil.net_connections("tcp")
    except (OSError, psutil.Error):
        return []
    found = [
        one
        for one in sockets
        if one.laddr and one.laddr.port == port and any(_overlap(one.laddr.ip, address) for address in addresses)
    ]
    found.sort(key=lambda one: one.status != psutil.CONN_LISTEN)
    return [_holder(one) for one in found]


def _overlap(one: str, other: str) -> bool:
    one, other = one.removeprefix("::ffff:"), other.removeprefix("::ffff:")
    if one in _WILDCARDS or other in _WILDCARDS:
        # IPv4 and IPv6 only meet at ::, which receives both.
        return "::" in (one, other) or (":" in one) == (":" in other)
    return one == other


def _holder(socket: Any) -> PortHolder:
    import psutil

    use = "" if socket.status == psutil.CONN_LISTEN else f", for a connection of its own ({socket.status})"
    if socket.pid is None:
        unseen = "a process that this one cannot see: another user's, or in another container on this network"
        return PortHolder(socket.laddr.ip, f"{unseen}{use}")
    try:
        process = psutil.Process(socket.pid)
        return PortHolder(socket.laddr.ip, f"{_described(process)}{use}", _is_engine(process))
    except psutil.Error:
        return PortHolder(socket.laddr.ip, f"process {socket.pid}, which ends or cannot be looked at{use}")


def _described(process: Any) -> str:
    if process.pid == os.getpid():
        return f"this process itself ({process.pid}), for another connector"
    text = f"process {process.pid} ({process.name()}) of {process.username()}: {_command(process)}"
    parent = process.parent()
    # An engine core has a title in place of its command line.
    if parent is not None and "::" in process.name():
        text += f", started by process {parent.pid}: {_command(parent)}"
    return text


def _command(process: Any) -> str:
    """The program, and those of its arguments that say what it serves. The others may be secret."""
    words = process.cmdline()
    end = next((place for place, word in enumerate(words) if word.startswith("-") and word != "-m"), len(words))
    shown = words[: min(end, _PROGRAM_WORDS)]
    for place, word in enumerate(words[end:], end):
        name, given, _ = word.partition("=")
        if name in _SHOWN_FLAGS:
            shown += [word] if given else words[place : place + 2]
    text = " ".join(_USER.sub("//***@", word) for word in shown) or "no command line"
    return text[:_SHOWN] if shown == words else f"{text[:_SHOWN]} ..."


def _is_engine(process: Any) -> bool:
    import psutil

    try:
        files = [PurePath(one.path) for one in process.open_files()]
    except psutil.Error:
        return False
    return any(path.name == "owner" and path.parent.name.startswith("kvcached-tp-") for path in files)
