# SPDX-License-Identifier: Apache-2.0
"""Both ends of vLLM's side channel: a ZMQ socket in each engine core that answers requests for handshakes.

The stock listener parses a request and looks up its rank without handling errors; an error ends its thread, and every
later handshake times out. This listener answers every request that it can read, in vLLM's
format (``_nixl_handshake_listener`` in ``v1/nixl/base_scheduler.py``): a request names the rank and its pipeline stage,
and the answer has a second frame, the listener's clock. vLLM below 0.26 names no stage, and expects one frame. So a
stock peer gets as far as comparing hashes, which refuses it with a readable message.

The engine's own workers wake the engine over it, with a key that only they know.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import zmq

from kvcached_nixl.side_channel_address import Endpoint, look_up

logger = logging.getLogger("vllm.kvcached_nixl")

_ASK = b"get_meta_msg"
_WAKE = b"kvcached_nixl has ended something"
_HEADROOM = b"kvcached_nixl headroom"
_T = TypeVar("_T")
_REPLY_SECONDS = 5.0
_WATCH_SECONDS = 0.1
"""How often the listener calls ``watch``, and looks whether it is to stop."""
_ASKED_AT_ONCE, _ASKED_AT_ONCE_THERE = 256, 8
"""Concurrent requests, in all and per address: each holds sockets, and a router may name any number of addresses."""
_LOOKED_UP_AT_ONCE, _NAMES_REMEMBERED = 64, 4096
"""Host names, looked up concurrently and cached: a name server that does not answer blocks a look-up for seconds."""
_LONGEST_QUESTION_BYTES = 1024
_LONGEST_ANSWER_BYTES = 64 << 20


class _Reply(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class Listener:
    """Answers peers' requests for handshakes, on its own thread, until it is closed.

    Args:
        addresses: numeric; those that this host does not have are left out if it has another one of them.
        answers: rank -> (compatibility string, metadata). A request for another rank is answered with an error text as
            compatibility string, so that the peer refuses the handshake and logs the text.
        woken: called on the listener's thread when a worker of this engine has something to report.
        key: secret that such a worker sends.
        headroom: returns what the engine could take now, encoded; empty if that is not known. Called on the listener's
            thread.
        watch: called there after each message, and every `_WATCH_SECONDS`.

    Raises:
        OSError: an address cannot be bound.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        answers: Mapping[int, tuple[str, bytes]],
        woken: Callable[[], None],
        key: str,
        headroom: Callable[[], bytes] = lambda: b"",
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._headroom, self._watch = headroom, watch
        self._answers: dict[int, bytes] = {}
        self.answer(answers)
        self._woken = woken
        self._key = key.encode()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a limit, a message of any size would be read into memory before its size is checked.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        try:
            self._bind(addresses, port)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-listener", daemon=True)
        self._thread.start()

    def answer(self, answers: Mapping[int, tuple[str, bytes]]) -> None:
        """Replaces the answers. May be called from any thread."""
        self._answers = {rank: msgspec.msgpack.encode(_Reply(*answer)) for rank, answer in answers.items()}

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._thread.join()

    def _bind(self, addresses: Sequence[str], port: int) -> None:
        missing: list[OSError] = []
        for address in addresses:
            self._socket.setsockopt(zmq.IPV6, int(":" in address))
            try:
                self._socket.bind(_url(address, port))
            except zmq.ZMQError as error:
                where = Endpoint(address, port)
                failure = OSError(error.errno, f"the side channel cannot listen at {where}: {error.strerror}")
                if error.errno != errno.EADDRNOTAVAIL:
                    raise failure from error
                missing.append(failure)
        if len(missing) == len(addresses):
            raise missing[0]

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(int(_WATCH_SECONDS * 1000)):
                    self._take(self._socket.recv_multipart())
                self._try(self._watch)
        finally:
            self._context.destroy(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        question = frames[-1]
        if len(frames) != 3 or len(question) > _LONGEST_QUESTION_BYTES:
            logger.warning(
                "Dropped a message to the side channel: found %d frames; expected 3, and a short request", len(frames)
            )
            return
        try:
            said = msgspec.msgpack.decode(question)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            logger.warning("Dropped a message to the side channel that cannot be read: %s", error)
            return
        if not isinstance(said, list) or len(said) not in (2, 3):
            logger.warning("Dropped a message to the side channel: expected a request for a rank's handshake")
        elif said == [_WAKE, self._key]:
            self._woken()
        elif said[0] == _HEADROOM:
            self._send([frames[0], b"", self._try(self._headroom) or b""])
        elif said[0] == _ASK:
            answer = [frames[0], b"", self._answer(said[-1], said[-2] if len(said) == 3 else 0)]
            if len(said) == 3:
                answer.append(msgspec.msgpack.encode(time.perf_counter()))
            self._send(answer)

    def _answer(self, rank: object, stage: object) -> bytes:
        found = self._answers.get(rank) if isinstance(rank, int) and stage == 0 else None
        if found is None:
            # Of other values only the type is shown: they may be nested too deep for repr.
            shown = rank if isinstance(rank, int) else type(rank).__name__
            said = f"no rank {shown}: this engine has {sorted(self._answers)}; correct the router's tp_size"
            found = msgspec.msgpack.encode(_Reply(said, b""))
        return found

    def _try(self, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except Exception:
            # The engine's thread changes meanwhile what is read here. It is read again soon.
            logger.debug("The engine's headroom could not be read", exc_info=True)
            return None

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("A request for a handshake was not answered: %s", error)


class SideChannel:
    """Requests handshakes from peers' side channels, any number at a time, and wakes this engine through its own.

    Everything runs on one thread, which starts with the first call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._context: Any = None
        self._asked_at_once = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._asked_there: WeakValueDictionary[tuple[str, int], asyncio.Semaphore] = WeakValueDictionary()
        self._own: dict[tuple[str, int], Any] = {}
        self._names = ThreadPoolExecutor(_LOOKED_UP_AT_ONCE, "kvcached-nixl-names")
        self._looking_up = asyncio.Semaphore(_LOOKED_UP_AT_ONCE)
        self._lookups: set[asyncio.Future[list[str]]] = set()
        self._looked_up: dict[str, list[str]] = {}

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        """Requests the (compatibility string, metadata) of a rank.

        If there is no answer, the future fails within a few seconds: with `ConnectionRefusedError` if nothing listens
        at the address, with another `OSError` or a `TimeoutError` if that is not known, and with `ValueError` if the
        answer cannot be read.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(host, port, tp_rank), self._running())

    def ask_headroom(self, host: str, port: int) -> Future[bytes]:
        """Requests an engine's headroom, encoded; empty if it does not know it. Fails as `ask` does."""
        return asyncio.run_coroutine_threadsafe(self._ask_headroom(host, port), self._running())

    def wake(self, host: str, port: int, key: str) -> None:
        """Tells this engine's own listener that a worker has something to report. The message may get lost."""
        self._running().call_soon_threadsafe(self._wake, host, port, key)

    def close(self) -> None:
        """Stops the thread; requests that are under way are cancelled."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="kvcached-nixl-handshakes", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        from zmq.asyncio import Context

        asyncio.set_event_loop(loop)
        self._context = Context()
        try:
            loop.run_forever()
        finally:
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            for own in self._own.values():
                own.close(0)
            self._context.destroy(linger=0)
            self._names.shutdown(wait=False, cancel_futures=True)
            for lookup in set(self._lookups):
                lookup.cancel()
            loop.close()

    async def _ask(self, host: str, port: int, tp_rank: int) -> tuple[str, bytes]:
        frames = await self._exchanged(host, port, (_ASK, 0, tp_rank))
        try:
            reply = msgspec.msgpack.decode(frames[0], type=_Reply)
        except (msgspec.MsgspecError, RecursionError, UnicodeError, IndexError) as error:
            raise ValueError(
                f"the answer of the side channel at {Endpoint(host, port)} cannot be read: {error}"
            ) from error
        return reply.compatibility_hash, reply.agent_metadata_bytes

    async def _ask_headroom(self, host: str, port: int) -> bytes:
        frames = await self._exchanged(host, port, (_HEADROOM, 0))
        return bytes(frames[0]) if frames else b""

    async def _exchanged(self, host: str, port: int, question: tuple[object, ...]) -> list[bytes]:
        there = self._asked_there.setdefault((host, port), asyncio.Semaphore(_ASKED_AT_ONCE_THERE))
        async with there, self._asked_at_once:
            try:
                return await self._exchanged_alone(host, port, question)
            except zmq.ZMQError as error:
                raise OSError(
                    f"no request could be sent to the side channel at {Endpoint(host, port)}: {error}"
                ) from error

    async def _exchanged_alone(self, host: str, port: int, question: tuple[object, ...]) -> list[bytes]:
        address = await self._listening(host, port)
        assert self._context is not None
        with self._context.socket(zmq.REQ) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, _LONGEST_ANSWER_BYTES)
            asking.setsockopt(zmq.IPV6, int(":" in address))
            try:
                asking.connect(_url(address, port))
                await asking.send(msgspec.msgpack.encode(question))
                return list(await asyncio.wait_for(asking.recv_multipart(), _REPLY_SECONDS))
            except asyncio.TimeoutError as error:
                reason = f"the side channel at {Endpoint(host, port)} does not answer within {_REPLY_SECONDS:g} s"
                raise TimeoutError(reason) from error

    async def _listening(self, host: str, port: int) -> str:
        """An address of the host at which something listens. ZMQ itself would retry without reporting anything."""
        trying = [asyncio.ensure_future(self._reached(one, port)) for one in await self._addresses(host)]
        failures: list[OSError] = []
        try:
            for one in asyncio.as_completed(trying):
                try:
                    return await one
                except OSError as error:
                    failures.append(error)
        finally:
            for task in trying:
                task.cancel()
        # ConnectionRefusedError means that nothing listens, so it is raised only if every address refuses.
        raise next((one for one in failures if not isinstance(one, ConnectionRefusedError)), failures[0])

    async def _reached(self, address: str, port: int) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _REPLY_SECONDS)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no connection to {Endpoint(address, port)} within {_REPLY_SECONDS:g} s") from error
        writer.close()
        return address

    async def _addresses(self, host: str) -> list[str]:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            return [host]
        await self._looking_up.acquire()
        found = asyncio.get_running_loop().run_in_executor(self._names, look_up, host)
        # A look-up cannot be cancelled, so it holds the semaphore until it has ended, even after the timeout below.
        self._lookups.add(found)
        found.add_done_callback(self._looked)
        try:
            addresses = await asyncio.wait_for(asyncio.shield(found), _REPLY_SECONDS)
        except (asyncio.TimeoutError, OSError) as error:
            if host not in self._looked_up:
                raise OSError(f"no address of {host} was found within {_REPLY_SECONDS:g} s: {error}") from error
            return self._looked_up[host]
        if len(self._looked_up) >= _NAMES_REMEMBERED:
            self._looked_up.clear()
        self._looked_up[host] = addresses
        return addresses

    def _looked(self, lookup: asyncio.Future[list[str]]) -> None:
        self._lookups.discard(lookup)
        self._looking_up.release()

    def _wake(self, host: str, port: int, key: str) -> None:
        assert self._context is not None
        own = self._own.get((host, port))
        if own is None:
            own = self._own[host, port] = zmq.Context.shadow(self._context.underlying).socket(zmq.DEALER)
            own.setsockopt(zmq.LINGER, 0)
            own.setsockopt(zmq.IPV6, int(":" in host))
            own.connect(_url(host, port))
        try:
            own.send_multipart([b"", msgspec.msgpack.encode((_WAKE, key.encode()))], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.info("The engine was not woken for a worker's report: %s", error)


def _url(address: str, port: int) -> str:
    return f"tcp://{Endpoint(address, port)}"
