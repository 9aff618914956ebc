# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a request, and what the client hears of it.

Refusal      the request is not begun: the client's own doing, or no room
LegFailed    one server did not do its part; it may be tried elsewhere
Answered     a server has answered that the request is wrong; its words are the client's
ClientLeft   nobody is there to hear anything
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

__all__ = [
    "Answered",
    "ClientLeft",
    "LegFailed",
    "Refusal",
    "RouterFailure",
    "error_body",
    "hand_over_tags",
    "type_of",
]


class RouterFailure(str, Enum):
    """Why a request or a leg has failed: the label of the metrics, so a short list that never grows with traffic."""

    BODY = "body"
    """The client's body is no request."""
    PARAMETERS = "parameters"
    """The client's kv_transfer_params cannot be used, or may not be there."""
    SIZE = "size"
    SEVERAL = "several"
    """More than one hand-over was asked for at once."""
    KEY = "key"
    BUSY = "busy"
    """As many requests as may be are in flight."""
    DRAINING = "draining"
    NO_SERVER = "no_server"
    UNREACHABLE = "unreachable"
    """No connection: the request was not delivered."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    TIME = "time"
    LOST = "lost"
    """The server's health checks failed while it was waited for."""
    SERVER = "server"
    """The server answered 5xx."""
    UPSTREAM_BUSY = "upstream_busy"
    ANSWER = "answer"
    """The server answered something that cannot be used."""
    RESTARTED = "restarted"
    """Prefill is not the one that decode was told of."""
    HANDOVER = "handover"
    """Decode has begun with an error."""
    UPSTREAM_KEY = "upstream_key"
    SLOW_CLIENT = "slow_client"
    CLIENT_LEFT = "client_left"
    SERVER_SAID_NO = "server_said_no"
    """The server answered 4xx, and the client hears it."""
    DEFECT = "defect"
    """An exception of our own, or of a policy; its trace is in the log."""


_HAND_OVER = re.compile(
    rb"KV hand-over failed: (cause=[a-z_]{1,32}(?: (?:attempt|request|prefill_request)=[!#-&(-\[\]-~]{1,200})*)"
)
"""As `wire.causes` writes it."""


class Refusal(Exception):
    """A request that is not begun, or cannot be finished.

    Args:
        status: of HTTP.
        message: what the client is told: found, expected, what to do.
        param: the field of the body that it is about.
        retry_after_seconds: when another try may succeed.
    """

    def __init__(
        self,
        status: int,
        cause: RouterFailure,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class LegFailed(Exception):
    """One server did not do its part of a request.

    Args:
        server: its name, for the log.
        words: what happened; without anything of the prompt.
        status: what the client hears if nobody else does better.
        is_retriable: whether another server, or the same once more, may do better.
    """

    def __init__(
        self, cause: RouterFailure, server: str, reason: str, *, status: int = 502, is_retriable: bool = True
    ) -> None:
        super().__init__(f"{server}: {reason}")
        self.cause = cause
        self.server = server
        self.reason = reason
        self.status = status
        self.is_retriable = is_retriable


class Answered(Exception):
    """A server's 4xx, which is the client's to hear.

    Args:
        body: as it came, bounded.
    """

    def __init__(self, status: int, content_type: bytes, body: bytes) -> None:
        super().__init__(f"answered {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class ClientLeft(Exception):
    """The client has closed its connection."""


def hand_over_tags(said: bytes) -> str:
    """What a server says of a hand-over that has failed: cause, attempt and both requests' ids, as its log has them.

    Args:
        said: an error, as JSON or as an event of a stream.

    Returns: "" if it says nothing of one.
    """
    found = _HAND_OVER.search(said)
    return "" if found is None else found[1].decode()


def type_of(status: int) -> str:
    """The ``type`` of an error, as vLLM and OpenAI name them."""
    if status == 401:
        return "AuthenticationError"
    if status == 429:
        return "RateLimitError"
    if status < 500:
        return "BadRequestError"
    return "InternalServerError" if status == 500 else "ServiceUnavailableError"


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON that vLLM answers, too."""
    return msgspec.json.encode({"error": {"message": message, "type": type_of(status), "param": param, "code": status}})
