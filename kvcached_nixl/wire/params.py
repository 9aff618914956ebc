# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what a router puts into the two requests of a push, and how they find each other.

    to prefill   do_remote_decode: true, transfer_id
    to decode    do_remote_prefill: true, transfer_id, remote_engine_id, remote_host, remote_port, tp_size

A router that waits for prefill passes on what prefill's answer holds (`prefill_params`); one that asks both at once
says the same by itself.

``transfer_id`` is any string that the router gives to one prefill and one decode request. Without it the two are paired
by ``remote_request_id`` from prefill's answer, and without that by the ``X-Request-Id`` that both carry: vLLM puts
``cmpl-`` or ``chatcmpl-`` before it and a dash and eight random hexadecimal digits after it
(vllm/v1/engine/input_processor.py), a different number in each engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["RemotePrefill", "name_of_lease", "prefill_params", "remote_prefill", "transfer_of"]

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class RemotePrefill(
    msgspec.Struct, frozen=True, rename={"engine_id": "remote_engine_id", "host": "remote_host", "port": "remote_port"}
):
    """Where decode finds prefill: its engine, its side channel, its tensor-parallel size."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not (self.engine_id and self.host and 0 < self.port < 65536 and self.tp_size > 0):
            raise ValueError("expected an engine id, a host, a port from 1 to 65535 and a tensor-parallel size above 0")


def remote_prefill(params: Mapping[str, Any]) -> RemotePrefill:
    """Read a decode request's parameters; keys that are not needed are not looked at.

    Raises:
        ValueError: one is missing or has an unusable value; the message names it.
    """
    try:
        return msgspec.convert(dict(params), RemotePrefill)
    except msgspec.ValidationError as cause:
        raise ValueError(f"kv_transfer_params of a pushed request: {cause}") from cause


def prefill_params(
    prefill: RemotePrefill, request_id: str, transfer_id: str | None, block_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What prefill answers: the parameters for decode's request. ``block_ids`` are for a peer that pulls: it has to
    get as far as the handshake to be refused in words.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "transfer_mode": "push",
        "remote_request_id": request_id,
        "remote_block_ids": [list(group) for group in block_ids],
        **msgspec.to_builtins(prefill),
    }


def name_of_lease(params: Mapping[str, Any], request_id: str) -> str:
    """What a decode request's heartbeats call it: prefill's id for it, where decode was told that, else its transfer.

    Raises:
        ValueError: as `transfer_of`.
    """
    theirs = params.get("remote_request_id")
    return theirs if isinstance(theirs, str) and _RANDOM_SUFFIX.search(theirs) else transfer_of(params, request_id)


def transfer_of(params: Mapping[str, Any], request_id: str) -> str:
    """The name under which the two requests of a transfer meet; equal for both, whatever vLLM added to their ids.

    Raises:
        ValueError: ``transfer_id`` is there and is not a string with something in it.
    """
    explicit = params.get("transfer_id")
    if explicit is None:
        # Other letters than an explicit one, so that neither is ever taken for the other.
        theirs = params.get("remote_request_id")
        # Some routers put an id of their own there, which prefill does not know.
        meant = theirs if isinstance(theirs, str) and _RANDOM_SUFFIX.search(theirs) else request_id
        return f"request:{_RANDOM_SUFFIX.sub('', meant)}"
    if not isinstance(explicit, str) or not explicit:
        raise ValueError(f"kv_transfer_params has transfer_id={explicit!r}; expected a string that is not empty")
    return f"transfer:{explicit}"
