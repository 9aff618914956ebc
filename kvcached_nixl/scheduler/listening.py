# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel goes on listening: what one peer asks in a wrong way ends no handshake of another's.

The stock listener takes a question apart and looks the rank up without a thought that either may fail; its thread would
be gone, and every handshake that follows would wait in vain. A rank that is not there, which is what a router's wrong
``tp_size`` asks for, is answered in words. Once per engine, on the listener's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from kvcached_nixl.settings import SERVER_LOGGER

__all__ = ["Answers", "keep_listening"]

logger = logging.getLogger(SERVER_LOGGER)


class Answers(dict[Any, bytes]):
    """What is answered to whom asks for a rank.

    Whoever asks for one that is not here gets an answer whose compatibility string equals nobody's and says why, so
    the peer refuses it and shows it.
    """

    def __missing__(self, rank: object) -> bytes:
        said = f"no rank {rank!r:.60}: this engine has {sorted(self)}; correct the router's tp_size"
        return msgspec.msgpack.encode({"compatibility_hash": said, "agent_metadata_bytes": b""})


def keep_listening(listen: Callable[[], object], is_listening: Callable[[], bool]) -> None:
    """Run ``listen``, which binds and returns when it is told to stop; again, when a message has ended it.

    Args:
        is_listening: whether it has bound; what fails before that is no peer's doing, and is raised.
    """
    while True:
        try:
            listen()
            return
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as cause:
            if not is_listening():
                raise
            logger.warning("Dropped a message to the side channel that cannot be read: %s", cause)
