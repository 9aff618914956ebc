# SPDX-License-Identifier: Apache-2.0
"""A server's name: its host and port. Imports no third-party library, so that the command line works without any."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvcached_nixl.errors import SettingsError

__all__ = ["address_of"]


def address_of(url: str) -> str:
    """``host:port`` of a server's URL.

    Raises:
        SettingsError: the URL is not ``http://host:port`` or ``https://host:port``, or has more than that.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or not parts.hostname.isascii():
        raise SettingsError(
            found=f"the server {url!r:.200}",
            expected="http://HOST:PORT or https://HOST:PORT, and nothing after it",
            consequence="The router cannot tell where to send requests.",
            remedy="Correct the server's URL.",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"
