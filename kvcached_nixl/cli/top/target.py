# SPDX-License-Identifier: Apache-2.0
"""A server's URL, and its name on the screen."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcached_nixl.errors import SettingsError

__all__ = ["Target", "printable", "target_of_name", "target_of_url"]

_NAME = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")
HTTPS_PORT = 443
MOST_PORT = 65_535


class Target(NamedTuple):
    """Where to ask.

    Attributes:
        name: ``HOST:PORT``, as routers name their servers; with a base path, that is added.
        url: of its metrics; "" for a name that cannot be asked.
    """

    name: str
    url: str


def printable(text: str) -> str:
    """The text with everything but printable ASCII escaped, so that a terminal shows it and does not obey it."""
    return "".join(
        one if " " <= one <= "~" else one.encode("unicode_escape", "backslashreplace").decode() for one in text
    )


def target_of_url(url: str) -> Target:
    """The target of a URL from the command line. ``/metrics`` at its end may be left out.

    Raises:
        SettingsError: it is not ``http[s]://HOST[:PORT][/PATH]``.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    has_more = parts.query or parts.fragment or "@" in parts.netloc
    is_odd = not url.isascii() or printable(url) != url or " " in url or port == 0
    if parts.scheme not in ("http", "https") or not host or has_more or is_odd:
        raise SettingsError(
            found=f"the server {printable(url)!r:.200}",
            expected="http://HOST:PORT or https://HOST:PORT, with a base path or without one, and no user or query",
            consequence="It cannot be asked for its metrics, so nothing was asked.",
            remedy="Give the URL of a router or of an engine, such as http://127.0.0.1:8000.",
        )
    shown_host = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/metrics")
    where = f"{shown_host}:{port or (HTTPS_PORT if parts.scheme == 'https' else 80)}"
    return Target(where + path, f"{parts.scheme}://{where}{path}/metrics")


def target_of_name(name: str) -> Target:
    """The target of a name that a router gives to a server. It does not say whether the server has TLS."""
    port = int(name.rpartition(":")[2]) if _NAME.fullmatch(name) else 0
    if not 0 < port <= MOST_PORT:
        return Target(name, "")
    return Target(name, f"{'https' if port == HTTPS_PORT else 'http'}://{name}/metrics")
