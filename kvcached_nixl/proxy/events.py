# SPDX-License-Identifier: Apache-2.0
"""Splits a stream of server-sent events at the ends of events, and sees whether it is complete. Once per stream."""

from __future__ import annotations

import re

__all__ = ["GIVEN_UP", "MOST_EVENT_BYTES", "Events"]

END = b"data: [DONE]\n\n"
GIVEN_UP = ("abort", "error")
"""vLLM's finish_reasons of a response that is incomplete."""
MOST_EVENT_BYTES = 16 << 20
# Quotes are escaped inside a JSON string, so generated text cannot match any of these.
_ERROR = b'data: {"error"'
_CHOICE = re.compile(rb'"choices":\s*\[\s*\{')
_REASON = re.compile(rb'"finish_reason":\s*"')
_GIVEN_UP = re.compile(rb'"finish_reason":\s*"(?:%s)"' % "|".join(GIVEN_UP).encode())


class Events:
    """See the module.

    Attributes:
        is_complete: the last event was ``[DONE]``.
        has_error: an event was an error of the server.
        has_reason: an event had a finish_reason.
        is_given_up: a finish_reason was one of `GIVEN_UP`.
        count: number of events so far with a choice.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_complete = False
        self.has_error = False
        self.has_reason = False
        self.is_given_up = False
        self.count = 0

    @property
    def rest_bytes(self) -> int:
        """Size of the event that is not complete yet."""
        return len(self._rest)

    @property
    def is_whole(self) -> bool:
        """Whether the response has a finish_reason, and none of `GIVEN_UP`."""
        return self.has_reason and not self.is_given_up

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
            self.count += len(_CHOICE.findall(piece))
            self.is_complete = piece.endswith(END)
            self.has_error = self.has_error or _ERROR in piece
            if _REASON.search(piece) is not None:
                self.has_reason = True
                self.is_given_up = self.is_given_up or _GIVEN_UP.search(piece) is not None
        return piece
