# SPDX-License-Identifier: Apache-2.0
"""An engine's side channel: what it answers peers, how it starts, and whether peers reach it, as far as one can find
out from here.

Peers get the advertised address with each hand-over. Here it is looked up and asked for a handshake, as they will do
it: this engine should answer. Wrong bytes cannot come of a wrong address, since a peer compares the engine's id and
incarnation at each handshake; but all hand-overs would fail. So another engine there stops the start. That runs on a
thread of its own: a name server or a firewall that does not answer takes seconds.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Protocol

import msgspec

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.scheduler.engine_link import EngineLink
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.revocations import Revocations
from kvcached_nixl.scheduler.told_headroom import ToldHeadroom
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.side_channel_address import (
    ADVERTISE_HOST,
    ADVERTISE_PORT,
    HOST,
    PORT,
    SideChannelAddress,
    look_up,
    own_addresses,
)
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Answer, Weights, is_tagged, read_answer, read_rank
from kvcached_nixl.wire.headroom import encode_headroom

__all__ = [
    "Answers",
    "Asking",
    "Envelope",
    "HandshakeListener",
    "OwnSideChannel",
    "answers_of",
    "is_staged",
    "start",
    "weights_of",
]

Answers = Mapping[int, tuple[str, bytes]]
"""Rank -> (compatibility string, metadata)."""


class HandshakeListener(Protocol):
    """The listening side of a side channel."""

    def answer(self, answers: Answers) -> None:
        """Replaces the answers."""
        ...

    def close(self) -> None: ...


class Envelope(Protocol):
    """vLLM's own container for a worker's handshake metadata."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


def answers_of(metadata: Mapping[Any, Envelope], incarnation: str) -> Answers:
    """Rank -> (compatibility string, metadata), from what vLLM has collected from the workers.

    Args:
        metadata: by (pipeline stage, rank); there is one stage.
        incarnation: drawn when this engine started, or when its weights were changed.
    """
    return {
        rank: (
            one.compatibility_hash,
            msgspec.msgpack.encode(Answer(incarnation, one.agent_metadata_bytes)),
        )
        for (_, rank), one in metadata.items()
    }


def is_staged(metadata: Mapping[Any, Envelope]) -> bool:
    """Whether a rank of this engine stages KV; ``metadata`` as for `answers_of`."""
    return any(read_rank(one.agent_metadata_bytes).is_staged for one in metadata.values())


def weights_of(metadata: Mapping[Any, Envelope]) -> dict[Any, Weights]:
    """Identity of each rank's weights; ``metadata`` as for `answers_of`."""
    return {key: read_rank(one.agent_metadata_bytes).weights for key, one in metadata.items()}


class OwnSideChannel:
    """An engine's own side channel: what it answers peers, and what its thread asks of the engine. One per engine.

    Threads: the side channel's thread calls `woken`, `headroom` and `watch_memory`; the engine's thread calls the
    others.
    """

    def __init__(
        self, link: EngineLink, offering: PrefillOffers, revocations: Revocations, headroom: ToldHeadroom
    ) -> None:
        self._link = link
        self._offering = offering
        self._revocations = revocations
        self._headroom = headroom
        self._listener: HandshakeListener | None = None

    def introduce(self, metadata: Mapping[Any, Envelope], listen: Callable[[Answers], HandshakeListener]) -> None:
        """Sets the handshakes of this engine's ranks. Called when the workers have registered their memory, and again
        when their weights may have changed. Peers are answered with them until `close`."""
        self._offering.is_read_early |= is_staged(metadata)
        self._revocations.identified(weights_of(metadata))
        answers = answers_of(metadata, self._link.incarnation)
        if self._listener is None:
            self._listener = listen(answers)
        else:
            self._listener.answer(answers)

    def hide(self) -> None:
        """Answers peers that this engine has no rank, until `introduce` is called again."""
        self._revocations.weights_changed()
        if self._listener is not None:
            self._listener.answer({})

    def close(self) -> None:
        """Stops listening; called when the engine shuts down."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def headroom(self) -> bytes:
        """Returns this engine's `Headroom`, encoded; empty before its first step."""
        self.watch_memory()
        if self._revocations.is_doubted:
            # An idle engine looks at its weights before its next step: now, since somebody asks.
            self._link.woken()
        blocks = self._link.blocks
        return b"" if blocks is None else encode_headroom(self._headroom.of(blocks))

    def watch_memory(self) -> None:
        """Counts what kvcached has mapped and unmapped since the last call."""
        if self._link.blocks is not None:
            self._headroom.watch(self._link.blocks)

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self._link.woken()


logger = logging.getLogger(SERVER_LOGGER)

WAIT_SECONDS = 2.0
"""How long a start waits for the check. What it finds later is logged."""

_UNKNOWN = "what answers cannot be read"


class Asking(Protocol):
    """Asks side channels for handshakes. Each future ends within a few seconds."""

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]: ...
    def close(self) -> None: ...


def start(
    address: SideChannelAddress, answers: Answers, listen: Callable[[], HandshakeListener], asking: Asking
) -> HandshakeListener:
    """Start listening, and check.

    Args:
        listen: starts the listener; raises `OSError` if it cannot.
        asking: is closed when the check has ended.

    Raises:
        SettingsError: the address cannot be bound, or another engine answers at the advertised one.
    """
    try:
        listener = listen()
    except OSError as error:
        asking.close()
        raise _cannot_listen(address, error) from error
    logger.info("The side channel %s.", address)
    verdict: Future[SettingsError | None] = Future()
    arguments = (address, answers, asking, verdict)
    threading.Thread(target=_check, args=arguments, name="kvcached-nixl-address-check", daemon=True).start()
    if verdict in wait([verdict], WAIT_SECONDS).done:
        refusal_or_none = verdict.result()
        if refusal_or_none is not None:
            listener.close()
            raise refusal_or_none
    return listener


def _check(
    address: SideChannelAddress, answers: Answers, asking: Asking, verdict: Future[SettingsError | None]
) -> None:
    try:
        verdict.set_result(_checked(address, answers, asking))
    except BaseException as error:
        verdict.set_exception(error)
        raise
    finally:
        asking.close()


def _checked(address: SideChannelAddress, answers: Answers, asking: Asking) -> SettingsError | None:
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
            there,
            ", ".join(leads_to),
            there.port,
            address.bound.port,
        )
    rank = min(answers)
    try:
        answer = asking.ask(there.host, there.port, rank).result()
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
    """Who gives this answer, as text."""
    if not is_tagged(compatibility):
        return f"the side channel of an engine without this package answers ({compatibility!r:.80})"
    try:
        rank = read_rank(read_answer(metadata).rank)
    except Malformed:
        return f"{_UNKNOWN}, although it is of this package"
    return f"engine {rank.engine_id} answers"


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
    """The process that has a TCP port."""
    # Comes with vLLM.
    import psutil

    try:
        sockets = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid]
        pid = min(sockets, key=lambda one: bool(one.status != psutil.CONN_LISTEN)).pid
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}) of {process.username()}"
    except (OSError, ValueError, psutil.Error):
        return f"a process that has ended, or that this one may not see (`ss -ltnp sport = :{port}` as root shows it)"
