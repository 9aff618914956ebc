# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP endpoints. Once per process.

/v1/completions, /v1/chat/completions    routed (`request_flow`)
/v1/models                               answered by a decode server
/health, /metrics                        of the router itself
/instances                               the servers: list, add, drain, remove
/                                        a web page that shows /instances and /metrics
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from kvcached_nixl.proxy.auth import require_key
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import Answered, ClientLeft, LegFailed, Refusal, RouterFailure, error_body
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.incoming import BodyBudget, draw_id, passed_on, read_body, refuse_odd_head, until_left
from kvcached_nixl.proxy.instance import Role
from kvcached_nixl.proxy.instances import Administration
from kvcached_nixl.proxy.models import models
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.outgoing import Outgoing
from kvcached_nixl.proxy.record import Record, Recorder
from kvcached_nixl.proxy.request_body import ApiRoute, read
from kvcached_nixl.proxy.request_flow import Journey

__all__ = ["Routed", "create_app"]

RETRY_SECONDS = 1
_PAGE_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("cache-control", "no-store"),
)


class Routed:
    """The two routes whose requests are handed over. A plain ASGI app, without Starlette's request and response.

    Attributes:
        in_flight: number of requests that are being served.
        is_draining: new requests are refused, because the process is shutting down.
    """

    def __init__(self, options: Options, fleet: Fleet) -> None:
        self._options = options
        self._fleet = fleet
        self._guards: set[Guard] = set()
        self._room = BodyBudget(options.max_total_body_bytes)
        self.recorder = Recorder(fleet.metrics, as_json=options.log_json)
        self.in_flight = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request_id, shown_id = draw_id(scope)
        record = Record(request_id, shown_id.decode("ascii"), scope["path"])
        state = scope.get("state", {})
        out = Outgoing(send, shown_id, state.get("is_closing", bool))
        self.in_flight += 1
        try:
            await self._answer(scope, receive, out, record)
        except ClientLeft:
            _note(record, RouterFailure.CLIENT_LEFT, "")
            if (abort := state.get("abort")) is not None:
                abort()
        except BaseException:
            _note(record, RouterFailure.DEFECT, "")
            raise
        finally:
            self.in_flight -= 1
            record.status, record.sent_bytes = out.status, out.sent_bytes
            self.recorder.ended(record)

    async def _answer(self, scope: Scope, receive: Receive, out: Outgoing, record: Record) -> None:
        """Serve the request, and send every failure to the client."""
        try:
            with self._room.share() as take, Guard() as guard:
                self._guards.add(guard)
                try:
                    await self._serve(scope, receive, out, guard, record, take)
                finally:
                    self._guards.discard(guard)
        except Refusal as refusal:
            _note(record, refusal.cause, refusal.message)
            await self._refuse(out, refusal)
        except LegFailed as failure:
            _note(record, failure.cause, str(failure))
            message = f"The request failed: {failure.reason}."
            if out.has_begun:
                await out.break_off(failure.status, message)
            else:
                retry = RETRY_SECONDS if failure.status == 503 else None
                await out.refuse(Refusal(failure.status, failure.cause, message, retry_after_seconds=retry))
        except Answered as answered:
            _note(record, RouterFailure.SERVER_SAID_NO, "")
            await out.whole(answered.status, answered.content_type, answered.body)

    def end_all(self) -> None:
        """End every request in flight. Called when the drain timeout has expired, or on the second signal."""
        for guard in tuple(self._guards):
            guard.end(
                LegFailed(
                    RouterFailure.DRAINING, "router", "the router is shutting down", status=503, is_retriable=False
                )
            )

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        out: Outgoing,
        guard: Guard,
        record: Record,
        take: Callable[[int], None],
    ) -> None:
        options = self._options
        require_key(scope, options.api_key)
        if self.is_draining:
            raise Refusal(
                503,
                RouterFailure.DRAINING,
                "The router is shutting down. Use another one.",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self.in_flight > options.max_inflight:
            raise Refusal(
                429,
                RouterFailure.BUSY,
                f"{options.max_inflight} requests are in flight, which is the limit (--max-inflight). Try again.",
                retry_after_seconds=RETRY_SECONDS,
            )
        refuse_odd_head(scope, options.max_body_bytes)
        body = await read_body(receive, options.max_body_bytes, options.client_timeout_seconds, take)
        asked = read(ApiRoute(scope["path"]), body, allows_params=options.client_params)
        record.asked(asked)
        watching = asyncio.create_task(until_left(receive, guard, out))
        try:
            headers = passed_on(scope, options.upstream_key)
            await Journey(self._fleet, options, asked, headers, out, record).run()
        finally:
            watching.cancel()

    async def _refuse(self, out: Outgoing, refusal: Refusal) -> None:
        if out.has_begun:
            await out.break_off(refusal.status, refusal.message)
        elif refusal.status in (408, 413, 429, 431, 503):
            # The rest of the body is not read, so the connection cannot be used for another request.
            await out.refuse(refusal, (b"connection", b"close"))
        else:
            await out.refuse(refusal)


def create_app(options: Options) -> tuple[Starlette, Routed]:
    """Returns the application, and the part of it that serves and drains requests.

    Raises:
        SettingsError: an option has an unusable value.
    """
    fleet = Fleet(options)
    routed = Routed(options, fleet)
    administration = Administration(options, fleet, routed.recorder)
    page = files("kvcached_nixl.proxy").joinpath("page.html").read_bytes()

    async def health(request: Request) -> Response:
        up = {role.value: sum(one.role is role and one.is_usable for one in fleet) for role in Role}
        is_able = up["decode"] > 0 and (up["prefill"] > 0 or options.decode_alone) and not routed.is_draining
        return JSONResponse({"up": up, "draining": routed.is_draining}, 200 if is_able else 503)

    async def metrics(request: Request) -> Response:
        return Response(fleet.metrics.text(), media_type="text/plain; version=0.0.4")

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=dict(_PAGE_HEADERS))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(error.status_code, f"{request.method} {request.scope['path'][:200]}: {error.detail}.")
        return Response(body, error.status_code, error.headers, media_type="application/json")

    async def list_models(request: Request) -> Response:
        return await models(request.scope, options, fleet)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        fleet.start()
        try:
            yield
        finally:
            await fleet.close()

    app = Starlette(
        routes=[
            *(Path(route.value, routed, methods=["POST"]) for route in ApiRoute),
            Path("/v1/models", list_models),
            Path("/health", health),
            Path("/metrics", metrics),
            *administration.paths(),
            Path("/", show),
        ],
        lifespan=lifespan,
        # Raised by Starlette for an unknown path (404) or method (405).
        exception_handlers={HTTPException: refuse},
    )
    # A path with another trailing slash is answered 404. A redirect would repeat the client's Host header.
    app.router.redirect_slashes = False
    return app, routed


def _note(record: Record, cause: RouterFailure, reason: str) -> None:
    record.outcome, record.reason = cause.value, reason
