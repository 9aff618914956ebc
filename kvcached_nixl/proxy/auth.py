# SPDX-License-Identifier: Apache-2.0
"""Authorization of requests. Keys are compared in constant time, even if their lengths differ."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import Scope

from kvcached_nixl.proxy.failure import Refusal, RouterFailure

__all__ = ["header", "may_administer", "require_key"]

_BEHIND_ANOTHER = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the value of a header that occurs exactly once, unchanged; None if it is missing or repeated."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else None


def require_key(scope: Scope, key: str) -> None:
    """Check ``Authorization: Bearer ...``. If ``key`` is empty, every request passes.

    Raises:
        Refusal: 401, the key is missing or wrong.
    """
    if not key:
        return
    kind, _, said = (header(scope, b"authorization") or b"").partition(b" ")
    if kind.lower() != b"bearer" or not _equal(said.strip(), key.encode()):
        raise Refusal(401, RouterFailure.KEY, "The key in Authorization: Bearer ... is missing or wrong.")


def may_administer(scope: Scope, key: str) -> None:
    """Check access to ``/instances``: with a key every client that has it; without one only programs on this machine.

    Without a key, requests are refused that name another host than a loopback one (a browser on this machine that
    shows a foreign page), and those that were forwarded by another proxy on this machine.

    Raises:
        Refusal: 401 or 403.
    """
    if key:
        return require_key(scope, key)
    client: Sequence[object] = scope.get("client") or ("",)
    names = [value for name, value in scope["headers"] if name == b"host"]
    is_local = _is_loopback(str(client[0])) and len(names) == 1 and _is_loopback(_host_of(names[0]))
    if not is_local or any(name in _BEHIND_ANOTHER for name, _ in scope["headers"]):
        raise Refusal(
            403,
            RouterFailure.KEY,
            "Without KVCACHED_NIXL_ADMIN_KEY, /instances answers only programs on this machine, on a loopback address.",
        )
    return None


def _equal(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(hashlib.sha256(one).digest(), hashlib.sha256(other).digest())


def _host_of(value: bytes) -> str:
    text = value.decode("latin-1")
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
