# SPDX-License-Identifier: Apache-2.0
"""A decode engine of a flow that asks prefill engines, for tests that are written step by step."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.handshake import Tensors, Weights
from support.flow_asker import Asked
from support.flow_engine import Request, Status
from support.flow_pair import PROMPT, Pair, kind

PULL, PUSH, AFTER = "pull", "push", "push after the answer"
DIRECTIONS = pytest.mark.parametrize("mode", [PULL, PUSH, pytest.param(AFTER, marks=pytest.mark.long)])
POLICIES = pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
OTHER = Weights(Tensors("1" * 32, "8" * 32), files="9" * 32)


class Asks(Pair):
    """Decode ``d`` asks prefill ``p``, and others if they are named. The test delivers the answers.

    Attributes:
        is_at_once: a request goes on when it is asked for, if prefill has no other. Not with ``AFTER``, where engines
            seem to be of several.
    """

    def __init__(self, mode: str, *others: str, **decode: Any) -> None:
        self.is_at_once = mode == PUSH
        names = [f"{one}_dp0" if mode == AFTER else one for one in ("p", *others)]
        direction = TransferMode.PULL if mode == PULL else TransferMode.PUSH
        super().__init__(direction, None, kind(asks=tuple(names), **decode), prefill_name=names[0])
        others = tuple(names[1:])
        self.others = [self.cluster.engine(one) for one in others]
        # All ranks have done their handshakes then.
        first = self.arrives((49, 48, 47, 46, 45))
        self.settle()
        assert is_fetched(first)
        self.cluster.answers_at_once = False

    @property
    def asked(self) -> list[Asked]:
        return self.cluster.asked

    def arrives(self, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Request:
        found = self.ask_decode(None, prompt, **more)
        self.decode.handover.ask()
        return found

    def of(self, request: Request) -> Asked:
        """The question for a request."""
        return next(
            one for one in self.asked if one.request is not None and request.request_id in one.request.request_id
        )

    def compute(self) -> None:
        """Prefill computes everything that has been asked. No message, no transfer moves."""
        for _ in range(30):
            for engine in (self.prefill, *self.others):
                engine.step()

    def answers(self) -> None:
        """Everything that has been asked is computed and answered; decode has looked at the answers."""
        self.compute()
        for one in list(self.asked):
            one.deliver()
        self.decode.handover.ask()

    def serve(self) -> None:
        """All requests go on to their ends."""
        self.cluster.answers_at_once = True
        self.settle()


def is_fetched(found: Request) -> bool:
    return found.status is Status.STOPPED and found.num_external > 0
