# SPDX-License-Identifier: Apache-2.0
"""The HTTP requests that an API server works for, and what it takes new ones for: for clients, for decode servers that
ask for KV, or for both.

A ``kv_both`` engine does both at any time, so its role is a matter of its API server alone. A request keeps the role
that the server had when it came, with all its prompts, choices and steps of a beam search; so a stream ends as it would
have. Who asks is seen where a prompt is given to the engine, whatever endpoint it came through (`leaving.add_request`).

Not refused and not counted: WebSockets. Not counted: what `/v1/responses` computes in the background.

Runs in: the API server's process, on its loop.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from kvcached_nixl.errors import Refused
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import asks

logger = logging.getLogger(SERVER_LOGGER)

ROLES = "kvcached_nixl_roles"
"""Attribute of the HTTP application's state."""
ROLE_PATH = "/v1/kvcached_nixl/role"


class Role(enum.Flag):
    """What a server takes new requests for: ``PREFILL`` for decode servers that ask it, ``DECODE`` for clients."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3

    def __str__(self) -> str:
        return str(self.name).lower()


READY: Mapping[str, Role] = MappingProxyType(
    {"/kvcached_nixl/ready/clients": Role.DECODE, "/kvcached_nixl/ready/questions": Role.PREFILL}
)
"""Path of a probe -> what it asks for. Outside ``/v1``: probes have no key."""

_REFUSALS: Mapping[Role, str] = MappingProxyType(
    {
        Role.DECODE: "This server takes no requests of clients while its role is prefill. Use another one.",
        Role.PREFILL: "This server computes no prompts for others while its role is decode. Ask another one.",
    }
)


_SAYS_ABORT = ("/completions", "/completions/batch", "/inference/v1/generate")
"""How paths end whose answers have a ``finish_reason`` of "abort"; behind ``--root-path``, too."""


@dataclass(eq=False)
class Arrived:
    """An HTTP request.

    Attributes:
        path: of its URL.
        role: that the server had when it came; `Role.BOTH` where it cannot change.
        is_for: `Role.PREFILL` or `Role.DECODE`; None until its first prompt is given to the engine.
    """

    path: str
    role: Role
    is_for: Role | None = None

    @property
    def says_abort(self) -> bool:
        """Whether its client sees that the engine has aborted it. Other endpoints call what there is of it whole."""
        return self.path.endswith(_SAYS_ABORT)

    def gives(self, params: object) -> None:
        """A prompt of it is about to be given to the engine, with these ``kv_transfer_params``."""
        self.is_for = Role.PREFILL if asks(params, "do_remote_decode") else Role.DECODE

    @property
    def refusal(self) -> str:
        """Why it is refused; "" if it is not."""
        return "" if self.is_for is None or self.is_for in self.role else _REFUSALS[self.is_for]


ARRIVED: ContextVar[Arrived | None] = ContextVar("kvcached_nixl_arrived", default=None)
"""The HTTP request that this task works for, or did when it began; None if it works for none."""


@dataclass(eq=False)
class Roles:
    """The role of one API server.

    Attributes:
        role: at this moment.
        why_fixed: why it cannot change; None if it can. Then every request is taken, as the engine does.
    """

    role: Role
    why_fixed: Refused | None
    _arrived: set[Arrived] = field(default_factory=set)

    @contextmanager
    def let_in(self, path: str) -> Iterator[Arrived]:
        """Runs around the whole of an HTTP request, in its own task."""
        one = Arrived(path, self.role if self.why_fixed is None else Role.BOTH)
        self._arrived.add(one)
        ARRIVED.set(one)
        try:
            yield one
        finally:
            self._arrived.discard(one)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way. On any thread."""
        return bool(self._arrived)

    @property
    def num_left(self) -> int:
        """Requests under way that came while the role was another, and would be refused now, or may be."""
        if self.why_fixed is not None:
            return 0
        others = (one for one in self._arrived if one is not ARRIVED.get() and one.role is not self.role)
        return sum(one.is_for is None or one.is_for not in self.role for one in others)


def role_of(arguments: Any) -> Roles:
    """The role at start of an API server with these arguments of ``vllm serve``, which has a connector."""
    from vllm import envs

    transfer, num_servers = arguments.kv_transfer_config, arguments.api_server_count or 1
    role = Role(bool(transfer.is_kv_producer) + 2 * bool(transfer.is_kv_consumer))
    if role is not Role.BOTH:
        found, expected = f"a server whose kv_role is that of {role} alone", "kv_role kv_both"
    elif num_servers > 1:
        found, expected = f"{num_servers} API servers, of which one has got this call", "--api-server-count 1"
    elif not any(arguments.api_key or [envs.VLLM_API_KEY]):
        found, expected = "a server without a key, whose role anybody could change", "--api-key"
    else:
        return Roles(role, None)
    unchanged, remedy = "The role is unchanged.", "Start the server so, or choose another one."
    return Roles(role, Refused(found=found, expected=expected, consequence=unchanged, remedy=remedy))


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["prefill", "decode", "both"]


async def answer(request: Any) -> Any:
    """The endpoint `ROLE_PATH`, which tells the role, and changes it."""
    from fastapi import HTTPException
    from starlette.responses import JSONResponse

    roles: Roles = getattr(request.app.state, ROLES)
    if request.method == "POST":
        body = await request.body()
        if roles.why_fixed is not None:
            raise HTTPException(HTTPStatus.CONFLICT, roles.why_fixed.line)
        try:
            role = Role[msgspec.json.decode(body, type=_Wanted).role.upper()]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            refused = Refused(
                found=f"a body that cannot be used: {error}",
                expected='{"role": "prefill"}, "decode" or "both"',
                consequence=f"The role is still {roles.role}.",
                remedy="Send one of these as JSON.",
            )
            raise HTTPException(HTTPStatus.BAD_REQUEST, refused.line) from error
        if role is not roles.role:
            before, roles.role = roles.role, role
            told = "The role is %s, and was %s: %d requests of that are under way"
            logger.info(told, role, before, roles.num_left)
    return JSONResponse({"role": str(roles.role), "under_way": roles.num_left})


async def tell_ready(roles: Roles, client: Any, scope: Any, receive: Any, send: Any) -> None:
    """Answers a probe, a path of `READY`: with 503 in the other role, and where ``/health`` says 503."""
    from starlette.responses import Response
    from vllm.v1.engine.exceptions import EngineDeadError

    is_ready = READY[scope["path"]] in roles.role
    try:
        await client.check_health()
    except EngineDeadError:
        is_ready = False
    await Response(status_code=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)
