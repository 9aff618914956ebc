# SPDX-License-Identifier: Apache-2.0
"""Push: which prompts prefill computes before decode has blocks for them. One per engine, on its thread.

A router that asks both sides at once has decode register before prefill begins. Where decode has no room, it registers
late or never, and prefill would fill its own memory with KV that nobody takes. So while prefill keeps that much
(`Terms.most_unclaimed_tokens`), it begins only prompts that a rank of decode has registered for. The others wait in
vLLM's queue, which asks again in every step, without blocks. Workers report when decode has registered, and at once
where decode registers only after prefill's answer. They are asked again from time to time, and report those that decode
does not want any more, too: see `OfferRegistry.await_claim`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.step import AwaitClaim, Step, report_numbers

__all__ = ["StartGate"]


class StartGate:
    """See the module.

    Args:
        ask_again_seconds: how long a prompt waits before workers are asked again.
    """

    def __init__(self, clock: Clock, ask_again_seconds: float) -> None:
        self._clock = clock
        self._ask_again_seconds = ask_again_seconds
        self._numbers = report_numbers()
        self._held = Deadlines[PrefillRequestId]()
        # Those that may begin, until they do, or end.
        self._claimed: set[PrefillRequestId] = set()
        self._of_number: dict[int, PrefillRequestId] = {}

    @property
    def due_at_seconds(self) -> float | None:
        """When workers are to be asked again; None if no prompt waits."""
        return self._held.first_seconds

    def holds(self, request_id: str) -> bool:
        """Whether a request waits here, so that it would not begin whatever blocks are free."""
        return request_id in self._held

    def may_start(self, request_id: PrefillRequestId, step: Step, *, needs_claim: bool) -> bool:
        """Whether a prompt may begin now. If not, workers are asked to report when decode has registered for it.

        Args:
            needs_claim: it may begin only if a rank of decode has registered for it.
        """
        if not needs_claim or request_id in self._claimed:
            self._held.pop(request_id, None)
            return True
        if request_id not in self._held:
            number = next(self._numbers)
            self._of_number[number] = request_id
            self._held[request_id] = self._clock.now_seconds() + self._ask_again_seconds
            step.tell(AwaitClaim(request_id, number))
        return False

    def claimed(self, numbers: Iterable[int]) -> None:
        """Workers have reported these numbers of `AwaitClaim`."""
        for number in numbers:
            request_id = self._of_number.pop(number, None)
            if request_id is not None and self._held.pop(request_id, None) is not None:
                self._claimed.add(request_id)

    def turn(self, begun: Iterable[str], step: Step) -> None:
        """A step was built, which computes the requests ``begun``."""
        self.gone(begun)
        now = self._clock.now_seconds()
        asked = self._held.take_due(now)
        self._held.move(dict.fromkeys(asked, now + self._ask_again_seconds))
        if asked:
            step.tell(*(AwaitClaim(one, number) for number, one in self._of_number.items() if one in asked))

    def gone(self, request_ids: Iterable[str]) -> None:
        """These have begun, or ended."""
        if not (self._held or self._claimed or self._of_number):
            return
        gone = set(map(PrefillRequestId, request_ids))
        for request_id in gone:
            self._held.pop(request_id, None)
        self._claimed -= gone
        self._of_number = {number: one for number, one in self._of_number.items() if one not in gone}
