# SPDX-License-Identifier: Apache-2.0
"""``/instances``: manages the servers, for the operator and the web page.

GET    /instances                   the servers, their load, the last requests
POST   /instances                   add one: {"role": "prefill" or "decode", "url": "http://HOST:PORT", "weight": 1}
POST   /instances/{name}/drain      send no new requests to it
POST   /instances/{name}/undrain    send requests to it again
POST   /instances/{name}/weight     its share of the requests: {"weight": 0.05}
DELETE /instances/{name}            remove it; ?now=true ends the requests that it works on
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.auth import may_administer
from kvcached_nixl.proxy.client import read_body, refuse_odd_head
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Health, Instance, Role
from kvcached_nixl.proxy.options import MOST_WEIGHT
from kvcached_nixl.proxy.record import Recorder

__all__ = ["administer"]

MOST_BODY_BYTES = 64 << 10
_Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MOST_WEIGHT)]
_Said = TypeVar("_Said", "_Added", "_Weighed")


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str
    weight: _Weight = 1.0


class _Weighed(msgspec.Struct, forbid_unknown_fields=True):
    weight: _Weight


async def administer(request: web.BaseRequest, fleet: Fleet, recorder: Recorder, share: Share) -> tuple[int, Any]:
    """Returns status and content of the answer. `auth.may_administer` checks every request.

    Raises:
        Refusal: the request is not allowed, or names what does not exist.
    """
    may_administer(request, fleet.options.admin_key)
    name, slash, action = request.path.removeprefix("/instances").removeprefix("/").rpartition("/")
    if not slash:
        name, action = action, ""
    what = (request.method, "NAME" if name else "", action)
    if what == ("GET", "", ""):
        return 200, {"instances": [_as_dict(one) for one in fleet], "recent": recorder.latest()}
    if what == ("POST", "", ""):
        added = await _read(request, fleet, share, _Added)
        try:
            return 201, _as_dict(fleet.add(added.role, added.url, added.weight))
        except SettingsError as error:
            reason = f"Found {error.found}; expected {error.expected}."
            raise Refusal(400, RouterFailure.BODY, reason, param="url") from error
    if what == ("POST", "NAME", "weight"):
        instance = fleet.known(name)
        instance.weight = (await _read(request, fleet, share, _Weighed)).weight
        return 200, _as_dict(instance)
    if what in (("POST", "NAME", "drain"), ("POST", "NAME", "undrain")):
        return 200, _as_dict(fleet.drain(name, is_draining=action == "drain"))
    if what == ("DELETE", "NAME", ""):
        await fleet.remove(name, at_once=request.query.get("now") == "true")
        return 204, None
    raise Refusal(405, RouterFailure.BODY, f"{request.method} {request.path[:200]}: no such action; see the docs.")


async def _read(request: web.BaseRequest, fleet: Fleet, share: Share, kind: type[_Said]) -> _Said:
    refuse_odd_head(request, MOST_BODY_BYTES)
    body = await read_body(request, MOST_BODY_BYTES, fleet.options.client_timeout_seconds, share)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        example = '{"role": "prefill" or "decode", "url": "http://HOST:PORT", "weight": 1}'
        expected = example if kind is _Added else '{"weight": 0.05}'
        raise Refusal(400, RouterFailure.BODY, f"{str(error)[:200]}; expected {expected}") from error


def _as_dict(instance: Instance) -> dict[str, object]:
    ranks = instance.ranks
    found = ranks.latest
    return {
        "name": instance.name,
        "role": instance.role.value,
        "url": instance.url,
        "state": instance.state.value,
        "weight": instance.weight,
        "kind": None if instance.kind is None else "-".join(f"{int(one):013x}" for one in instance.kind),
        "draining": instance.is_draining,
        "drained": instance.is_draining and not instance.is_busy,
        "requests": instance.requests,
        "keeping": instance.keeping,
        "outstanding_tokens": instance.tokens,
        "capacity_tokens": None if instance.capacity is None else int(instance.capacity.tokens),
        "transfer_mode": None if found is None else found.mode.value,
        "engine_id": None if found is None else found.where.engine_id,
        "incarnation": None if found is None else found.incarnation,
        "ranks": [_rank_as_dict(instance, rank) for rank in ranks.named] or None,
        "last_failure": instance.last_failure if instance.state is not Health.UP else "",
    }


def _rank_as_dict(instance: Instance, rank: int) -> dict[str, object]:
    load, found = instance.load(rank), instance.ranks.found(rank)
    return {
        "rank": rank,
        "requests": load.requests,
        "outstanding_tokens": load.tokens,
        "engine_id": None if found is None else found.where.engine_id,
        "incarnation": None if found is None else found.incarnation,
    }
