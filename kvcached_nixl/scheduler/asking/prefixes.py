# SPDX-License-Identifier: Apache-2.0
"""Which server has how much of a prompt cached. Before a prompt is asked for, a few servers that could compute it say
how many of its tokens they have: a conversation that lands here for the first time is in the cache of another decode
server, or of a prefill server that others have asked. If one has so much that the rest may be computed here, it offers
what it has at once, without a step of its own.

Used on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.local import BreakEven
from kvcached_nixl.scheduler.asking.servers import Server, Servers
from kvcached_nixl.scheduler.asking.wanted import Stage, Wanted
from kvcached_nixl.wire.params import HAS_CLIENTS_KEY, cached_tokens_in, offered_tokens_in
from kvcached_nixl.wire.question import queued_tokens_in

__all__ = ["Prefixes"]

LEAST_TOKENS = 128
"""Of less, so little is saved that nobody is asked first."""
MOST_ASKED = 4
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 1.0
"""How long their answers are waited for: half as long as the KV itself is likely to take."""


class Prefixes:
    """See the module.

    Args:
        own_engine_id: of this engine. A name may stand for its own server, too.
    """

    def __init__(self, servers: Servers, asker: Asker, own_engine_id: str) -> None:
        self._servers = servers
        self._asker = asker
        self._own_engine_id = own_engine_id
        # By request: who has not answered yet.
        self._open: dict[str, tuple[Wanted, set[Server]]] = {}
        self._unneeded: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        """Requests whose servers have not all answered."""
        return len(self._open)

    def begin(self, wanted: Wanted, num_missing: int, break_even: BreakEven) -> bool:
        """Asks who has the prefix of a request, once. Returns whether an answer is waited for.

        Args:
            num_missing: tokens that are not cached here.
        """
        if wanted.is_looked_up or num_missing < LEAST_TOKENS or wanted.question.prompt is not None:
            return False
        wanted.is_looked_up = True
        num_tokens, rest_tokens = wanted.request.num_prompt_tokens, min(break_even.longest_tokens, num_missing - 1)
        asked = self._servers.that_may_have(wanted.tried, wanted.hashes, num_tokens, MOST_ASKED, rest_tokens)
        likely_seconds = break_even.asked_seconds(num_missing)
        seconds = LONGEST_SECONDS if likely_seconds is None else likely_seconds / 2
        seconds = min(max(SHORTEST_SECONDS, seconds), LONGEST_SECONDS)
        for one in asked:
            wished = (num_tokens - rest_tokens, seconds) if one.answers_look_ups else (0, LONGEST_SECONDS)
            self._asker.look_up(one, wanted.question, *wished)
        waited_for = {one for one in asked if one.answers_look_ups}
        if waited_for:
            wanted.stage = Stage.LOOKING
            self._open[wanted.request.request_id] = wanted, waited_for
        return bool(waited_for)

    def take(self) -> list[Wanted]:
        """Returns requests whose servers have all answered, or are not waited for any longer."""
        ended: list[Wanted] = []
        for request_id, server, params in self._asker.take_looked_up():
            server.answers_look_ups = params is not None
            wanted, open_ = self._open.get(request_id, (None, set()))
            if params is not None:
                server.is_own = params.get("remote_engine_id") == self._own_engine_id
                server.has_clients = params.get(HAS_CLIENTS_KEY) is True
                self._servers.has_queued(server, queued_tokens_in(params))
                num_offered = 0 if server.is_own else offered_tokens_in(params)
                if wanted is not None:
                    num_cached = num_offered or cached_tokens_in(params)
                    wanted.cached[server] = min(num_cached, wanted.request.num_prompt_tokens)
                if num_offered and wanted is not None:
                    wanted.offers[server] = params
                elif num_offered:
                    self._unneeded.append(params)
            open_.discard(server)
            if wanted is not None and not open_:
                del self._open[request_id]
                ended.append(wanted)
        return ended

    def settled(self, wanted: Wanted) -> None:
        """What servers have offered of a request's prompt, and is not fetched, is not needed."""
        self._open.pop(wanted.request.request_id, None)
        self._unneeded += wanted.offers.values()
        wanted.offers.clear()

    def take_unneeded(self) -> list[Mapping[str, Any]]:
        """Returns offers, since the last call, that nobody fetches."""
        found, self._unneeded = self._unneeded, []
        return found
