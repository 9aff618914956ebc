# SPDX-License-Identifier: Apache-2.0
"""Starts an engine's side channel, and finds out whether peers reach it, as far as that can be seen from here.

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

from kvcached_nixl.errors import SettingsError
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
from kvcached_nixl.transport.side_channel import Listener, SideChannel
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import is_tagged, read_answer, read_rank

__all__ = ["start"]

Answers = Mapping[int, tuple[str, bytes]]
"""Rank -> (compatibility string, metadata)."""

logger = logging.getLogger(SERVER_LOGGER)

WAIT_SECONDS = 2.0
"""How long a start waits for the check. What it finds later is logged."""

_UNKNOWN = "what answers cannot be read"


def start(
    address: SideChannelAddress, answers: Answers, listen: Callable[[], Listener], asking: SideChannel
) -> Listener:
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
    address: SideChannelAddress, answers: Answers, asking: SideChannel, verdict: Future[SettingsError | None]
) -> None:
    try:
        verdict.set_result(_checked(address, answers, asking))
    except BaseException as error:
        verdict.set_exception(error)
        raise
    finally:
        asking.close()


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
