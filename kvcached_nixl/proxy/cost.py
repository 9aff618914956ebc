# SPDX-License-Identifier: Apache-2.0
"""Whether decode should compute a prompt itself, by what it would cost the requests there. Once per process.

Handing over costs this request the wait for prefill, and then what the hand-over adds. Computing at decode costs this
request the computation, behind other prompts that decode computes, and each stream there a pause as long as the prompt
takes. All of it in seconds, from measured rates: sums that forget, so that long prompts count more than short ones.
"""

from __future__ import annotations

__all__ = ["Costs"]

FORGETTING = 0.98
"""What is left of a measurement when the next one comes: the last fifty or so count."""


class _Rate:
    """Seconds per token."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def measured(self, seconds: float, tokens: int) -> None:
        self._seconds = FORGETTING * self._seconds + seconds
        self._tokens = FORGETTING * self._tokens + tokens

    @property
    def seconds(self) -> float | None:
        """Of one token; None before the first measurement."""
        return self._seconds / self._tokens if self._tokens else None


class Costs:
    """See the module. Tokens are the router's estimates; only their proportions matter."""

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._decode = _Rate()
        self._added = _Rate()

    def prefilled(self, seconds: float, tokens_ahead: int) -> None:
        """Prefill has answered. ``tokens_ahead``: what it had to compute when it was asked, with this prompt."""
        self._prefill.measured(seconds, tokens_ahead)

    def handed_over(self, seconds: float) -> None:
        """A hand-over has added these seconds to prefill's, until the first token."""
        self._added.measured(max(0.0, seconds), 1)

    def computed_alone(self, seconds: float, tokens_ahead: int) -> None:
        """Decode has computed a prompt itself until its first token; ``tokens_ahead`` as for `prefilled`."""
        self._decode.measured(seconds, tokens_ahead)

    def of_handing_over(self, tokens_ahead: int) -> float | None:
        """Returns the seconds until the first token; None if no hand-over was measured yet."""
        rate = self._prefill.seconds
        return None if rate is None else tokens_ahead * rate + (self._added.seconds or 0.0)

    def of_computing_alone(self, tokens: int, tokens_ahead: int, streams: int) -> float:
        """Returns the seconds that this request waits, and those by which it delays others, in all.

        Args:
            tokens: of the prompt, without those that decode has in its prefix cache.
            tokens_ahead: of other prompts that decode computes now.
            streams: requests that decode works on.
        """
        rate = self._decode.seconds or self._prefill.seconds or 0.0
        return (tokens_ahead + tokens * (1 + streams)) * rate
