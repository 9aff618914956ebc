# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP endpoints. Once per process.

/v1/completions and others (`api`)       routed (`request_flow`)
/v1/models                               answered by a decode server
/health, /readyz, /livez, /metrics       of the router itself
/instances                               the servers: list, add, drain, remove (`administration`)
/                                        a web page that shows /instances and /metrics
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from kvcached_nixl.proxy.account import REQUEST_BYTES, Account, Share
from kvcached_nixl.proxy.administration import administer
from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.auth import require_key
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.client import COPIES, Outgoing, draw_id, passed_on, read_body, refuse_odd_head, trace_context
from kvcached_nixl.proxy.failure import (
    RETRY_SECONDS,
    Answered,
    ClientLeft,
    LegFailed,
    Refusal,
    RouterFailure,
    error_body,
)
from kvcached_nixl.proxy.fan_out import Child, FanOut
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.health import watch
from kvcached_nixl.proxy.instance import Role
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.record import Record, Recorder
from kvcached_nixl.proxy.relay import require_success
from kvcached_nixl.proxy.request_body import read
from kvcached_nixl.proxy.request_flow import Journey
from kvcached_nixl.proxy.tracing import Part, tracing_to

__all__ = ["App"]

MOST_MODELS_BYTES = 1 << 20
_PAGE_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Cache-Control": "no-store",
    }
)
_GETS = ("/", "/health", "/livez", "/metrics", "/readyz", "/v1/models")
_ROUTES = MappingProxyType({route.value: route for route in ApiRoute})


class App:
    """Serves requests. Create it on the event loop.

    Attributes:
        in_flight: number of requests that are being served; while there are none, ``quiet`` is set.
        is_ready: new requests should come here; said by ``/readyz`` and ``/health``.
        is_draining: new requests are refused, because the process is shutting down.

    Raises:
        SettingsError: an option has an unusable value.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        endpoint = options.otlp_traces_endpoint
        self._tracing = tracing_to(endpoint, os.environ) if endpoint else None
        self.account = Account(options.max_memory_bytes)
        self._guards: set[Guard] = set()
        self._page = files("kvcached_nixl.proxy").joinpath("page.html").read_bytes()
        self.fleet = Fleet(options, watch)
        self.recorder = Recorder(self.fleet.metrics, as_json=options.log_json)
        self.in_flight = 0
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.is_ready = True
        self.is_draining = False

    async def close(self) -> None:
        await self.fleet.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def end_all(self) -> None:
        """End every request in flight. Called when the drain timeout has expired, or on the second signal."""
        failure = LegFailed(
            RouterFailure.DRAINING, "router", "the router is shutting down", status=503, is_retriable=False
        )
        for guard in tuple(self._guards):
            guard.end(failure)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Cancelled when its client closes the connection."""
        request_id, shown_id = draw_id(request)
        route = _ROUTES.get(request.path) if request.method == "POST" else None
        out = Outgoing(request, route, shown_id, self._options.client_timeout_seconds)
        if route is None:
            await self._told(out, None, lambda share: self._say(request, out, share), 0)
        else:
            await self._routed(request, out, Record(request_id, shown_id, route.value), route)
        return out.response

    async def _routed(self, request: web.BaseRequest, out: Outgoing, record: Record, route: ApiRoute) -> None:
        self._begin()
        self.fleet.retry_budget.asked()
        try:
            self._trace(request, record)
            await self._told(out, record, lambda share: self._serve(request, out, record, route, share))
        except (asyncio.CancelledError, ConnectionError):
            # In push the request goes on for a moment after its answer, until prefill has answered, too.
            if not out.has_ended:
                _note(record, RouterFailure.CLIENT_LEFT, "")
            raise
        except BaseException:
            _note(record, RouterFailure.DEFECT, "")
            raise
        finally:
            record.status, record.sent_bytes = out.status, out.sent_bytes
            try:
                self.recorder.ended(record)
                record.trace.end(record.outcome, **{"kvcached_nixl.direction": record.direction})
            finally:
                self._end()

    def _trace(self, request: web.BaseRequest, record: Record) -> None:
        if self._tracing is not None:
            attributes = {"http.route": record.route, "kvcached_nixl.request_id": record.request_id}
            context = trace_context(request)
            record.trace = self._tracing.request(f"POST {record.route}", context, record.at, **attributes)

    def _begin(self) -> None:
        self.in_flight += 1
        self.quiet.clear()

    def _end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.quiet.set()

    async def _told(
        self, out: Outgoing, record: Record | None, serve: Callable[[Share], Any], held_bytes: int = REQUEST_BYTES
    ) -> None:
        """Serve a request, and tell the client of every failure.

        Args:
            held_bytes: memory that the request needs at least.

        Raises:
            ConnectionError: the client has left, which ends the connection.
        """
        try:
            try:
                with self.account.share(held_bytes) as share, Guard() as guard:
                    self._guards.add(guard)
                    try:
                        await serve(share)
                    finally:
                        self._guards.discard(guard)
            except (Refusal, LegFailed) as failure:
                _note(record, failure.cause, str(failure))
                refusal = failure if isinstance(failure, Refusal) else failure.refusal
                body = error_body(refusal.status, refusal.message, refusal.param)
                await out.fail(refusal.status, "application/json", body, refusal.headers)
            except Answered as answered:
                _note(record, RouterFailure.SERVER_SAID_NO, "")
                await out.fail(answered.status, answered.content_type, answered.body)
        except ClientLeft:
            out.abort()
            raise ConnectionResetError("the client has left, or does not read") from None

    async def _serve(
        self, request: web.BaseRequest, out: Outgoing, record: Record, route: ApiRoute, share: Share
    ) -> None:
        options = self._options
        with record.trace.part("read"):
            require_key(request, options.api_key)
            self._require_room()
            refuse_odd_head(request, options.max_body_bytes)
            body = await read_body(request, options.max_body_bytes, options.client_timeout_seconds, share)
            asked = read(route, body, allows_params=options.client_params)
        record.asked(asked)
        headers = record.trace.without_context(passed_on(request, options.upstream_key))
        with out.kept_alive(options.keep_alive_seconds) if asked.keeps_alive else nullcontext():
            await self._run(asked, headers, out, record, share)

    async def _run(self, asked: Asked, headers: dict[str, str], out: Outgoing, record: Record, share: Share) -> None:
        options = self._options
        if asked.sequences == 1:
            return await Journey(self.fleet, asked, headers, out, record, share).run()
        if self.in_flight + asked.sequences - 1 > options.max_inflight:
            message = f"{asked.sequences} sequences are more than --max-inflight allows now. Try again."
            raise Refusal(429, RouterFailure.BUSY, message, retry_after_seconds=RETRY_SECONDS)
        self.in_flight += asked.sequences - 1
        try:
            await self._several(asked, headers, out, record, share)
        finally:
            self.in_flight -= asked.sequences - 1

    def _require_room(self) -> None:
        options = self._options
        if self.is_draining:
            message = "The router is shutting down. Use another one."
            raise Refusal(503, RouterFailure.DRAINING, message, retry_after_seconds=RETRY_SECONDS)
        if self.in_flight > options.max_inflight:
            message = f"{options.max_inflight} requests are in flight, which is the limit (--max-inflight). Try again."
            retry_seconds = self.recorder.seconds_until_one_ends(self.in_flight)
            raise Refusal(429, RouterFailure.BUSY, message, retry_after_seconds=retry_seconds)

    async def _several(
        self, asked: Asked, headers: dict[str, str], out: Outgoing, record: Record, share: Share
    ) -> None:
        prefills: dict[int, str] = {}

        async def one(child: Asked, to: Child) -> None:
            with record.trace.part(f"sequence {to.place}") as within:
                await one_within(child, to, within)

        async def one_within(child: Asked, to: Child, within: Part) -> None:
            part = replace(record, request_id=f"{record.request_id}-seq{to.place}", trace=within, attempts=0)
            # The prompt is in the prefix cache of the prefill that has computed it for the first child.
            preferred = prefills.get(to.place // asked.n, "")
            try:
                await Journey(self.fleet, child, headers, to, part, share, preferred, follows=to.place > 0).run()
            finally:
                prefills[to.place // asked.n] = part.prefill
                record.attempts += part.attempts
                if asked.streams and part.first_seconds is not None:
                    record.first_seconds = min(part.first_seconds, record.first_seconds or part.first_seconds)
                record.direction, record.alone, record.prefill, record.decode = (
                    *(part.direction, part.alone),
                    *(part.prefill, part.decode),
                )

        sizes = {name: len(memoryview(value)) for name, value in asked.fields.items()}
        prompts_bytes = sizes.pop("prompt", 0) if asked.prompts else 0
        # Each sequence has one of the prompts, and all other fields.
        more_bytes = (asked.n - 1) * prompts_bytes + (asked.sequences - 1) * sum(sizes.values())
        share.take(COPIES * more_bytes)
        await FanOut(asked, out).run(one)
        record.first()

    # -------------------------------------------------------------------------------------------- of the router itself

    async def _say(self, request: web.BaseRequest, out: Outgoing, share: Share) -> None:
        path = request.path
        if path == "/instances" or path.startswith("/instances/"):
            status, content = await administer(request, self.fleet, self.recorder, share)
            return await _json(out, status, content)
        if path in _ROUTES or (path in _GETS and request.method not in ("GET", "HEAD")):
            message = f"{request.method} {path}: this method is not allowed here."
            raise Refusal(405, RouterFailure.BODY, message, allow="POST" if path in _ROUTES else "GET, HEAD")
        if path == "/livez":
            return await _json(out, 200, {})
        if path in ("/health", "/readyz"):
            up = {role.value: sum(one.role is role and one.is_usable for one in self.fleet) for role in Role}
            has_pair = up["prefill"] > 0 and self.fleet.is_up(Role.PREFILL, beside=Role.DECODE)
            is_able = up["decode"] > 0 and (has_pair or self._options.decode_alone)
            status = 200 if is_able and self.is_ready else 503
            return await _json(out, status, {"up": up, "draining": not self.is_ready})
        if path == "/metrics":
            return await out.whole(200, "text/plain; version=0.0.4", self.fleet.metrics.text())
        if path == "/v1/models":
            share.take(REQUEST_BYTES)
            self._begin()
            try:
                return await self._models(request, out)
            finally:
                self._end()
        if path == "/":
            return await out.whole(200, "text/html", self._page, _PAGE_HEADERS)
        raise Refusal(404, RouterFailure.BODY, f"{request.method} {path[:200]}: no such path.")

    async def _models(self, request: web.BaseRequest, out: Outgoing) -> None:
        """Answer as a decode server does; if one fails, another is asked."""
        options = self._options
        require_key(request, options.api_key)
        self._require_room()
        tried: list[str] = []
        while True:
            place = self.fleet.choose(Role.DECODE, Wanted(b"", b"", 0, 0), tried)
            if place is None:
                retry_seconds = self.fleet.retry_seconds(Role.DECODE)
                message = "No decode server is up. Try again."
                raise Refusal(503, RouterFailure.NO_SERVER, message, retry_after_seconds=retry_seconds)
            server = place.server
            try:
                late = LegFailed(RouterFailure.TIME, server.name, "the server did not answer in time", status=504)
                headers = passed_on(request, options.upstream_key)
                with server.leg(0) as leg:
                    leg.guard.limit(options.connect_timeout_seconds + options.health_interval_seconds, late)
                    url = f"{server.url}/v1/models"
                    async with self.fleet.upstream.ask("GET", url, server.name, headers) as reply:
                        leg.heard()
                        said = await reply.body(MOST_MODELS_BYTES)
                    require_success(reply, said, server.name, has_own_key=bool(options.upstream_key))
                return await out.whole(200, "application/json", said)
            except LegFailed as failure:
                server.failed(failure)
                tried.append(server.name)
                if len(tried) >= options.attempts:
                    raise


async def _json(out: Outgoing, status: int, content: object) -> None:
    await out.whole(status, "application/json", b"" if content is None else msgspec.json.encode(content))


def _note(record: Record | None, cause: RouterFailure, reason: str) -> None:
    if record is not None:
        record.outcome, record.reason = cause.value, reason
