# SPDX-License-Identifier: Apache-2.0
"""How a request can fail, and what the client is told.

Refusal      the router does not serve the request: it is invalid, or a limit is reached
LegFailed    one server failed to do its part; another server may be tried
Answered     a server answered 4xx; its response is passed on to the client
ClientLeft   the client has disconnected; nothing can be sent to it
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

__all__ = [
    "Answered",
    "ClientLeft",
    "RETRY_SECONDS",
    "LegFailed",
    "Refusal",
    "RouterFailure",
    "error_body",
    "hand_over_tags",
    "type_of",
]


RETRY_SECONDS = 1
"""When a client should try again, if nothing better is known."""


class RouterFailure(str, Enum):
    """Why a request or a leg failed. A label of the metrics, so the number of values must not grow with traffic."""

    BODY = "body"
    """The client's body is not a valid request."""
    PARAMETERS = "parameters"
    """The client's kv_transfer_params are invalid, or not allowed."""
    SIZE = "size"
    SEVERAL = "several"
    """The request needs more than one hand-over."""
    KEY = "key"
    BUSY = "busy"
    """The limit of requests in flight, or of memory for their bodies, is reached."""
    FULL = "full"
    """Decode servers have no room for the prompt, and will not have for as long as a request may wait."""
    DRAINING = "draining"
    NO_SERVER = "no_server"
    UNREACHABLE = "unreachable"
    """No connection could be opened: refused, no such name. The request was not delivered."""
    CONNECT = "connect"
    """No connection within its limit. The request was not delivered, and the server may only be slow."""
    LOCAL = "local"
    """The router itself has no descriptor, port or memory left for a connection. Says nothing about the server."""
    BROKEN = "broken"
    """The connection ended before the response was complete."""
    TIME = "time"
    LOST = "lost"
    """The server was removed, or has sent nothing for too long, while the router waited for its response."""
    SERVER = "server"
    """The server answered 5xx."""
    UPSTREAM_BUSY = "upstream_busy"
    ANSWER = "answer"
    """The server's response cannot be used."""
    RESTARTED = "restarted"
    """The prefill server was restarted: what the router knew of it, and may have told decode, is no longer true."""
    HANDOVER = "handover"
    """Decode's response begins with an error, reports a failed KV hand-over, or ends without a usable finish_reason."""
    UPSTREAM_KEY = "upstream_key"
    SLOW_CLIENT = "slow_client"
    CLIENT_LEFT = "client_left"
    SERVER_SAID_NO = "server_said_no"
    """The server answered 4xx, which is passed on to the client."""
    DEFECT = "defect"
    """Internal error in kvcached_nixl, or in a policy; the traceback is in the log."""


_HAND_OVER = re.compile(
    rb"KV (?:hand-over failed|memory is short): "
    rb"(cause=[a-z_]{1,32}(?: (?:attempt|request|prefill_request)=[!#-&(-\[\]-~]{1,200})*)"
)
"""The format that `wire.causes` writes."""


class Refusal(Exception):
    """The router refuses a request.

    Args:
        status: HTTP status.
        message: sent to the client: what was found, what was expected, what to do.
        param: the field of the body that is wrong.
        retry_after_seconds: value of the Retry-After header.
        allow: value of the Allow header, for status 405.
    """

    def __init__(
        self,
        status: int,
        cause: RouterFailure,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.message = message
        self.param = param
        self.headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
        if allow:
            self.headers["Allow"] = allow


class LegFailed(Exception):
    """One server failed to do its part of a request.

    Args:
        server: its name, for the log.
        reason: what happened; must not contain any part of the prompt.
        status: HTTP status for the client, if no other attempt succeeds.
        is_retriable: whether another attempt, on this or another server, may succeed.
        retry_after_seconds: what the server said of it.
    """

    def __init__(
        self,
        cause: RouterFailure,
        server: str,
        reason: str,
        *,
        status: int = 502,
        is_retriable: bool = True,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(f"{server}: {reason}")
        self.cause = cause
        self.server = server
        self.reason = reason
        self.status = status
        self.is_retriable = is_retriable
        self.retry_after_seconds = retry_after_seconds

    @property
    def refusal(self) -> Refusal:
        """What the client is told if no other attempt follows."""
        retry_seconds = self.retry_after_seconds or (RETRY_SECONDS if self.status == 503 else None)
        message = f"The request failed: {self.reason}."
        return Refusal(self.status, self.cause, message, retry_after_seconds=retry_seconds)

    @property
    def is_delivered(self) -> bool:
        """Whether the server may have got the request. If not, any server may be tried, also the same again."""
        undelivered = (RouterFailure.UNREACHABLE, RouterFailure.CONNECT, RouterFailure.LOCAL, RouterFailure.NO_SERVER)
        return self.cause not in undelivered


class Answered(Exception):
    """A server's 4xx response, which is passed on to the client.

    Args:
        body: unchanged; its size is limited.
    """

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"answered {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class ClientLeft(Exception):
    """The client has closed its connection."""


def hand_over_tags(said: bytes) -> str:
    """Returns cause, attempt and both request ids of a failed hand-over, in the format of the server's log.

    Args:
        said: an error response, as JSON or as an event of a stream.

    Returns: "" if the error is not about a hand-over.
    """
    found = _HAND_OVER.search(said)
    return "" if found is None else found[1].decode()


def type_of(status: int) -> str:
    """Returns the ``type`` of an error, as vLLM and OpenAI name them."""
    if status == 401:
        return "AuthenticationError"
    if status == 429:
        return "RateLimitError"
    if status < 500:
        return "BadRequestError"
    return "InternalServerError" if status == 500 else "ServiceUnavailableError"


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Returns an error as JSON, in vLLM's format."""
    return msgspec.json.encode({"error": {"message": message, "type": type_of(status), "param": param, "code": status}})
