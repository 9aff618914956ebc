# SPDX-License-Identifier: Apache-2.0
"""vLLM's side channel: a ZMQ socket in each engine core that hands out a rank's handshake metadata.

Sources: ``_nixl_handshake_listener`` and ``_nixl_handshake`` (``v1/nixl_connector.py`` in 0.19,
``v1/nixl/base_scheduler.py`` and ``base_worker.py`` in 0.28). Since 0.26 a rank is named by its pipeline stage too and
the reply has a second frame, the listener's clock; it is not needed here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import zmq

__all__ = ["side_channel"]

_ASK = b"get_meta_msg"
_REPLY_SECONDS = 5.0


class _Reply(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


def side_channel(names_stage: bool) -> Callable[[str, int, int], tuple[str, bytes]]:
    """Returns a function (host, port, tensor-parallel rank) -> (compatibility string, metadata).

    It blocks for a few seconds at most, on any thread, and raises `ConnectionRefusedError` if nobody listens, another
    `OSError` or a `TimeoutError` if that is not known.

    Args:
        names_stage: a rank is asked for by (pipeline stage, rank).
    """

    def ask(host: str, port: int, tp_rank: int) -> tuple[str, bytes]:
        # ZMQ would go on trying without a word.
        socket.create_connection((host, port), timeout=_REPLY_SECONDS).close()
        with zmq.Context() as context, context.socket(zmq.REQ) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            # As vLLM's listener: with it ZMQ takes one address of a name, and a name may be ::1 and 127.0.0.1.
            asking.setsockopt(zmq.IPV6, int(":" in host))
            asking.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            asking.send(msgspec.msgpack.encode((_ASK, 0, tp_rank) if names_stage else (_ASK, tp_rank)))
            if not asking.poll(int(_REPLY_SECONDS * 1000)):
                raise TimeoutError(f"the side channel at {host}:{port} does not answer within {_REPLY_SECONDS:g} s")
            reply = msgspec.msgpack.decode(asking.recv_multipart()[0], type=_Reply)
        return reply.compatibility_hash, reply.agent_metadata_bytes

    return ask
