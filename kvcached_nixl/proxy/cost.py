# SPDX-License-Identifier: Apache-2.0
"""Whether decode should compute a prompt itself, by what it would cost the requests there. Once per process.

Handing over costs this request the wait for prefill, and then what the hand-over adds. Computing at decode costs this
request the computation, behind other prompts that decode computes, and each stream there a pause as long as the prompt
takes. All of it in seconds, by the latest measurements. What has not been measured for a while is tried once, so that a
decision that was wrong, or is outdated, does not stand for ever.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Costs"]

KEPT = 24
"""Measurements of each kind."""
TRIED_AGAIN_SECONDS = 10.0


class _Line:
    """Seconds for a number of tokens, as a constant and a rate: medians (Theil and Sen), so that outliers count little.

    Attributes:
        at_seconds: of the last measurement.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._is_new = False
        self._constant = self._rate = 0.0
        self.at_seconds = 0.0

    def measured(self, tokens: int, seconds: float, now_seconds: float) -> None:
        self._samples.append((tokens, seconds))
        self._is_new = True
        self.at_seconds = now_seconds

    @property
    def is_known(self) -> bool:
        return bool(self._samples)

    @property
    def rate(self) -> float:
        """Seconds per token."""
        self._fit()
        return self._rate

    def of(self, tokens: int) -> float:
        self._fit()
        return self._constant + tokens * self._rate

    def _fit(self) -> None:
        if not self._is_new:
            return
        self._is_new = False
        some = list(self._samples)
        slopes = [
            (seconds - other) / (tokens - others)
            for place, (tokens, seconds) in enumerate(some)
            for others, other in some[:place]
            if tokens != others
        ]
        through_zero = statistics.median(seconds / tokens for tokens, seconds in some)
        # Of prompts of nearly one length the slope says nothing.
        self._rate = max(0.0, statistics.median(slopes)) if len(slopes) > KEPT else through_zero
        self._constant = max(0.0, statistics.median(seconds - tokens * self._rate for tokens, seconds in some))


class Costs:
    """See the module. Tokens are the router's estimates, at least 1; only their proportions matter.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill = _Line()
        self._decode = _Line()
        self._added: deque[float] = deque(maxlen=KEPT)

    def prefilled(self, seconds: float, tokens_ahead: int) -> None:
        """Prefill has answered. ``tokens_ahead``: what it had to compute when it was asked, with this prompt."""
        self._prefill.measured(tokens_ahead, seconds, self._clock())

    def handed_over(self, seconds: float) -> None:
        """A hand-over has added these seconds to prefill's, until the first token."""
        self._added.append(seconds)

    def computed_alone(self, seconds: float, tokens_ahead: int) -> None:
        """Decode has computed a prompt itself until its first token; ``tokens_ahead`` as for `prefilled`."""
        self._decode.measured(tokens_ahead, seconds, self._clock())

    def of_handing_over(self, tokens_ahead: int) -> float:
        """Returns the seconds until the first token."""
        return self._prefill.of(tokens_ahead) + (statistics.median(self._added) if self._added else 0.0)

    def of_computing_alone(self, tokens: int, tokens_ahead: int, streams: int) -> float:
        """Returns the seconds that this request waits, and those by which it delays others, in all.

        Before decode was measured it counts as fast as prefill.

        Args:
            tokens: of the prompt, without those that decode has in its prefix cache.
            tokens_ahead: of other prompts that decode computes now.
            streams: requests that decode works on.
        """
        line = self._decode if self._decode.is_known else self._prefill
        return line.of(tokens_ahead + tokens) + streams * tokens * line.rate

    def is_alone_better(self, alone_seconds: float, tokens_ahead: int) -> bool:
        """Whether decode should compute a prompt.

        Args:
            alone_seconds: from `of_computing_alone`.
            tokens_ahead: what prefill would have to compute, with this prompt.
        """
        if not self._prefill.is_known:
            return False
        is_better = alone_seconds < self.of_handing_over(tokens_ahead)
        other, now_seconds = self._prefill if is_better else self._decode, self._clock()
        if other.is_known and now_seconds - other.at_seconds > TRIED_AGAIN_SECONDS:
            # Once: until it has been measured, others follow the estimate.
            other.at_seconds = now_seconds
            return not is_better
        return is_better
