# SPDX-License-Identifier: Apache-2.0
"""``/instances``: manages the servers, for the operator and the web page.

GET    /instances                   the servers, their load, the last requests
POST   /instances                   add one: {"role": "prefill" or "decode", "url": "http://HOST:PORT"}
POST   /instances/{name}/drain      send no new requests to it
DELETE /instances/{name}            remove it; ?now=true ends the requests that it works on
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.auth import may_administer
from kvcached_nixl.proxy.failure import ClientLeft, Refusal, RouterFailure, error_body
from kvcached_nixl.proxy.fleet import Fleet, as_dict
from kvcached_nixl.proxy.incoming import read_body, refuse_odd_head
from kvcached_nixl.proxy.instance import Role
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.record import Recorder

__all__ = ["Administration"]

MOST_BODY_BYTES = 64 << 10


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


class Administration:
    """See the module. `auth.may_administer` checks every request."""

    def __init__(self, options: Options, fleet: Fleet, recorder: Recorder) -> None:
        self._options = options
        self._fleet = fleet
        self._recorder = recorder

    def paths(self) -> list[Path]:
        return [
            Path("/instances", self._guarded(self._list), methods=["GET"]),
            Path("/instances", self._guarded(self._add), methods=["POST"]),
            Path("/instances/{name}/drain", self._guarded(self._drain), methods=["POST"]),
            Path("/instances/{name}", self._guarded(self._remove), methods=["DELETE"]),
        ]

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                may_administer(request.scope, self._options.admin_key)
                return await work(request)
            except Refusal as refusal:
                body = error_body(refusal.status, refusal.message, refusal.param)
                return Response(body, refusal.status, media_type="application/json")
            except ClientLeft:
                return Response(status_code=400)

        return answer

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"instances": [as_dict(one) for one in self._fleet], "recent": self._recorder.latest()})

    async def _add(self, request: Request) -> Response:
        refuse_odd_head(request.scope, MOST_BODY_BYTES)
        body = await read_body(
            request.receive, MOST_BODY_BYTES, self._options.client_timeout_seconds, lambda size: None
        )
        try:
            added = msgspec.json.decode(body, type=_Added)
            instance = self._fleet.add(added.role, added.url)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            reason = f'{str(error)[:200]}; expected {{"role": "prefill" or "decode", "url": "http://HOST:PORT"}}'
            raise Refusal(400, RouterFailure.BODY, reason) from error
        except SettingsError as error:
            raise Refusal(
                400, RouterFailure.BODY, f"Found {error.found}; expected {error.expected}.", param="url"
            ) from error
        return JSONResponse(as_dict(instance), 201)

    async def _drain(self, request: Request) -> Response:
        return JSONResponse(as_dict(self._fleet.drain(request.path_params["name"])))

    async def _remove(self, request: Request) -> Response:
        await self._fleet.remove(request.path_params["name"], at_once=request.query_params.get("now") == "true")
        return Response(status_code=204)
