# SPDX-License-Identifier: Apache-2.0
"""Asks a ZMQ socket one question, as a REQ socket does, in ZMTP 3.0 with the mechanism NULL
(https://rfc.zeromq.org/spec/23).

libzmq limits the bytes of a frame, but not the frames of a message. Clients name the hosts that a server asks, and with
libzmq such a host could fill the server's memory with one answer.
"""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter

_NULL = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + _NULL + bytes(32)
_SIGNATURE_BYTES = 10
_READY, _ERROR = b"\5READY", b"\5ERROR"
_OF_REQ = b"\x0bSocket-Type" + b"\0\0\0\3REQ"
_MORE, _LONG, _COMMAND = 1, 2, 4
_MOST_FRAMES = 8
"""That a peer sends, commands included: READY, an empty frame, the answer, the listener's clock; and some PINGs."""


async def ask(reader: StreamReader, writer: StreamWriter, question: bytes, most_bytes: int) -> list[bytes]:
    """Asks over a new connection. Returns the frames of the answer, one or more, of ``most_bytes`` in all.

    Args:
        question: of at most 255 bytes.

    Raises ValueError: what was received is no such answer. OSError or EOFError: the connection has ended.
    """
    writer.write(_GREETING)
    greeting = await reader.readexactly(_SIGNATURE_BYTES)
    if (greeting[0], greeting[-1]) != (0xFF, 0x7F):
        raise ValueError(f"found {greeting!r}; expected ZMTP")
    greeting += await reader.readexactly(len(_GREETING) - _SIGNATURE_BYTES)
    if greeting[10] < 3 or greeting[12:32] != _NULL:
        raise ValueError(f"found version {greeting[10]} of ZMTP with {greeting[12:32]!r}; expected 3 with NULL")
    writer.write(_frame(_COMMAND, _READY + _OF_REQ))
    found: list[bytes] = []
    is_ready = False
    for _ in range(_MOST_FRAMES):
        flags, body = await _read(reader, most_bytes)
        most_bytes -= len(body)
        if flags & _COMMAND:
            if body.startswith(_ERROR):
                raise ValueError(f"found an error: {body[len(_ERROR) + 1 :]!r:.200}")
            if body.startswith(_READY) and not is_ready:
                is_ready = True
                writer.write(_frame(_MORE, b"") + _frame(0, question))
            continue
        found.append(body)
        if not flags & _MORE:
            break
    if not is_ready or len(found) < 2 or found[0] or flags & (_MORE | _COMMAND):
        raise ValueError(f"found {len(found)} frames; expected an empty one and 1 or 2 others")
    return found[1:]


def _frame(flags: int, body: bytes) -> bytes:
    return bytes((flags, len(body))) + body


async def _read(reader: StreamReader, most_bytes: int) -> tuple[int, bytes]:
    (flags,) = await reader.readexactly(1)
    if flags > _MORE | _LONG | _COMMAND:
        raise ValueError(f"found a frame with the flags {flags:#x}; expected ZMTP's")
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    if size > most_bytes:
        raise ValueError(f"found a frame of {size} bytes; expected at most {most_bytes}")
    return flags, await reader.readexactly(size)
