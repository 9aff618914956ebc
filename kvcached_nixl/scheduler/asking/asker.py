# SPDX-License-Identifier: Apache-2.0
"""The thread that asks prefill servers over HTTP. One per engine.

Its methods are called on the engine's thread and return at once; the answers are taken there, too (`taken`). The thread
starts with the first question.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import aiohttp
from yarl import URL

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.question import (
    LEAST_TOKENS,
    LOOK_UP_PATH,
    MOST_ANSWER_BYTES,
    MOST_SECONDS,
    AskFailed,
    Outcome,
    Question,
    read_answer,
)

if TYPE_CHECKING:
    from kvcached_nixl.scheduler.asking.server import Server

logger = logging.getLogger(SERVER_LOGGER)

CONNECT_SECONDS = 5.0
CHECK_SECONDS = 5.0
ANSWER_SECONDS = 30.0
"""For an answer's body, which vLLM sends when it has computed the prompt."""
CLOSE_SECONDS = 5.0
_SOCKETS = ContextVar[list[socket.socket]]("_SOCKETS")
"""Of the question that a task asks."""
PIECE_BYTES = 1 << 18
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that has vanished is noticed after 20 s."""

T = TypeVar("T")
Params: TypeAlias = dict[str, Any]
"""``kv_transfer_params``."""


class Asker:
    """See the module.

    Args:
        api_key: sent as a bearer token; "" for none.
        woken: called on the thread when there is an answer to take.

    Attributes:
        answers: by the numbers of questions: parameters, or why there are none.
        checked: servers that were checked, and whether they are well.
        cached: by the ids of requests and server: parameters, empty if it does not know, or None if it has not answered
            in time.
    """

    def __init__(self, api_key: str, woken: Callable[[], None]) -> None:
        # As it is, and as JSON has it.
        self._shown_keys = tuple(one.encode() for one in {api_key, json.dumps(api_key)[1:-1]} if api_key)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._woken = woken
        self.answers: deque[tuple[int, Params | Outcome]] = deque()
        self.checked: deque[tuple[Server, bool]] = deque()
        self.cached: deque[tuple[str, Server, Params | None]] = deque()
        self._tasks: dict[object, asyncio.Task[None]] = {}
        # By question.
        self._sockets: dict[object, list[socket.socket]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._session: aiohttp.ClientSession | None = None

    def ask(self, number: int, server: Server, question: Question) -> None:
        """Asks one server for the KV of a prompt (`answers`)."""
        self._called(self._begin, number, self._ask, number, server, question)

    def check(self, server: Server) -> None:
        """Asks a server that has not answered for long whether it is well (`checked`)."""
        self._called(self._begin, server, self._check, server)

    def look_up(self, server: Server, question: Question, least_tokens: int, most_seconds: float) -> None:
        """Asks a server how much of a prompt it has cached (`cached`). If it has ``least_tokens``, their KV is wanted;
        0 if only their number is."""
        self._called(self._begin, object(), self._look_up, server, question, least_tokens, most_seconds)

    def cancel(self, number: int) -> None:
        """Nobody waits for the answer any more: prefill is told to stop computing the prompt. What it has answered by
        then may still be taken, within 5 s."""
        self._called(self._end, number)

    @property
    def has_answers(self) -> bool:
        return bool(self.answers or self.checked or self.cached)

    def close(self) -> None:
        """Cancels all questions, and ends the thread."""
        self._is_closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            self._loop = None

    # ----------------------------------------------------------------------------------------------- on the thread

    def _called(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._is_closed:
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="kvcached_nixl-asker", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._finish())
        finally:
            loop.close()

    async def _finish(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self, key: object, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if key in self._tasks:
            # A server is checked once at a time: an older answer would be taken for a newer one.
            return
        task = self._tasks[key] = asyncio.ensure_future(function(*arguments))
        # It may be cancelled before it begins.
        task.add_done_callback(lambda _: (self._tasks.pop(key), self._sockets.pop(key, None)))

    async def _check(self, server: Server) -> None:
        found = await self._outcome("checked", server, self._is_well(server))
        self.checked.append((server, found is True))
        self._woken()

    async def _look_up(self, server: Server, question: Question, least_tokens: int, most_seconds: float) -> None:
        asked = self._cached(server, question, least_tokens, most_seconds)
        found = await self._outcome("asked what it has cached", server, asked)
        self.cached.append((question.request_id, server, None if isinstance(found, Outcome) else found))
        self._woken()

    async def _ask(self, number: int, server: Server, question: Question) -> None:
        self._sockets[number] = []
        _SOCKETS.set(self._sockets[number])
        found = await self._outcome("asked", server, self._params(server, question))
        if number in self._sockets or not isinstance(found, Outcome):
            self.answers.append((number, found))
            self._woken()

    def _end(self, number: int) -> None:
        task, is_told = self._tasks.get(number), False
        if task is None:
            return
        # vLLM ends a request whose client sends no more, and an answer that is on its way here can still be read.
        for one in self._sockets.pop(number, ()):
            with contextlib.suppress(OSError):
                # One that is being connected can be shut down, too, but another one would follow it.
                one.getpeername()
                one.shutdown(socket.SHUT_WR)
                is_told = True
        if is_told:
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, task.cancel)
        else:
            task.cancel()

    async def _outcome(self, asked: str, server: Server, answer: Awaitable[T]) -> T | Outcome:
        """What a server has answered, or why it has not; ``asked``: what it was, for the log. Raises nothing: without a
        result, a request or a server would be waited for without an end."""
        try:
            return await answer
        except AskFailed as error:
            return error.outcome
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            logger.debug("Prefill server %s could not be %s: %s", server, asked, type(error).__name__)
            # What is no HTTP is shown as it came, and may repeat what was sent.
            reason = self._without_key(f"{type(error).__name__}: {error}".encode(errors="replace"))
            return Outcome(reason.decode(), is_of_server=True)
        except Exception as error:
            logger.exception("A prefill server could not be %s; expected no such error", asked)
            return Outcome(f"a defect: {type(error).__name__}")

    async def _is_well(self, server: Server) -> bool:
        url, more = self._target(server, "health")
        timeout = aiohttp.ClientTimeout(total=CHECK_SECONDS)
        async with self._opened().get(url, timeout=timeout, allow_redirects=False, **more) as response:
            return response.status == 200

    async def _cached(self, server: Server, question: Question, least_tokens: int, most_seconds: float) -> Params:
        url, more = self._target(server, LOOK_UP_PATH, **{"Content-Type": "application/msgpack"})
        url = url.with_query({LEAST_TOKENS: least_tokens, MOST_SECONDS: most_seconds})
        more |= {"timeout": aiohttp.ClientTimeout(total=most_seconds), "allow_redirects": False}
        try:
            async with self._opened().post(url, data=question.look_up_body(), **more) as response:
                return read_answer(response.status, response.headers, await _answer_of(response))
        except AskFailed:
            return {}

    async def _params(self, server: Server, question: Question) -> Params:
        sent = _Body(question.body())
        length = {"Content-Length": str(len(sent.rest))}
        url, more = self._target(server, question.path, **question.headers, **length)
        try:
            async with self._opened().post(url, data=sent, allow_redirects=False, **more) as response:
                body = await _answer_of(response)
        except aiohttp.ClientError as error:
            if not sent.is_begun:
                raise
            # Not its text: that may repeat what was sent.
            what = type(error).__name__
            if sent.rest:
                # Its answer may be lost with the connection: it may refuse this prompt for its size.
                outcome = Outcome(f"it has closed the connection while the prompt was sent: {what}")
            else:
                reason = f"it has closed the connection, or sent no HTTP: {what}"
                outcome = Outcome(reason, is_of_server=True, has_prompt=True)
            raise AskFailed(outcome) from error
        if response.status != 200:
            # What the log shows of it: some servers repeat a key that they do not accept.
            body = self._without_key(body)
        return read_answer(response.status, response.headers, body)

    def _without_key(self, text: bytes) -> bytes:
        for one in self._shown_keys:
            text = text.replace(one, b"***")
        return text

    def _target(self, server: Server, path: str, **headers: str) -> tuple[URL, dict[str, Any]]:
        headers = {**self._headers, **headers}
        target = URL(server.url) / path
        if not server.address:
            return target, {"headers": headers}
        # The certificate is that of the name.
        headers["Host"] = target.authority
        return target.with_host(server.address), {"headers": headers, "server_hostname": target.host}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
            # A connection each: one that is used again may have been closed by the server meanwhile, or hold an answer
            # that nobody asked for. And what balances connections chooses anew; a cookie would name its last choice.
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket)
            more: dict[str, Any] = {"cookie_jar": aiohttp.DummyCookieJar(), "trust_env": False}
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, **more)
        return self._session


def taken(found: deque[T]) -> list[T]:
    """Returns what has come until now, and takes it out. The thread may go on to add."""
    return [found.popleft() for _ in range(len(found))]


class _Body:
    """What is sent. It is not kept while prefill computes, and written piece by piece, however large it is."""

    def __init__(self, data: bytes) -> None:
        self.rest = data
        self.is_begun = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.is_begun = True
        for start in range(0, len(self.rest), PIECE_BYTES):
            yield self.rest[start : start + PIECE_BYTES]
        self.rest = b""


async def _answer_of(response: aiohttp.ClientResponse) -> bytes:
    async def read() -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MOST_ANSWER_BYTES:
                raise AskFailed(Outcome(f"its answer has more than {MOST_ANSWER_BYTES} bytes"))
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), ANSWER_SECONDS)
    except asyncio.TimeoutError as error:
        reason = f"it has begun its answer, and not ended it within {ANSWER_SECONDS:g} s"
        raise AskFailed(Outcome(reason, is_of_server=True, has_prompt=True)) from error


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    if (sockets := _SOCKETS.get(None)) is not None:
        sockets.append(made)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
