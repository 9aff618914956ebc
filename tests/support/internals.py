# SPDX-License-Identifier: Apache-2.0
"""Parts of the package's objects that have no public name, for tests that look inside.

Each private name is read in one place here, so that a rename in the package changes one line. `leftovers` and
`forbid_scans` name no attribute at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, MutableMapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcached_nixl.deadlines import Deadlines

if TYPE_CHECKING:
    from kvcached_nixl.ids import PrefillRequestId
    from kvcached_nixl.scheduler.facade import SchedulerFacade
    from kvcached_nixl.wire.messages import Peer
    from kvcached_nixl.wire.step import Report
    from kvcached_nixl.worker.decode.attempt import Attempt
    from kvcached_nixl.worker.decode.fencing import ActiveWriters, WriteGates
    from kvcached_nixl.worker.decode.receiver import Receiver, Renewals
    from kvcached_nixl.worker.prefill.offers import Offer, OfferMatcher
    from kvcached_nixl.worker.prefill.registry import Leases, OfferRegistry
    from kvcached_nixl.worker.transfer.context import GateConnections, WorkerContext
    from kvcached_nixl.worker.transfer.ownership_tokens import TokenBuffers, TokenTable
    from kvcached_nixl.worker.transfer.peers import Peers
    from kvcached_nixl.worker.transfer.staging import Held
    from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue
    from kvcached_nixl.worker.transfer_thread import TransferThread

CONTAINERS = (dict, list, set, deque, Deadlines)


# ---------------------------------------------------------------------------------------------------- of any object


def leftovers(*things: object, but: tuple[str, ...] = ()) -> list[str]:
    """Returns a line for each container of these objects that is not empty, except attributes named in ``but``.

    ``dropped`` and ``counts`` are never reported: they count for ever. A `RecentSet` is not a container: it is bounded.
    """
    return [
        f"{type(thing).__name__}.{name}: {value!r:.300}"
        for thing in things
        for name, value in vars(thing).items()
        if isinstance(value, CONTAINERS) and value and name not in (*but, "dropped", "counts")
    ]


class Unscanned(dict[Any, Any]):
    """A dict that fails the test when it is iterated. ``num_read``: how often `get` was called."""

    num_read = 0

    def __iter__(self) -> Any:
        raise AssertionError("all entries were visited, not only those that are due")

    values = items = keys = __iter__

    def get(self, *arguments: Any) -> Any:
        self.num_read += 1
        return super().get(*arguments)


def forbid_scans(*things: object, above: int = 100) -> list[Unscanned]:
    """Makes every dict of these objects with more than ``above`` entries fail the test when it is iterated.

    Returns: those dicts.
    """
    found = [
        (thing, name, value)
        for thing in things
        for name, value in vars(thing).items()
        if type(value) is dict and len(value) > above
    ]
    assert found, "there is no large dict"
    for thing, name, value in found:
        setattr(thing, name, Unscanned(value))
    return [vars(thing)[name] for thing, name, _ in found]


# ------------------------------------------------------------------------------------------------------- of a worker


context_of: Callable[[TransferThread], WorkerContext] = attrgetter("_context")
receiver_of: Callable[[TransferThread], Receiver] = attrgetter("_receiver")
registry_of: Callable[[TransferThread], OfferRegistry] = attrgetter("_registry")
report_of: Callable[[TransferThread], Report] = attrgetter("_outcomes._report")
"""What has ended, and was not taken yet."""
renewals_of: Callable[[TransferThread], Renewals] = attrgetter("_receiver.renewals")
attempts_of: Callable[[Receiver], dict[int, Attempt]] = attrgetter("_attempts")
"""The attempts that are not finished, by number."""
writers_of: Callable[[Receiver], ActiveWriters] = attrgetter("_writers")
matcher_of: Callable[[OfferRegistry], OfferMatcher] = attrgetter("_matcher")
offers_of: Callable[[OfferRegistry], dict[PrefillRequestId, Offer]] = attrgetter("_matcher.offers")
"""The offers that are not finished, by request."""
leases_of: Callable[[OfferRegistry], Leases] = attrgetter("_leases")
free_buffers_of: Callable[[TokenBuffers], list[int]] = attrgetter("_free")
tokens_of: Callable[[TokenTable], MutableMapping[Hashable, int]] = attrgetter("_token_of")
"""The ownership token of each owner."""
gates_of: Callable[[GateConnections], dict[str, str]] = attrgetter("_agent_of")
"""The agent of each gate that a rank of prefill knows."""
links_of: Callable[[Peers], Collection[Peer]] = attrgetter("_links")
"""The addresses that are connected, or whose handshake is under way."""
bytes_in_flight: Callable[[TransferQueue], int] = attrgetter("_all_bytes")
"""Except those of transfers whose job was dropped."""


def parked_of(registry: OfferRegistry) -> dict[Offer, Held]:
    """Returns the slots of each offer that is parked, where prefill stages."""
    return {offer: offer.parked for offer in offers_of(registry).values() if offer.parked is not None}


def unfinished_handshakes(peers: Peers) -> list[object]:
    """Returns each address whose handshake is under way or waited for, and each handshake that was not handled yet."""
    return [*(link.address for link in peers._links.values() if link.waiting or link.is_asked), *peers._ended]


def agents_of(peers: Peers) -> list[str]:
    """Returns the agents that are connected, or were."""
    return [link.last_agent for link in peers._links.values() if link.last_agent is not None]


def stray_connections(context: WorkerContext, connections: Collection[str]) -> set[str]:
    """Returns those of NIXL's connections that lead to no connected rank, nor to a gate of one that is remembered."""
    connected = {link.known.agent for link in context.peers._links.values() if link.known is not None}
    remembered = agents_of(context.peers)
    return {one for one in connections if one not in connected} - {
        gate for gate, agent in gates_of(context.gate_connections).items() if agent in remembered
    }


def num_open(gates: WriteGates) -> int:
    """Returns the number of gates that are not closed."""
    return (gates._present is not None) + len(gates._retired)


def num_dropped(queue: TransferQueue) -> int:
    """Returns the number of transfers in flight whose job was dropped."""
    return len(queue._dropped)


# ------------------------------------------------------------------------------------------- of an engine's scheduler


holds_of: Callable[[SchedulerFacade], dict[int, list[Any]]] = attrgetter("engine.holds._held")
"""The blocks of each hold, by its number."""


def asking_of(handover: SchedulerFacade) -> list[object]:
    """Returns the parts of asking that keep anything."""
    asking = handover.asking
    return [
        asking,
        asking.local,
        asking.local.break_even,
        asking.window,
        asking.questions,
        asking.servers,
        *asking.servers.all,
    ]
