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

__all__ = [
    "CACHED_TOKENS_KEY",
    "HAS_CLIENTS_KEY",
    "HEADROOM_KEY",
    "MANIFEST_KEY",
    "FetchParams",
    "KvTransferParams",
    "Malformed",
    "RemotePrefill",
    "asks",
    "cached_tokens_in",
    "name_of",
    "offered_tokens_in",
    "prefill_params",
    "read_fetch",
    "read_offer",
    "require_one_role",
]

MANIFEST_KEY = "kvcached_nixl"
CACHED_TOKENS_KEY = "remote_prefill_cached_tokens"
"""vLLM's own: from 0.31 on its API server reads it, too."""
HAS_CLIENTS_KEY = "kvcached_nixl_has_clients"
"""Whether the server may have clients of its own (``kv_role`` kv_both)."""
HEADROOM_KEY = "kvcached_nixl_headroom"
"""``queued_tokens`` of the engine that answers; see `wire.headroom`."""
MAX_REQUEST_ID = 1000
"""Less than an `Identifier` may have: the ids of one request on the two sides may differ by a few characters."""
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


class KvTransferParams(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename={"manifest": MANIFEST_KEY}
):
    """Everything that the supported vLLM versions, this package and routers put into ``kv_transfer_params``.

    Attributes:
        transfer_id: names one prefill and one decode request.
        transfer_mode: of the server that answers.
        remote_block_ids: vLLM's own, per KV-cache group, or flat in old versions. Empty lists if there is a manifest.
        remote_num_tokens, remote_blocks_expiry_time, dcp_size: vLLM's own; the last one from 0.29 on.
        manifest: this package's manifest from prefill; its key is ``kvcached_nixl``.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
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
        roles = bool(self.do_remote_prefill) + bool(self.do_remote_decode)
        require(roles < 2, "at most one of do_remote_prefill and do_remote_decode to be true")
        num_ranks = (self.tp_size or 1) * (self.pp_size or 1)
        require(num_ranks <= MAX_TP_SIZE, f"a product of tp_size and pp_size of at most {MAX_TP_SIZE}")

    @property
    def prefill(self) -> RemotePrefill:
        """Where prefill is. Raises `Malformed`, which names the coordinate that is missing."""
        for name in ("remote_engine_id", "remote_host", "remote_port"):
            if getattr(self, name) is None:
                raise Malformed(f"missing required field `{name}`")
        assert self.remote_engine_id is not None and self.remote_host is not None and self.remote_port is not None
        where = self.remote_engine_id, self.remote_host, self.remote_port
        return RemotePrefill(*where, self.tp_size or 1, self.pp_size or 1)

    @classmethod
    def for_prefill(cls, transfer_id: str | None) -> KvTransferParams:
        return cls(do_remote_decode=True, do_remote_prefill=False, transfer_id=transfer_id)

    @classmethod
    def for_decode(cls, prefill: RemotePrefill, transfer_id: str) -> KvTransferParams:
        """Decode's parameters where both sides are asked at the same time."""
        return cls(
            do_remote_prefill=True,
            do_remote_decode=False,
            transfer_id=transfer_id,
            remote_engine_id=prefill.engine_id,
            remote_host=prefill.host,
            remote_port=prefill.port,
            tp_size=prefill.tp_size,
            pp_size=prefill.pp_size,
        )


# In order of the fields: the error names the first one that is wrong.
_KEYS = tuple(dict.fromkeys(field.encode_name for field in msgspec.structs.fields(KvTransferParams)))


def _model(params: Mapping[str, Any]) -> KvTransferParams:
    return convert({key: params[key] for key in _KEYS if params.get(key) is not None}, KvTransferParams)


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
        found = _model(params)
        prefill, manifest = found.prefill, found.manifest
        name = _name_of(found, request_id)
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
    try:
        return convert(params.get(CACHED_TOKENS_KEY), Count)
    except Malformed:
        return 0


def offered_tokens_in(params: Mapping[str, Any]) -> int:
    """How many tokens of a prompt these parameters offer, by their manifest; 0 if they offer none."""
    manifest = params.get(MANIFEST_KEY)
    if not asks(params, "do_remote_prefill") or not isinstance(manifest, Mapping):
        return 0
    try:
        return convert(manifest.get("num_tokens"), Count)
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
    return _name_of(_model(params), request_id)


def _name_of(names: KvTransferParams, request_id: str) -> str:
    # Different prefixes, so that no transfer_id ever equals a name made from a request id.
    if names.transfer_id is not None:
        return f"transfer:{names.transfer_id}"
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


def prefill_params(
    prefill: RemotePrefill, manifest: Manifest, *, transfer_id: object, transfer_mode: TransferMode, cached_tokens: int
) -> dict[str, Any]:
    """The parameters in prefill's answer, for decode's request; ``cached_tokens`` of the prompt are in prefill's prefix
    cache, for decode's ``usage``."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "transfer_mode": transfer_mode.value,
        "remote_request_id": manifest.request_id,
        # A stock vLLM decode reads these first. With empty lists it gets as far as the handshake, which refuses it.
        "remote_block_ids": [[] for _ in manifest.groups],
        CACHED_TOKENS_KEY: cached_tokens,
        **msgspec.to_builtins(prefill),
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
