# SPDX-License-Identifier: Apache-2.0
"""Splits a stream of server-sent events at the ends of events, and sees whether it is complete. Once per stream."""

from __future__ import annotations

from kvcached_nixl.proxy.api import Api

__all__ = ["GIVEN_UP", "MOST_EVENT_BYTES", "Events"]

GIVEN_UP = ("abort", "error", "failed", "cancelled")
"""Reasons for an end that vLLM gives to an answer that is incomplete."""
MOST_EVENT_BYTES = 16 << 20


class Events:
    """See the module.

    Attributes:
        is_complete: the last event was that with which a stream ends.
        has_error: an event was an error of the server.
        reasons: how often an event said why a choice, or the answer, has ended.
        is_given_up: such a reason was one of `GIVEN_UP`.
        count: number of events so far that show that the request is computed.
    """

    def __init__(self, api: Api, choices: int = 1) -> None:
        self._api = api
        self._choices = choices
        self._rest = b""
        self.is_complete = False
        self.has_error = False
        self.reasons = 0
        self.is_given_up = False
        self.count = 0

    @property
    def rest_bytes(self) -> int:
        """Size of the event that is not complete yet."""
        return len(self._rest)

    @property
    def is_whole(self) -> bool:
        """Whether the response says of each choice why it ended, and no reason is one of `GIVEN_UP`."""
        return self.reasons >= self._choices and not self.is_given_up

    def cut(self, piece: bytes) -> bytes:
        """Returns the events that are complete now; the rest is kept for the next call.

        Raises:
            ValueError: an event is longer than `MOST_EVENT_BYTES`.
        """
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if not piece.endswith(b"\n\n"):
            cut = piece.rfind(b"\n\n") + 2 if b"\n\n" in piece else 0
            piece, self._rest = piece[:cut], piece[cut:]
            if len(self._rest) > MOST_EVENT_BYTES:
                raise ValueError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        if piece:
            self.count += sum(1 for _ in self._api.counts.finditer(piece))
            self.is_complete = self._api.end.search(piece) is not None
            self.has_error = self.has_error or self._api.error.search(piece) is not None
            for reason in self._api.reason.findall(piece):
                self.reasons += 1
                self.is_given_up = self.is_given_up or reason.decode() in GIVEN_UP
        return piece
