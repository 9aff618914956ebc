# SPDX-License-Identifier: Apache-2.0
"""``/instances``: manages the servers, for the operator and the web page.

GET    /instances                   the servers, their load, the last requests
POST   /instances                   add one: {"role": "prefill" or "decode", "url": "http://HOST:PORT"}
POST   /instances/{name}/drain      send no new requests to it
POST   /instances/{name}/undrain    send requests to it again
DELETE /instances/{name}            remove it; ?now=true ends the requests that it works on
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.account import Share
from kvcached_nixl.proxy.auth import may_administer
from kvcached_nixl.proxy.client import read_body, refuse_odd_head
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Health, Instance, Role
from kvcached_nixl.proxy.record import Recorder

__all__ = ["administer"]

MOST_BODY_BYTES = 64 << 10


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


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
        return 201, _as_dict(await _add(request, fleet, share))
    if what in (("POST", "NAME", "drain"), ("POST", "NAME", "undrain")):
        return 200, _as_dict(fleet.drain(name, is_draining=action == "drain"))
    if what == ("DELETE", "NAME", ""):
        await fleet.remove(name, at_once=request.query.get("now") == "true")
        return 204, None
    raise Refusal(405, RouterFailure.BODY, f"{request.method} {request.path[:200]}: no such action; see the docs.")


async def _add(request: web.BaseRequest, fleet: Fleet, share: Share) -> Instance:
    refuse_odd_head(request, MOST_BODY_BYTES)
    body = await read_body(request, MOST_BODY_BYTES, fleet.options.client_timeout_seconds, share)
    try:
        added = msgspec.json.decode(body, type=_Added)
        return fleet.add(added.role, added.url)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = f'{str(error)[:200]}; expected {{"role": "prefill" or "decode", "url": "http://HOST:PORT"}}'
        raise Refusal(400, RouterFailure.BODY, reason) from error
    except SettingsError as error:
        raise Refusal(
            400, RouterFailure.BODY, f"Found {error.found}; expected {error.expected}.", param="url"
        ) from error


def _as_dict(instance: Instance) -> dict[str, object]:
    ranks = instance.ranks
    found = ranks.latest
    return {
        "name": instance.name,
        "role": instance.role.value,
        "url": instance.url,
        "state": instance.state.value,
        "draining": instance.is_draining,
        "drained": instance.is_draining and not instance.is_busy,
        "requests": instance.requests,
        "keeping": instance.keeping,
        "outstanding_tokens": instance.tokens,
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
