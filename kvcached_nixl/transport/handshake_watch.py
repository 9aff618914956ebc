# SPDX-License-Identifier: Apache-2.0
"""Watches what the side channels of a server's own engines answer. One thread in its API server.

An engine's identity exists in its own process only, and reaches the API server with no other message before the first
request. The side channel has it from the start, and again whenever the weights change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any
from weakref import ref

from kvcached_nixl.side_channel_address import Endpoint
from kvcached_nixl.transport.side_channel import SideChannel

logger = logging.getLogger("vllm.kvcached_nixl")

INTERVAL_SECONDS = 2.0


class HandshakeWatch:
    """Runs until `close`, until the listener is gone, or with the process.

    Args:
        channel: is closed at the end.
        engines: index of each engine -> its side channel. Those on other hosts do not answer, and stay unknown.
        ranks: of one engine.
        listener: the metrics; ``say_kind`` and ``say_headroom`` are called on the watch's thread. The watch does not
            keep it alive.
    """

    def __init__(self, channel: SideChannel, engines: Mapping[int, Endpoint], ranks: int, listener: Any) -> None:
        self._channel = channel
        self._engines = dict(engines)
        self._ranks = ranks
        self._listener = ref(listener)
        self._known: dict[int, tuple[str, bytes]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-handshake-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._listener() is not None:
                asked = {index: self._channel.ask(*where, 0) for index, where in self._engines.items()}
                for index, first in asked.items():
                    try:
                        self._look(index, first.result())
                        self._ask_headroom(index)
                    except (OSError, ValueError, CancelledError) as error:
                        logger.debug("The side channel of engine %d is not read: %s", index, error)
                    except Exception:
                        # A watch that ended would leave the metrics as they are for good.
                        logger.exception("What engine %d's handshake compares is not in the metrics", index)
                if self._closing.wait(INTERVAL_SECONDS):
                    return
        finally:
            self._channel.close()

    def _look(self, index: int, first: tuple[str, bytes]) -> None:
        # Each rank's answer has the engine's incarnation, which is new whenever the weights are.
        if not first[1] or self._known.get(index) == first:
            return
        others = [self._channel.ask(*self._engines[index], rank) for rank in range(1, self._ranks)]
        answers = [first, *(one.result() for one in others)]
        listener = self._listener()
        if listener is not None and all(metadata for _, metadata in answers):
            listener.say_kind(index, answers)
            self._known[index] = first

    def _ask_headroom(self, index: int) -> None:
        headroom, listener = self._channel.ask_headroom(*self._engines[index]).result(), self._listener()
        if listener is not None and headroom:
            listener.say_headroom(index, headroom)
