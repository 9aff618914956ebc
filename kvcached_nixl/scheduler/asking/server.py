# SPDX-License-Identifier: Apache-2.0
"""One prefill server that decode may ask, and what decode knows of it. Used on the engine's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.question import Outcome

FRESH_SECONDS = 5.0
"""How long it counts what a server has said of its queue."""


@dataclass(eq=False)
class Server:
    """One prefill server.

    Attributes:
        url: scheme, host and port, as the operator has named it.
        address: one of those of its name; "" if it is not known, or the URL has an address.
        engine: the only one behind it; None if that is not known.
        last_engine: that has answered last; it counts as the only one after ``num_doubts`` more of its answers.
        asked: what it is asked for and has not answered yet -> tokens, and when it was asked.
        num_failures, num_refused: prompts, in a row.
        num_outages: how often it could not be reached.
        failure: the reason for its rest; None if its KV was used since.
        rests_until_seconds: it is not asked before.
        refused_seconds: when it has refused a prompt last.
        served_seconds: when it was asked for the last KV that was used.
        last_sign_seconds: when its engine answered last, or when it was asked while it had nothing to answer.
        checked_seconds: when it was asked last whether it is well.
        busy_since_seconds: when it said first to be busy, and has answered nobody since; 0 if it did not.
        queued_tokens: tokens of all prompts in its queue, as it has said at ``queued_seconds``.
        has_others: another engine than this one has answered.
        has_clients: it may have clients of its own, as far as it has said.
        answers_look_ups: it has said in time how much of the last prompt it has cached. Else nobody waits for it.
    """

    url: str
    address: str = ""
    engine: RemotePrefill | None = None
    last_engine: RemotePrefill | None = None
    num_doubts: int = 0
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    num_failures: int = 0
    num_refused: int = 0
    num_outages: int = 0
    failure: Outcome | None = None
    rests_until_seconds: float = 0.0
    refused_seconds: float = 0.0
    served_seconds: float = 0.0
    last_sign_seconds: float = 0.0
    checked_seconds: float = 0.0
    busy_since_seconds: float = 0.0
    queued_tokens: int = 0
    queued_seconds: float = 0.0
    has_others: bool = False
    has_clients: bool = False
    answers_look_ups: bool = True

    def __str__(self) -> str:
        return f"{self.url} ({self.address})" if self.address else self.url

    @property
    def is_busy(self) -> bool:
        """Whether it rests because it was busy, so that it is worth waiting for."""
        return self.failure is not None and self.failure.is_busy

    @property
    def is_own(self) -> bool:
        """Whether this engine's own server was the last behind it, or still is."""
        return self.failure is not None and self.failure.is_own

    def num_tokens(self, now_seconds: float) -> int:
        """How many tokens of prompts it has to compute."""
        is_fresh = now_seconds < self.queued_seconds + FRESH_SECONDS
        return max(sum(num_tokens for num_tokens, _ in self.asked.values()), self.queued_tokens if is_fresh else 0)
