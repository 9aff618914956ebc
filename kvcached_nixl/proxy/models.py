# SPDX-License-Identifier: Apache-2.0
"""``/v1/models``: the response of a decode server, because clients get their answers from decode."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from kvcached_nixl.proxy.auth import require_key
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import Answered, LegFailed, Refusal, RouterFailure, error_body
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.incoming import passed_on
from kvcached_nixl.proxy.instance import Instance, Role
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.relay import require_success

__all__ = ["models"]

MOST_BYTES = 1 << 20


async def models(scope: Scope, options: Options, fleet: Fleet) -> Response:
    """Returns the response of a decode server; if one fails, another is asked."""
    try:
        require_key(scope, options.api_key)
        tried: list[str] = []
        while True:
            place = fleet.choose(Role.DECODE, Wanted(b"", b"", 0, 0), tried)
            if place is None:
                raise Refusal(503, RouterFailure.NO_SERVER, "No decode server is up. Try again.", retry_after_seconds=2)
            server = place.server
            try:
                return await _ask(server, scope, options)
            except LegFailed as failure:
                server.failed(failure)
                tried.append(server.name)
                if len(tried) >= options.attempts:
                    raise Refusal(failure.status, failure.cause, f"{failure.reason}.") from failure
    except Refusal as refusal:
        headers = {} if refusal.retry_after_seconds is None else {"retry-after": str(refusal.retry_after_seconds)}
        body = error_body(refusal.status, refusal.message)
        return Response(body, refusal.status, headers, media_type="application/json")
    except Answered as answered:
        return Response(answered.body, answered.status, media_type=answered.content_type.decode("latin-1"))


async def _ask(server: Instance, scope: Scope, options: Options) -> Response:
    late = LegFailed(RouterFailure.TIME, server.name, "the server did not answer in time", status=504)
    with Guard() as guard:
        guard.limit(options.connect_timeout_seconds + options.health_interval_seconds, late)
        reply = await server.connections.ask("GET", "/v1/models", passed_on(scope, options.upstream_key))
        try:
            said = await reply.body(MOST_BYTES)
        finally:
            reply.close()
    require_success(reply, said, server.name, has_own_key=bool(options.upstream_key))
    return Response(said, media_type="application/json")
