# SPDX-License-Identifier: Apache-2.0
"""Where the prefill servers are that an operator has named: host names are looked up again and again."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from kvcached_nixl.settings import SERVER_LOGGER

logger = logging.getLogger(SERVER_LOGGER)

EVERY_SECONDS = 5.0
KEPT_SECONDS = 300.0
"""How long the last addresses count while the resolver gives none."""


def is_name(url: str) -> bool:
    """Whether the host of a URL has to be looked up."""
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return True
    return False


class Resolver:
    """Looks up the addresses behind host names: a headless Service of Kubernetes, or a scaled service of Compose, is
    one name for all its servers. A thread for each name, because a resolver may hang.

    Where a name has addresses of both families, those of IPv4 count: each server would be there twice. ``woken`` is
    called on one of the threads when `take` has something to return.
    """

    def __init__(self, urls: Iterable[str], woken: Callable[[], None]) -> None:
        self._woken = woken
        self._lock = threading.Lock()
        self._changed: dict[str, tuple[str, ...]] = {}
        self._closed = threading.Event()
        for url in filter(is_name, urls):
            threading.Thread(target=self._watch, args=(url,), name="kvcached_nixl-resolver", daemon=True).start()

    def take(self) -> dict[str, tuple[str, ...]]:
        """Returns what has changed since the last call: URL -> addresses, none if they are not known any more."""
        if not self._changed:
            return {}
        with self._lock:
            changed, self._changed = self._changed, {}
        return changed

    def close(self) -> None:
        """Ends the threads, unless a look-up hangs."""
        self._closed.set()

    def _watch(self, url: str) -> None:
        known: tuple[str, ...] = ()
        found_at_seconds = 0.0
        while not self._closed.is_set():
            found = addresses_of(url)
            if found:
                found_at_seconds = time.monotonic()
            elif time.monotonic() < found_at_seconds + KEPT_SECONDS:
                found = known
            if found != known:
                logger.info("Prefill %s is at %s", url, ", ".join(found) or "no known address")
                known = found
                with self._lock:
                    self._changed[url] = found
                self._woken()
            self._closed.wait(EVERY_SECONDS)


def addresses_of(url: str) -> tuple[str, ...]:
    """The addresses of the host name of a URL now; none if it has none."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    families = {family for family, *_ in found}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return tuple(sorted({str(address[0]) for of, _, _, _, address in found if of is family}))
