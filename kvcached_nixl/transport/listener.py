# SPDX-License-Identifier: Apache-2.0
"""The side channel that an engine listens at: answers requests for handshakes; and whether peers reach it, as far as
that can be seen from here.

Requests and answers have vLLM's format (``_nixl_handshake_listener`` in ``v1/nixl/base_scheduler.py``), so a stock peer
gets as far as comparing hashes, which refuses it with a readable message. At start the advertised address is asked for
a handshake, as peers will do it. Another engine there stops the start: all hand-overs would fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

import msgspec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.side_channel_address import (
    ADVERTISE_HOST,
    ADVERTISE_PORT,
    HOST,
    PORT,
    Endpoint,
    SideChannelAddress,
    look_up,
    own_addresses,
)
from kvcached_nixl.transport import zmtp
from kvcached_nixl.transport.side_channel import ASK, HEADROOM, Reply, SideChannel, wake_message
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Answers, is_tagged, read_answer, read_rank

logger = logging.getLogger(SERVER_LOGGER)

_T = TypeVar("_T")
_WATCH_SECONDS = 0.1
"""How often the listener calls ``watch``, and looks whether it is to stop."""
_LONGEST_QUESTION_BYTES = 1024
_CONNECTIONS, _IDLE_SECONDS, _AGAIN_SECONDS = 256, 2.0, 1.0
"""How many are open at once, the others wait, peers for 5 s; how long one may take for its next question, or to read an
answer; and when one is accepted again that could not be."""

WAIT_SECONDS = 2.0
"""How long a start waits for the check. What it finds later is logged."""

_UNKNOWN = "what answers cannot be read"


class Listener:
    """Answers peers' requests for handshakes, on its own thread, until it is closed.

    Args:
        addresses: numeric; those that this host does not have are left out if it has another one of them.
        answers: a request for another rank is answered with an error text as compatibility string, so that the peer
            refuses the handshake and logs the text.
        woken: called on the listener's thread when a worker of this engine has something to report.
        key: secret that such a worker sends.
        headroom: returns what the engine could take now, encoded; empty if that is not known. Called on the listener's
            thread.
        watch: called there after each message, and every `_WATCH_SECONDS`.

    Raises OSError: an address cannot be bound.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        answers: Answers,
        woken: Callable[[], None],
        key: str,
        headroom: Callable[[], bytes] = lambda: b"",
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._headroom, self._watch = headroom, watch
        self._answers: dict[tuple[int, int], bytes] = {}
        self.answer(answers)
        self._woken = woken
        self._wake_message = wake_message(key)
        self._closing = threading.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.SelectorEventLoop()
        try:
            self._sockets = _bound(addresses, port)
        except OSError:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-listener", daemon=True)
        self._thread.start()

    def answer(self, answers: Answers) -> None:
        """Replaces the answers. May be called from any thread."""
        self._answers = {rank: msgspec.msgpack.encode(Reply(*answer)) for rank, answer in answers.items()}

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        places = asyncio.Semaphore(_CONNECTIONS)
        accepting = [asyncio.ensure_future(self._accept(one, places)) for one in self._sockets]
        while not self._closing.is_set():
            await asyncio.sleep(_WATCH_SECONDS)
            self._try(self._watch)
        tasks = [*accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sockets:
            one.close()

    async def _accept(self, listening: socket.socket, places: asyncio.Semaphore) -> None:
        # Servers of asyncio do not wait for places, and log without end where there are no file descriptors.
        while True:
            await places.acquire()
            try:
                accepted, _ = await self._loop.sock_accept(listening)
                streams = await asyncio.open_connection(sock=accepted, limit=_LONGEST_QUESTION_BYTES)
            except OSError as error:
                logger.debug("The side channel cannot accept a connection: %r", error)
                places.release()
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            task = asyncio.ensure_future(self._serve(*streams))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            task.add_done_callback(lambda _: places.release())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, EOFError, asyncio.TimeoutError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            # Anybody may send anything: probes of load balancers would fill the log.
            logger.debug("The side channel has ended a connection: %r", error)
        except Exception:
            logger.exception("The side channel has ended a connection; expected no such error")
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(zmtp.greet(reader, writer, b"ROUTER"), _IDLE_SECONDS)
        longest_seconds: float | None = _IDLE_SECONDS
        while True:
            frames = await asyncio.wait_for(zmtp.read(reader, _LONGEST_QUESTION_BYTES), longest_seconds)
            if frames == self._wake_message:
                # A worker of this engine, which keeps its connection.
                longest_seconds = None
                self._woken()
            else:
                zmtp.write(writer, self._take(frames))
                await asyncio.wait_for(writer.drain(), _IDLE_SECONDS)
            self._try(self._watch)

    def _take(self, frames: list[bytes]) -> list[bytes]:
        """The answer. Raises ValueError or msgspec's errors: this is no question."""
        if len(frames) != 2:
            raise ValueError(f"found {len(frames)} frames; expected an empty one and a question")
        said = msgspec.msgpack.decode(frames[1])
        if isinstance(said, list) and len(said) in (2, 3) and said[0] == ASK:
            answer = [b"", self._answer(said[-1], said[-2] if len(said) == 3 else 0)]
            # vLLM below 0.26 names no pipeline stage, and expects one frame; later ones expect the listener's clock.
            return answer if len(said) == 2 else [*answer, msgspec.msgpack.encode(time.perf_counter())]
        if isinstance(said, list) and said[:1] == [HEADROOM]:
            return [b"", self._try(self._headroom) or b""]
        raise ValueError("expected a request for a rank's handshake")

    def _answer(self, rank: object, stage: object) -> bytes:
        found = self._answers.get((stage, rank)) if isinstance(rank, int) and isinstance(stage, int) else None
        if found is None:
            # Of other values only the type is shown: they may be nested too deep for repr.
            shown = (one if isinstance(one, int) else type(one).__name__ for one in (stage, rank))
            said = (
                f"no stage and rank {', '.join(map(str, shown))}: this engine has {sorted(self._answers)}; correct the "
                "router's pp_size and tp_size"
            )
            found = msgspec.msgpack.encode(Reply(said, b""))
        return found

    def _try(self, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except Exception:
            # The engine's thread changes meanwhile what is read here. It is read again soon.
            logger.debug("The engine's headroom could not be read", exc_info=True)
            return None


def _bound(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets that listen. Raises OSError."""
    bound: list[socket.socket] = []
    missing: list[OSError] = []
    with contextlib.ExitStack() as stack:
        for address in addresses:
            try:
                bound.append(stack.enter_context(_listening(address, port)))
            except OSError as error:
                reason = f"the side channel cannot listen at {Endpoint(address, port)}: {error.strerror}"
                missing.append(OSError(error.errno, reason))
                if error.errno != errno.EADDRNOTAVAIL:
                    raise missing[-1] from error
        if not bound:
            raise missing[0]
        stack.pop_all()
    return bound


def _listening(address: str, port: int) -> socket.socket:
    (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, kind, protocol))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # So that :: receives IPv4 as well.
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(where)
        one.listen()
        one.setblocking(False)
        stack.pop_all()
    return one


def start(
    address: SideChannelAddress, answers: Answers, listen: Callable[[], Listener], asking: SideChannel
) -> Listener:
    """Start listening, with ``listen``, and check. ``asking`` is closed when the check has ended. Raises SettingsError:
    the address cannot be bound, or another engine answers at the advertised one."""
    try:
        listener = listen()
    except OSError as error:
        asking.close()
        raise _cannot_listen(address, error) from error
    logger.info("The side channel %s.", address)
    verdict: Future[SettingsError | None] = Future()

    # On a thread of its own: a name server or a firewall that does not answer takes seconds.
    def check() -> None:
        try:
            verdict.set_result(_checked(address, answers, asking))
        except BaseException as error:
            verdict.set_exception(error)
            raise
        finally:
            asking.close()

    threading.Thread(target=check, name="kvcached-nixl-address-check", daemon=True).start()
    if verdict in wait([verdict], WAIT_SECONDS).done and (refusal := verdict.result()) is not None:
        listener.close()
        raise refusal
    return listener


def _checked(address: SideChannelAddress, answers: Answers, asking: SideChannel) -> SettingsError | None:
    """Log what was found. Returns why the engine must not start, or None."""
    there = address.advertised
    try:
        leads_to = look_up(there.host)
    except (OSError, UnicodeError) as error:
        logger.warning("%s", address.unresolved(error).line)
        return None
    own = own_addresses()
    for doubt in address.doubts(leads_to, own):
        logger.warning("%s", doubt.line)
    if address.is_elsewhere(leads_to, own):
        logger.info(
            "The side channel's advertised address %s leads to %s, which is no address of this host. With NAT or a "
            "proxy that is as it should be, if port %d there is forwarded to port %d here.",
            *(there, ", ".join(leads_to), there.port, address.bound.port),
        )
    rank = min(answers)
    try:
        answer = asking.ask(there.host, there.port, rank[1], rank[0]).result()
    except (OSError, CancelledError) as error:
        _silent(address, leads_to, error)
        return None
    except ValueError as error:
        return _another(address, f"{_UNKNOWN}: {error}")
    if answer == answers[rank]:
        logger.info("The side channel answers at %s, as seen from this host.", there)
        return None
    return _another(address, _name_of(*answer))


def _silent(address: SideChannelAddress, leads_to: Sequence[str], error: BaseException) -> None:
    reason = "nobody listens there" if isinstance(error, ConnectionRefusedError) else str(error) or "no answer"
    doubt = SettingsError(
        found=f"no answer from {address.advertised} ({', '.join(leads_to)}), where the side channel is advertised: "
        f"{reason}",
        expected=f"this engine, which listens at {address.bound}",
        consequence="If the other servers get no answer either, hand-overs fail with the cause unreachable. Some "
        "networks only keep a host from reaching itself in this way.",
        remedy="Run `python -m kvcached_nixl doctor --peer "
        f"{address.advertised}` on the other hosts. Correct {HOST}, {ADVERTISE_HOST} or the network.",
    )
    logger.warning("%s", doubt.line)


def _another(address: SideChannelAddress, who: str) -> SettingsError:
    refusal = SettingsError(
        found=f"at {address.advertised} ({address.origin}), where this engine's side channel is advertised, {who}",
        expected=f"this engine, which listens at {address.bound}",
        consequence="Each hand-over with this engine would fail, since its peers would reach the other one.",
        remedy=f"Give each engine an address and a port of its own: {HOST} and {PORT}, and behind NAT {ADVERTISE_HOST} "
        f"and {ADVERTISE_PORT}.",
    )
    logger.error("%s", refusal.line)
    return refusal


def _name_of(compatibility: str, metadata: bytes) -> str:
    if not is_tagged(compatibility):
        return f"the side channel of an engine without this package answers ({compatibility!r:.80})"
    try:
        return f"engine {read_rank(read_answer(metadata).rank).engine_id} answers"
    except Malformed:
        return f"{_UNKNOWN}, although it is of this package"


def _cannot_listen(address: SideChannelAddress, error: OSError) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        return SettingsError(
            found=f"port {address.bound.port} of {address.bound.host} is taken by {_holder(address.bound.port)}",
            expected=f"a free port for the side channel: {PORT}, plus the index of the data-parallel rank",
            consequence="Peers would reach the other process. The engine does not start.",
            remedy=f"Give this engine another {PORT}, at least as far from its neighbours' as it has data-parallel "
            "ranks; or end the other process.",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingsError(
            found=f"{HOST}={address.bound.host} ({', '.join(address.listening)}), which is no address of this host: it "
            f"has {', '.join(sorted(own_addresses()))}",
            expected="an address of this host, or 0.0.0.0 or :: for all of them",
            consequence="The side channel cannot listen there. The engine does not start.",
            remedy=f"If peers reach this host at {address.bound.host} through NAT, set {HOST}=0.0.0.0 and "
            f"{ADVERTISE_HOST}={address.bound.host}. Otherwise correct {HOST}.",
        )
    return SettingsError(
        found=str(error),
        expected=f"an address and a port that this process may listen at: {HOST} and {PORT}",
        consequence="No peer could hand KV over. The engine does not start.",
        remedy=f"Correct {HOST} or {PORT}.",
    )


def _holder(port: int) -> str:
    # Comes with vLLM.
    import psutil

    try:
        sockets = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid]
        pid = min(sockets, key=lambda one: bool(one.status != psutil.CONN_LISTEN)).pid
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}) of {process.username()}"
    except (OSError, ValueError, psutil.Error):
        return f"a process that has ended, or that this one may not see (`ss -ltnp sport = :{port}` as root shows it)"
