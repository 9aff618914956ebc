# SPDX-License-Identifier: Apache-2.0
"""Parts of the package's objects that have no public name, for tests that look inside.

Each private name is read in one place here, so that a rename in the package changes one line. `leftovers` and
`forbid_scans` name no attribute at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, MutableMapping
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
    from kvcached_nixl.worker.prefill.writer import Writer
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


def context_of(thread: TransferThread) -> WorkerContext:
    return thread._context


def receiver_of(thread: TransferThread) -> Receiver:
    return thread._receiver


def registry_of(thread: TransferThread) -> OfferRegistry:
    return thread._registry


def report_of(thread: TransferThread) -> Report:
    """Returns what has ended, and was not taken yet."""
    return thread._outcomes._report


def renewals_of(thread: TransferThread) -> Renewals:
    return thread._receiver.renewals


def attempts_of(receiver: Receiver) -> dict[int, Attempt]:
    """Returns the attempts that are not finished, by number."""
    return receiver._attempts


def writers_of(receiver: Receiver) -> ActiveWriters:
    return receiver._writers


def matcher_of(registry: OfferRegistry) -> OfferMatcher:
    return registry._matcher


def offers_of(registry: OfferRegistry) -> dict[PrefillRequestId, Offer]:
    """Returns the offers that are not finished, by request."""
    return matcher_of(registry).offers


def leases_of(registry: OfferRegistry) -> Leases:
    return registry._leases


def writer_of(registry: OfferRegistry) -> Writer:
    return registry.writer


def parked_of(registry: OfferRegistry) -> dict[Offer, Held]:
    """Returns the slots of each offer that is parked, where prefill stages."""
    return {offer: offer.parked for offer in offers_of(registry).values() if offer.parked is not None}


def unfinished_handshakes(peers: Peers) -> list[object]:
    """Returns each address whose handshake is under way or waited for, and each handshake that was not handled yet."""
    return [*(link.address for link in peers._links.values() if link.waiting or link.is_asked), *peers._ended]


def agents_of(peers: Peers) -> list[str]:
    """Returns the agents that are connected, or were."""
    return [link.last_agent for link in peers._links.values() if link.last_agent is not None]


def free_buffers_of(buffers: TokenBuffers) -> list[int]:
    return buffers._free


def tokens_of(table: TokenTable) -> MutableMapping[Hashable, int]:
    """Returns the ownership token of each owner."""
    return table._token_of


def gates_of(connections: GateConnections) -> dict[str, str]:
    """Returns the agent of each gate that a rank of prefill knows."""
    return connections._agent_of


def num_open(gates: WriteGates) -> int:
    """Returns the number of gates that are not closed."""
    return (gates._present is not None) + len(gates._retired)


def links_of(peers: Peers) -> Collection[Peer]:
    """Returns the addresses that are connected, or whose handshake is under way."""
    return peers._links


def bytes_in_flight(queue: TransferQueue) -> int:
    """Returns the bytes that are in flight, except those of transfers whose job was dropped."""
    return queue._all_bytes


def num_dropped(queue: TransferQueue) -> int:
    """Returns the number of transfers in flight whose job was dropped."""
    return len(queue._dropped)


# ------------------------------------------------------------------------------------------- of an engine's scheduler


def holds_of(handover: SchedulerFacade) -> dict[int, list[Any]]:
    """Returns the blocks of each hold, by its number."""
    return handover.engine.holds._held


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
