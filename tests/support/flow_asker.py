# SPDX-License-Identifier: Apache-2.0
"""Asks engines of a cluster for KV, in place of HTTP. An answer comes when the test delivers it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.wire.question import AskFailed, Outcome, Question, read_answer

if TYPE_CHECKING:
    from support.flow_engine import Engine, Request

LOST = Outcome("the connection was closed", is_of_server=True)


def url_of(name: str) -> str:
    """Of the API server of an engine: an address, so that nothing is looked up."""
    return f"http://127.0.0.1:{1024 + zlib.crc32(name.encode()) % 60000}"


@dataclass(eq=False)
class Asked:
    """A question that has no answer yet. ``request`` is prefill's; None where nobody has heard the question."""

    asker: FlowAsker
    number: int
    server: Engine | None
    request: Request | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the server has answered, or is known to be dead."""
        cluster = self.asker.engine.cluster
        ends = self.request is None or self.request.status.is_finished or self.server not in cluster.alive
        return ends and self.server not in cluster.frozen

    def deliver(self) -> None:
        """Delivers the server's answer, or the failure if it gives none."""
        if self.request is None or not self.request.status.is_finished:
            self.ends(LOST)
        else:
            self.say(self.request.answer)

    def say(self, params: Any) -> None:
        """Delivers an answer with these parameters."""
        try:
            self.ends(read_answer(200, {}, msgspec.json.encode({"kv_transfer_params": params})))
        except AskFailed as error:
            self.ends(error.outcome)

    def ends(self, found: dict[str, Any] | Outcome) -> None:
        self.asker.engine.cluster.asked.remove(self)
        self.asker.answers.append((self.number, found))

    def hang_up(self) -> None:
        """The connection ends, and with it the request."""
        cluster = self.asker.engine.cluster
        cluster.asked.remove(self)
        if self.request is not None and self.server in cluster.running:
            self.server.abort(self.request)


class FlowAsker(Asker):
    """See the module."""

    def __init__(self, engine: Engine, api_key: str, woken: Callable[[], None]) -> None:
        super().__init__(api_key, woken)
        self.engine = engine

    def ask(self, number: int, server: Server, question: Question) -> None:
        cluster = self.engine.cluster
        alive = (one for one in cluster.alive if url_of(one.own.engine_id) == server.url)
        asked = Asked(self, number, next(alive, None))
        cluster.asked.append(asked)
        if asked.server in cluster.running:
            asked.request = asked.server.take(msgspec.json.decode(question.body()), question.trace_headers)

    def cancel(self, number: int) -> None:
        for one in [one for one in self.engine.cluster.asked if one.asker is self and one.number == number]:
            # An answer that is on its way is taken all the same.
            one.deliver() if one.is_ready else one.hang_up()

    def look_up(self, server: Server, question: Question, least_tokens: int, most_seconds: float) -> None:
        running = self.engine.cluster.running
        found = next((one for one in running if url_of(one.own.engine_id) == server.url), None)

        def told(params: Mapping[str, Any] | None) -> None:
            said = None if params is None else msgspec.json.decode(msgspec.json.encode(params))
            self.cached.append((question.request_id, server, said))

        if found is None:
            told(None)
        else:
            found.look_up(question, least_tokens, told)

    def check(self, server: Server) -> None:
        running = self.engine.cluster.running
        self.checked.append((server, any(url_of(one.own.engine_id) == server.url for one in running)))
