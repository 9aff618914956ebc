# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what client, router, prefill and decode exchange about a hand-over, read and checked once.

    to prefill      do_remote_decode: true, transfer_id (push only)
    its answer      the parameters for decode's request, with a manifest (`prefill_params`)
    to decode       that answer, unchanged

A router that pushes may ask both at once; then it tells decode where prefill is:

    to decode       do_remote_prefill: true, transfer_id, remote_engine_id, remote_host, remote_port, tp_size,
                    pp_size

In that case the two requests find each other by name: ``transfer_id`` is any string that the router gives to one
prefill and one decode request. Without it they match by ``remote_request_id`` from prefill's answer, and without that
by the ``X-Request-Id`` that both carry: vLLM puts ``cmpl-`` or ``chatcmpl-`` before it, and a dash and eight random
hexadecimal digits after it (vllm/v1/engine/input_processor.py), different ones in each engine. A name proves nothing:
two requests are paired only if the digests of their prompts are equal.

A wrong type or an impossible value in a known field is refused, and the error names the field; unknown fields are
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import (
    MAX_TP_SIZE,
    BlockNumber,
    Count,
    Identifier,
    Malformed,
    Port,
    TpSize,
    convert,
    require,
)
from kvcached_nixl.wire.manifest import Manifest

MANIFEST_KEY = "kvcached_nixl"
CACHED_TOKENS_KEY = "remote_prefill_cached_tokens"
"""vLLM's own: from 0.31 on its API server reads it, too."""
HAS_CLIENTS_KEY = "kvcached_nixl_has_clients"
"""Whether the server may have clients of its own (``kv_role`` kv_both)."""
HEADROOM_KEY = "kvcached_nixl_headroom"
"""``queued_tokens`` of the engine that answers; see `wire.headroom`."""
MAX_REQUEST_ID = 1000
"""Less than an `Identifier` may have: the ids of one request on the two sides may differ by a few characters."""
_TRANSFER = "transfer:"
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class RemotePrefill(
    msgspec.Struct, frozen=True, rename={"engine_id": "remote_engine_id", "host": "remote_host", "port": "remote_port"}
):
    """Where decode finds prefill: its engine, its side channel, its tensor- and pipeline-parallel sizes."""

    engine_id: Identifier
    host: Identifier
    port: Port
    tp_size: TpSize = 1
    pp_size: TpSize = 1

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True, rename={"manifest": MANIFEST_KEY}):
    """What the supported vLLM versions, this package and routers put into ``kv_transfer_params`` beside the role.

    Attributes:
        transfer_id: names one prefill and one decode request.
        transfer_mode: of the server that answers.
        remote_block_ids: vLLM's own, per KV-cache group, or flat in old versions. Empty lists if there is a manifest.
        remote_num_tokens, remote_blocks_expiry_time, dcp_size: vLLM's own; the last one from 0.29 on.
        manifest: this package's manifest from prefill; its key is ``kvcached_nixl``.
    """

    transfer_id: Identifier | None = None
    transfer_mode: TransferMode | None = None
    remote_engine_id: Identifier | None = None
    remote_host: Identifier | None = None
    remote_port: Port | None = None
    tp_size: TpSize | None = None
    pp_size: TpSize | None = None
    dcp_size: TpSize | None = None
    remote_request_id: Identifier | None = None
    remote_block_ids: list[list[BlockNumber] | BlockNumber] | None = None
    remote_num_tokens: Count | None = None
    remote_blocks_expiry_time: float | None = None
    manifest: Manifest | None = None

    def __post_init__(self) -> None:
        num_ranks = (self.tp_size or 1) * (self.pp_size or 1)
        require(num_ranks <= MAX_TP_SIZE, f"a product of tp_size and pp_size of at most {MAX_TP_SIZE}")


# In order of the fields: the error names the first one that is wrong.
_KEYS = tuple(field.encode_name for field in msgspec.structs.fields(KvTransferParams))


def _known(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: params[key] for key in _KEYS if params.get(key) is not None}


@dataclass(frozen=True)
class FetchParams:
    """What decode's request fetches, and from which prefill.

    Attributes:
        name: of the prefill request; identifies it if there is no manifest.
        manifest: None if the router asked both sides at once.
    """

    prefill: RemotePrefill
    name: str
    manifest: Manifest | None

    @property
    def lease_name(self) -> str:
        """The name under which heartbeats renew the lease."""
        return self.name if self.manifest is None else self.manifest.request_id


def asks(params: object, role: str) -> bool:
    """Whether a request's parameters set this role, ``do_remote_prefill`` or ``do_remote_decode``. Values that are not
    booleans count as set: `require_one_role` then refuses them, instead of ignoring them here."""
    return isinstance(params, Mapping) and params.get(role) not in (None, False)


def read_fetch(params: Mapping[str, Any], request_id: str, *, may_rendezvous: bool) -> FetchParams:
    """Reads the parameters of decode's request. ``may_rendezvous``: the manifest may be missing, because prefill
    compares digests before it writes (push). Raises `HandOverFailed`: a parameter is missing, has an unusable value or
    contradicts another; the message names it."""
    require_one_role(params)
    try:
        known = _known(params)
        found, prefill = convert(known, KvTransferParams), convert(known, RemotePrefill)
        name, manifest = _name_of(found, request_id), found.manifest
    except Malformed as error:
        raise HandOverFailed(FailureCause.PARAMETERS, f"kv_transfer_params: {error}") from error
    if manifest is None and not may_rendezvous:
        raise HandOverFailed(
            FailureCause.NO_MANIFEST,
            f"kv_transfer_params have no {MANIFEST_KEY!r}, which says what prefill has computed; expected those of "
            "prefill's answer, unchanged. Let the router pass the whole kv_transfer_params of prefill's answer on.",
        )
    return FetchParams(prefill, name, manifest)


def cached_tokens_in(params: Mapping[str, Any]) -> int:
    """How many tokens of the prompt prefill had cached, for ``usage``; 0 if the parameters do not say it."""
    return count_of(params.get(CACHED_TOKENS_KEY))


def offered_tokens_in(params: Mapping[str, Any]) -> int:
    """How many tokens of a prompt these parameters offer, by their manifest; 0 if they offer none."""
    manifest = params.get(MANIFEST_KEY)
    if not asks(params, "do_remote_prefill") or not isinstance(manifest, Mapping):
        return 0
    return count_of(manifest.get("num_tokens"))


def count_of(said: object) -> int:
    """A token count that another server has reported; 0 if it is missing or invalid."""
    try:
        return convert(said, Count)
    except Malformed:
        return 0


def read_offer(params: Mapping[str, Any], request_id: str) -> str:
    """Reads a prefill request's parameters, and returns its name, as `name_of` gives it. Raises `HandOverFailed`: a
    parameter has an unusable value or contradicts another, or no manifest can name the request; the message says it."""
    require_one_role(params)
    try:
        _require_nameable(request_id)
        return name_of(params, request_id)
    except Malformed as error:
        raise HandOverFailed(FailureCause.PARAMETERS, f"kv_transfer_params: {error}") from error


def name_of(params: Mapping[str, Any], request_id: str) -> str:
    """The name by which the two requests of a push find each other; equal for both, whatever vLLM added to their ids.
    Raises `Malformed`: a field has an unusable value, or the name is the request's own id, which is too long."""
    return _name_of(convert(_known(params), KvTransferParams), request_id)


def is_of_transfer(name: str) -> bool:
    """Whether a name is a ``transfer_id``, and not made from a request id."""
    return name.startswith(_TRANSFER)


def _name_of(names: KvTransferParams, request_id: str) -> str:
    # Different prefixes, so that no transfer_id ever equals a name made from a request id.
    if names.transfer_id is not None:
        return f"{_TRANSFER}{names.transfer_id}"
    theirs = names.remote_request_id
    if names.manifest is not None:
        request_id = names.manifest.request_id
    # Some routers set remote_request_id to their own id, which prefill does not know.
    elif theirs is not None and _RANDOM_SUFFIX.search(theirs):
        request_id = theirs
    else:
        _require_nameable(request_id)
    return f"request:{_RANDOM_SUFFIX.sub('', request_id)}"


def _require_nameable(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID:
        raise Malformed(f"found a request id of {len(request_id)} characters; expected at most {MAX_REQUEST_ID}")
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"found an id that is no Unicode text: {request_id!r:.80}; expected valid Unicode") from error


def params_to_prefill(transfer_id: str) -> dict[str, Any]:
    """Decode's question for a prompt's KV; ``transfer_id``: "" if decode registers only after the answer."""
    named = {"transfer_id": transfer_id} if transfer_id else {}
    return {"do_remote_decode": True, "do_remote_prefill": False, **named}


def params_to_decode(prefill: RemotePrefill, transfer_id: object) -> dict[str, Any]:
    """Where prefill is. That is all that decode needs to know where both sides are asked at once."""
    named = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
    return {**named, **msgspec.to_builtins(prefill)}


def prefill_params(
    prefill: RemotePrefill, manifest: Manifest, *, transfer_id: object, transfer_mode: TransferMode, cached_tokens: int
) -> dict[str, Any]:
    """The parameters in prefill's answer, for decode's request; ``cached_tokens`` of the prompt are in prefill's prefix
    cache, for decode's ``usage``."""
    return {
        **params_to_decode(prefill, transfer_id),
        "transfer_mode": transfer_mode.value,
        "remote_request_id": manifest.request_id,
        # A stock vLLM decode reads these first. With empty lists it gets as far as the handshake, which refuses it.
        "remote_block_ids": [[] for _ in manifest.groups],
        CACHED_TOKENS_KEY: cached_tokens,
        MANIFEST_KEY: msgspec.to_builtins(manifest),
    }


def require_one_role(params: Mapping[str, Any]) -> None:
    """Raises `HandOverFailed` unless exactly one of the two roles is true, and none has a value but a boolean."""
    roles = {key: params[key] for key in ("do_remote_prefill", "do_remote_decode") if params.get(key) is not None}
    if not all(isinstance(value, bool) for value in roles.values()) or sum(roles.values()) != 1:
        # Of other values only the type is shown: they may have any size, and be nested too deep for repr.
        said = {key: value if isinstance(value, bool) else type(value) for key, value in roles.items()}
        raise HandOverFailed(
            FailureCause.PARAMETERS,
            f"kv_transfer_params have {said}; expected exactly one of do_remote_prefill and do_remote_decode to be "
            "true (bidirectional transfers are not supported)",
        )
