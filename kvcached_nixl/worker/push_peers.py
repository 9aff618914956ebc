# SPDX-License-Identifier: Apache-2.0
"""Decode's ranks as prefill's half of a push knows them: by their agents, and their memory after a handshake.

Whoever is not known, or to whom the connection is lost, is a stranger until a handshake with it is done; what it has to
be told waits until then. Owned by the writer thread.
"""

from __future__ import annotations

from collections import Counter

from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Message, Peer, encode

__all__ = ["Peers"]


class Peers:
    """See the module.

    Args:
        dropped: counts what is never sent.
    """

    def __init__(self, transport: Transport, dropped: Counter[str]) -> None:
        self._transport = transport
        self._dropped = dropped
        self._memory: dict[str, Planes] = {}
        self._strangers: dict[str, Peer] = {}
        self._unanswered: dict[str, list[Message]] = {}

    def __len__(self) -> int:
        """Answers that wait."""
        return sum(map(len, self._unanswered.values()))

    @property
    def strangers(self) -> dict[str, Peer]:
        """Agents that wait for a WRITE or an answer, and where to ask for what is not known of them."""
        return dict(self._strangers)

    def memory_of(self, agent: str) -> Planes | None:
        """Where it keeps its KV; None of a stranger."""
        return self._memory.get(agent)

    def heard(self, agent: str, address: Peer) -> None:
        """It has spoken, and wants to be written to."""
        if agent not in self._memory:
            self._strangers[agent] = address

    def answer(self, agent: str, address: Peer, message: Message) -> None:
        """Tell it now or, if it is not known or cannot be reached, when it is known again."""
        if agent in self._memory:
            if self._has_sent(agent, message):
                return
            # It may live; its attempts go on when it is known again.
            del self._memory[agent]
        self._strangers[agent] = address
        self._unanswered.setdefault(agent, []).append(message)

    def known(self, agent: str, planes: Planes) -> None:
        """The handshake with it is done, and the transport knows it."""
        self._memory[agent] = planes
        self._strangers.pop(agent, None)
        for message in self._unanswered.pop(agent, ()):
            # Decode asks again, or is gone.
            self._dropped["answer not sent"] += not self._has_sent(agent, message)

    def lost(self, agent: str) -> None:
        """The handshake failed, or it is gone: it is not answered."""
        self._memory.pop(agent, None)
        self._strangers.pop(agent, None)
        self._dropped["answer not sent"] += len(self._unanswered.pop(agent, ()))

    def _has_sent(self, agent: str, message: Message) -> bool:
        try:
            self._transport.send(agent, encode(message))
        except TransportError:
            return False
        return True
