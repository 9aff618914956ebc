# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM's side channels, a ZMQ socket in each engine core that answers requests for handshakes (`listener`).

An engine's workers ask those of its peers, and wake the engine over its own, with a key that only they know. A server's
API process watches those of its own engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary, ref

import msgspec

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.side_channel_address import Endpoint, look_up
from kvcached_nixl.transport import zmtp
from kvcached_nixl.wire.checked import Malformed, decoder

logger = logging.getLogger(SERVER_LOGGER)

ASK = b"get_meta_msg"
WAKE = b"kvcached_nixl has ended something"
HEADROOM = b"kvcached_nixl headroom"
_REPLY_SECONDS, _AGAIN_SECONDS = 5.0, 0.25
_ASKED_AT_ONCE, _ASKED_AT_ONCE_THERE = 256, 8
"""Concurrent requests, in all and per address: each holds sockets, and a router may name any number of addresses."""
_LOOKED_UP_AT_ONCE, _NAMES_REMEMBERED = 64, 4096
"""Host names, looked up concurrently and cached: a name server that does not answer blocks a look-up for seconds."""
_LONGEST_ANSWER_BYTES = 4 << 20
"""Of one rank. NIXL's metadata takes most of it: some hundred bytes for each registered range and network card."""


class Reply(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _ClosedByPeer(OSError):
    """A connection was made, and has ended without an answer."""


class SideChannel:
    """Requests handshakes from peers' side channels, any number at a time, and wakes this engine through its own.

    Everything runs on one thread, until `close`. Raises OSError: there are no file descriptors for it.
    """

    def __init__(self) -> None:
        self._asked_at_once = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._asked_there: WeakValueDictionary[tuple[str, int], asyncio.Semaphore] = WeakValueDictionary()
        self._own: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._waking = asyncio.Lock()
        self._names = ThreadPoolExecutor(_LOOKED_UP_AT_ONCE, "kvcached-nixl-names")
        self._looking_up = asyncio.Semaphore(_LOOKED_UP_AT_ONCE)
        self._lookups: set[asyncio.Future[list[str]]] = set()
        self._looked_up: dict[str, list[str]] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-handshakes", daemon=True)
        self._thread.start()

    def ask(self, host: str, port: int, tp_rank: int, pp_rank: int = 0) -> Future[tuple[str, bytes]]:
        """Requests the (compatibility string, metadata) of a rank.

        If there is no answer, the future fails within 20 s: with `ConnectionRefusedError` if nothing listens
        at the address, with another `OSError` or a `TimeoutError` if that is not known, and with `ValueError` if the
        answer cannot be read.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(host, port, (ASK, pp_rank, tp_rank)), self._loop)

    def ask_headroom(self, host: str, port: int) -> Future[bytes]:
        """Requests an engine's headroom, encoded; empty if it does not know it. Fails as `ask` does."""
        return asyncio.run_coroutine_threadsafe(self._answer(host, port, (HEADROOM, 0)), self._loop)

    def wake(self, host: str, port: int, key: str) -> None:
        """Tells this engine's own listener that a worker has something to report. The message may get lost."""
        asyncio.run_coroutine_threadsafe(self._wake(host, port, wake_message(key)), self._loop)

    def close(self) -> None:
        """Stops the thread; requests that are under way are cancelled. Call nothing but this afterwards."""
        # It may have been closed before.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for _, writer in self._own.values():
                writer.transport.abort()
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._names.shutdown(wait=False, cancel_futures=True)
            for lookup in set(self._lookups):
                lookup.cancel()
            loop.close()

    async def _ask(self, host: str, port: int, question: tuple[object, ...]) -> tuple[str, bytes]:
        answer = await self._answer(host, port, question)
        try:
            reply = _read_reply(answer)
        except Malformed as error:
            raise _unreadable(host, port, error) from error
        return reply.compatibility_hash, reply.agent_metadata_bytes

    async def _answer(self, host: str, port: int, question: tuple[object, ...]) -> bytes:
        """The first frame of an answer. vLLM's clock, which may follow, is not used."""
        there = self._asked_there.setdefault((host, port), asyncio.Semaphore(_ASKED_AT_ONCE_THERE))
        clock = asyncio.get_running_loop().time
        async with there, self._asked_at_once:
            until_seconds, encoded = clock() + _REPLY_SECONDS, msgspec.msgpack.encode(question)
            while True:
                try:
                    return await self._answer_once(host, port, encoded)
                except _ClosedByPeer:
                    # A proxy may wait for what is behind it.
                    if clock() >= until_seconds:
                        raise
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _answer_once(self, host: str, port: int, question: bytes) -> bytes:
        opened: list[asyncio.StreamWriter] = []
        try:
            streams = await self._connected(host, port, opened)
            return await self._in_time(host, port, zmtp.ask(*streams, question, _LONGEST_ANSWER_BYTES))
        finally:
            for one in opened:
                one.close()

    async def _in_time(self, host: str, port: int, asking: Coroutine[None, None, list[bytes]]) -> bytes:
        try:
            return (await asyncio.wait_for(asking, _REPLY_SECONDS))[0]
        except asyncio.TimeoutError as error:
            reason = f"the side channel at {Endpoint(host, port)} does not answer within {_REPLY_SECONDS:g} s"
            raise TimeoutError(reason) from error
        except (OSError, EOFError) as error:
            reason = f"the side channel at {Endpoint(host, port)} has closed the connection: {error}"
            raise _ClosedByPeer(reason) from error
        except ValueError as error:
            raise _unreadable(host, port, error) from error

    async def _connected(
        self, host: str, port: int, opened: list[asyncio.StreamWriter]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The first connection to an address of the host. Whoever calls closes all that were ``opened``."""
        trying = [asyncio.ensure_future(self._reached(one, port, opened)) for one in await self._addresses(host)]
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

    async def _reached(
        self, address: str, port: int, opened: list[asyncio.StreamWriter]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            streams = await asyncio.wait_for(asyncio.open_connection(address, port), _REPLY_SECONDS)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no connection to {Endpoint(address, port)} within {_REPLY_SECONDS:g} s") from error
        opened.append(streams[1])
        return streams

    async def _addresses(self, host: str) -> list[str]:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return [host]
        await self._looking_up.acquire()
        found = asyncio.get_running_loop().run_in_executor(self._names, look_up, host)
        # A look-up cannot be cancelled, so it holds the semaphore until it has ended, even after the timeout below.
        self._lookups.add(found)
        found.add_done_callback(self._lookups.discard)
        found.add_done_callback(lambda _: self._looking_up.release())
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

    async def _wake(self, host: str, port: int, message: list[bytes]) -> None:
        if self._waking.locked():
            # Another one will be sent.
            return
        opened: list[asyncio.StreamWriter] = []
        try:
            async with self._waking:
                own = self._own.pop((host, port), None)
                if own is None or own[0].at_eof() or own[1].is_closing():
                    if own is not None:
                        own[1].close()
                    own = await self._reached(host, port, opened)
                    await asyncio.wait_for(zmtp.greet(*own, b"REQ"), _REPLY_SECONDS)
                    opened.clear()
                self._own[host, port] = own
                zmtp.write(own[1], message)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
            logger.info("The engine was not woken for a worker's report: %r", error)
        finally:
            for one in opened:
                one.close()


_read_reply: decoder[Reply] = decoder(Reply)


def _unreadable(host: str, port: int, error: ValueError) -> ValueError:
    return ValueError(f"the answer of the side channel at {Endpoint(host, port)} cannot be read: {error}")


def wake_message(key: str) -> list[bytes]:
    return [b"", msgspec.msgpack.encode((WAKE, key.encode()))]


WATCH_SECONDS = 2.0
"""How often a server's own engines are asked."""


class HandshakeWatch:
    """Watches what the side channels of a server's own engines answer. One thread in its API server, until `close`,
    until the listener is gone, or with the process. No other message brings an engine's identity there before the first
    request; the side channel has it from the start, and again whenever the weights change.

    Args:
        channel: is closed at the end.
        engines: index of each engine -> its side channel. Those on other hosts do not answer, and stay unknown.
        tp_size, pp_size: of each engine.
        listener: the metrics; ``say_kind`` and ``say_headroom`` are called on the watch's thread. The watch does not
            keep it alive.
    """

    def __init__(
        self, channel: SideChannel, engines: Mapping[int, Endpoint], tp_size: int, pp_size: int, listener: Any
    ) -> None:
        self._channel = channel
        self._engines = dict(engines)
        self._others = list(itertools.product(range(pp_size), range(tp_size)))[1:]
        self._listener = ref(listener)
        self._known: dict[int, tuple[str, bytes]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-handshake-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._listener() is not None:
                asked = {index: self._channel.ask(*where, 0) for index, where in self._engines.items()}
                for index, first in asked.items():
                    try:
                        self._look(index, first.result())
                    except (OSError, ValueError, CancelledError) as error:
                        logger.debug("The side channel of engine %d is not read: %s", index, error)
                    except Exception:
                        # A watch that ended would leave the metrics as they are for good.
                        logger.exception("What engine %d's handshake compares is not in the metrics", index)
                if self._closing.wait(WATCH_SECONDS):
                    return
        finally:
            self._channel.close()

    def _look(self, index: int, first: tuple[str, bytes]) -> None:
        where = self._engines[index]
        # Each rank's answer has the engine's incarnation, which is new whenever the weights are.
        if first[1] and self._known.get(index) != first:
            others = [self._channel.ask(*where, rank, stage) for stage, rank in self._others]
            answers, listener = [first, *(one.result() for one in others)], self._listener()
            if listener is not None and all(metadata for _, metadata in answers):
                listener.say_kind(index, answers)
                self._known[index] = first
        headroom, listener = self._channel.ask_headroom(*where).result(), self._listener()
        if listener is not None and headroom:
            listener.say_headroom(index, headroom)
