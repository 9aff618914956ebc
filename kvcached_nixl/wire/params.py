# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what a router puts into the two requests of a hand-over, read and checked once.

    to prefill      do_remote_decode: true, transfer_id (push only)
    its answer      what decode's request needs, a manifest among it (`prefill_params`)
    to decode       that answer, unchanged

A router that pushes may ask both at once; then it says by itself where prefill is:

    to decode       do_remote_prefill: true, transfer_id, remote_engine_id, remote_host, remote_port, tp_size

There the two requests propose each other by name: ``transfer_id`` is any string that the router gives to one prefill
and one decode request. Without it they meet by ``remote_request_id`` from prefill's answer, and without that by the
``X-Request-Id`` that both carry: vLLM puts ``cmpl-`` or ``chatcmpl-`` before it and a dash and eight random hexadecimal
digits after it (vllm/v1/engine/input_processor.py), a different number in each engine. A name proves nothing: what
pairs two requests is the digest of what was computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.checked import Identifier, Malformed, Port, TpSize, convert
from kvcached_nixl.wire.manifest import Manifest, as_json

__all__ = [
    "MANIFEST_KEY",
    "Fetch",
    "RemotePrefill",
    "asks",
    "name_of",
    "prefill_params",
    "read_fetch",
    "require_one_role",
]

MANIFEST_KEY = "kvcached_nixl"
MAX_REQUEST_ID = 1000
"""Below what an `Identifier` may have: the two sides' ids of one request may differ by a few characters."""
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class RemotePrefill(
    msgspec.Struct, frozen=True, rename={"engine_id": "remote_engine_id", "host": "remote_host", "port": "remote_port"}
):
    """Where decode finds prefill: its engine, its side channel, its tensor-parallel size."""

    engine_id: Identifier
    host: Identifier
    port: Port
    tp_size: TpSize = 1


class _Names(msgspec.Struct, frozen=True):
    transfer_id: Identifier | None = None
    remote_request_id: Identifier | None = None


@dataclass(frozen=True)
class Fetch:
    """What decode's request is to get, and from whom.

    Attributes:
        name: what its prefill request is called where no manifest says which it is.
        manifest: None where both sides were asked at once.
    """

    prefill: RemotePrefill
    name: str
    manifest: Manifest | None

    @property
    def lease_name(self) -> str:
        """What heartbeats call it."""
        return self.name if self.manifest is None else self.manifest.request_id


def asks(params: object, role: str) -> bool:
    """Whether a request's parameters name this role, ``do_remote_prefill`` or ``do_remote_decode``, in whatever form.

    Values that are no booleans count as naming it: they are refused where the role is taken up, not passed over.
    """
    return isinstance(params, Mapping) and params.get(role) not in (None, False)


def read_fetch(params: Mapping[str, Any], request_id: str, *, may_rendezvous: bool) -> Fetch:
    """Read a decode request's parameters; keys that are not needed are not looked at.

    Args:
        request_id: in decode's engine.
        may_rendezvous: whether prefill may be named without a manifest, because it checks what it writes (push).

    Raises:
        HandOverFailed: one is missing, has an unusable value or contradicts another; the message names it.
    """
    require_one_role(params)
    try:
        prefill = convert({key: params[key] for key in _FIELDS if params.get(key) is not None}, RemotePrefill)
        manifest = None if params.get(MANIFEST_KEY) is None else convert(params[MANIFEST_KEY], Manifest)
        name = name_of(params, request_id)
    except Malformed as cause:
        raise HandOverFailed(Cause.PARAMETERS, f"kv_transfer_params: {cause}") from cause
    if manifest is None and not may_rendezvous:
        raise HandOverFailed(
            Cause.NO_MANIFEST,
            f"kv_transfer_params have no {MANIFEST_KEY!r}, which says what prefill has computed; expected prefill's "
            "answer as it was. Let the router pass the whole kv_transfer_params of prefill's answer on, unchanged.",
        )
    return Fetch(prefill, name, manifest)


def name_of(params: Mapping[str, Any], request_id: str) -> str:
    """The name under which the two requests of a push may meet; equal for both, whatever vLLM added to their ids.

    Raises:
        Malformed: ``transfer_id`` or ``remote_request_id`` is there and is no string that can be used, or the request's
            own id is too long for a manifest.
    """
    if len(request_id) > MAX_REQUEST_ID:
        raise Malformed(f"a request id of {len(request_id)} characters; expected at most {MAX_REQUEST_ID}")
    names = convert({key: params[key] for key in ("transfer_id", "remote_request_id") if key in params}, _Names)
    # Two kinds of letters in front, so that no explicit name is ever taken for a request's.
    if names.transfer_id is not None:
        return f"transfer:{_utf8(names.transfer_id)}"
    theirs = names.remote_request_id
    # Some routers put an id of their own there, which prefill does not know.
    meant = theirs if theirs is not None and _RANDOM_SUFFIX.search(theirs) else request_id
    return f"request:{_RANDOM_SUFFIX.sub('', _utf8(meant))}"


def prefill_params(
    prefill: RemotePrefill, manifest: Manifest, *, transfer_id: object, transfer_mode: str
) -> dict[str, Any]:
    """What prefill answers: the parameters for decode's request.

    vLLM's own decode looks for block ids before it meets prefill; with empty ones it gets as far as the handshake,
    where it is refused in words.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "transfer_mode": transfer_mode,
        "remote_request_id": manifest.request_id,
        "remote_block_ids": [[] for _ in manifest.groups],
        **msgspec.to_builtins(prefill),
        MANIFEST_KEY: as_json(manifest),
    }


_FIELDS = ("remote_engine_id", "remote_host", "remote_port", "tp_size")


def require_one_role(params: Mapping[str, Any]) -> None:
    """Check that exactly one of the two roles is true.

    Raises:
        HandOverFailed: both roles are named, or one in a form that is no boolean.
    """
    roles = {key: params[key] for key in ("do_remote_prefill", "do_remote_decode") if params.get(key) is not None}
    if not all(isinstance(value, bool) for value in roles.values()) or sum(roles.values()) != 1:
        # Only of what kind other values are: they may be of any size, and nested deeper than can be shown.
        said = {key: value if isinstance(value, bool) else type(value) for key, value in roles.items()}
        raise HandOverFailed(
            Cause.PARAMETERS,
            f"kv_transfer_params have {said}; expected exactly one of do_remote_prefill and do_remote_decode to be "
            "true (bidirectional transfers are not served)",
        )


def _utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as cause:
        raise Malformed(f"an id that is no Unicode text: {name!r:.80}") from cause
    return name
