# SPDX-License-Identifier: Apache-2.0
"""Who may use the router, and who may administer it. Keys are compared in constant time, whatever their lengths."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

from aiohttp import web

from kvcached_nixl.proxy.client import header
from kvcached_nixl.proxy.failure import Refusal, RouterFailure

__all__ = ["may_administer", "require_key"]

_CREDENTIALS = struct.Struct("3i")
"""struct ucred of Linux: process, user, group."""
_OWN_SITES = ("same-origin", "none")


def require_key(request: web.BaseRequest, key: str) -> None:
    """Check ``Authorization: Bearer ...``. If ``key`` is empty, every request passes.

    Raises:
        Refusal: 401, the key is missing or wrong.
    """
    if not key:
        return
    kind, _, said = (header(request, "authorization") or "").partition(" ")
    if kind.lower() != "bearer" or not _equal(said.strip(), key):
        raise Refusal(401, RouterFailure.KEY, "The key in Authorization: Bearer ... is missing or wrong.")


def may_administer(request: web.BaseRequest, key: str) -> None:
    """Check access to ``/instances``: for who has the key, or is this process's user on the Unix socket.

    A TCP connection from this machine proves nothing: a balancer, a sidecar or a tunnel here may have made it for
    someone elsewhere.

    Raises:
        Refusal: 401 or 403.
    """
    if request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        raise Refusal(403, RouterFailure.KEY, "/instances answers no request that a page of another site has sent.")
    if _is_own_user(request):
        return
    if not key:
        raise Refusal(
            403,
            RouterFailure.KEY,
            "/instances needs a key, or the Unix socket. Set KVCACHED_NIXL_ADMIN_KEY for the router and send it as "
            "Authorization: Bearer ..., or start the router with --admin-socket PATH.",
        )
    require_key(request, key)


def _is_own_user(request: web.BaseRequest) -> bool:
    peer = None if request.transport is None else request.transport.get_extra_info("socket")
    if peer is None or peer.family != socket.AF_UNIX:
        return False
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(hashlib.sha256(one.encode()).digest(), hashlib.sha256(other.encode()).digest())
