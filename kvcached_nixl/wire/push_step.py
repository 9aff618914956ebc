# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers of its own engine about a push, once a step.

It rides on the connector's metadata, so every rank gets the same one, in the order of the steps. Block ids are logical
ones (vLLM's scheduler's), tokens are counted from the start of the prompt.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.lease import Beats
from kvcached_nixl.wire.params import RemotePrefill

__all__ = ["BlockIds", "Computed", "PushStep", "Unusable", "Wanted", "hold_of", "quiet_id"]

BlockIds: TypeAlias = tuple[list[int], ...]
"""Per KV-cache group."""

_QUIET = "kvcached-nixl:quiet:"


def quiet_id(hold: int) -> str:
    """What a worker puts among the requests that were sent when the blocks of a hold are free."""
    return f"{_QUIET}{hold}"


def hold_of(request_id: str) -> int | None:
    """The other way round; None for an ordinary request id."""
    return int(request_id.removeprefix(_QUIET)) if request_id.startswith(_QUIET) else None


class Wanted(msgspec.Struct):
    """Decode: a request was given blocks, and prefill is to fill them with the tokens from ``first_token`` on."""

    request_id: DecodeRequestId
    transfer: str
    prefill: RemotePrefill
    first_token: int
    end_token: int
    block_ids: BlockIds


class Unusable(msgspec.Struct):
    """Decode: a request was given blocks that nobody can fill, because of its parameters."""

    request_id: DecodeRequestId
    reason: str
    block_ids: BlockIds


class Computed(msgspec.Struct):
    """Prefill: at the end of this step the first ``ready_tokens`` tokens of a request are in ``block_ids``."""

    request_id: PrefillRequestId
    transfer: str
    block_ids: BlockIds
    ready_tokens: int


class PushStep(msgspec.Struct):
    """One step. The lists are taken in in this order, ``computed`` last, when the step has been given to the device.

    Attributes:
        host, port: where this engine's side channel listens.
        beats: leases that decode renews.
        unneeded: transfers of which decode needs nothing, and who offers them.
        withdrawn: decode's requests that are gone, and why.
        preempted: prefill's requests that lost their blocks, and the number under which those are held.
        finished: prefill's requests that compute no more.
        stopped: prefill's requests that are gone, and why.
        refused: transfers for which prefill will have no request, and why.
        is_idle: the step computes nothing, for no request.
    """

    host: str
    port: int
    beats: Beats = msgspec.field(default_factory=list)
    wanted: list[Wanted] = msgspec.field(default_factory=list)
    unusable: list[Unusable] = msgspec.field(default_factory=list)
    unneeded: list[tuple[str, RemotePrefill]] = msgspec.field(default_factory=list)
    withdrawn: dict[DecodeRequestId, str] = msgspec.field(default_factory=dict)
    preempted: list[tuple[PrefillRequestId, int]] = msgspec.field(default_factory=list)
    finished: list[PrefillRequestId] = msgspec.field(default_factory=list)
    stopped: dict[PrefillRequestId, str] = msgspec.field(default_factory=dict)
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    computed: list[Computed] = msgspec.field(default_factory=list)
    is_idle: bool = True
