# SPDX-License-Identifier: Apache-2.0
"""Prompts that decode computes because no prefill server gives their KV. Used on the engine's thread only.

Few begin at a time, so that running streams keep their pace: together they have at most as many tokens as a step
computes of one of them while others run; one prompt may have more.
"""

from __future__ import annotations

from collections import OrderedDict

from kvcached_nixl.scheduler.engine import BlockPool, Request

__all__ = ["LocalPrefills"]


class LocalPrefills:
    """See the module.

    Args:
        most_tokens: of such prompts that a step computes while other requests run.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        # Requests that may begin -> tokens of their prompts.
        self._begun: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any prompt is computed or waits."""
        return bool(self._begun or self._waiting)

    def add(self, request: Request) -> None:
        """A held request is to be computed here, or to fail."""
        self._waiting[request.request_id] = request

    def computed(self, request_id: str, num_computed_tokens: int) -> None:
        """A step computes a request up to this token."""
        if num_computed_tokens >= self._begun.get(request_id, num_computed_tokens + 1):
            del self._begun[request_id]

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self._begun.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def turn(self, blocks: BlockPool) -> bool:
        """Lets the next ones begin. Called before each step. Returns whether there are any."""
        num_begun = len(self._begun)
        while self._waiting:
            request_id, request = next(iter(self._waiting.items()))
            if self._begun and sum(self._begun.values()) + request.num_prompt_tokens > self._most_tokens:
                break
            del self._waiting[request_id]
            self._begun[request_id] = request.num_prompt_tokens
            blocks.release(request_id, None)
        blocks.limit_chunks(self._most_tokens if self._begun else 0)
        return len(self._begun) > num_begun
