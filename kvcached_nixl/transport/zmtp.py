# SPDX-License-Identifier: Apache-2.0
"""Messages of ZMQ sockets over asyncio's streams, in ZMTP 3.0 with the mechanism NULL
(https://rfc.zeromq.org/spec/23): questions as a REQ socket asks them, and answers as a ROUTER socket gives them.

libzmq limits the bytes of a frame, but not the frames of a message: whoever reaches a listener, and each host that a
client names, could fill the memory of a server with one message.
"""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence

_NULL = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + _NULL + bytes(32)
_SIGNATURE_BYTES = 10
_READY = b"\5READY"
_LONGEST_READY_BYTES = 1024
_MORE, _LONG, _COMMAND = 1, 2, 4
_MOST_FRAMES = 8
"""Of a message, and of commands before it, such as PING. Questions and answers have two or three."""


async def ask(reader: StreamReader, writer: StreamWriter, question: bytes, most_bytes: int) -> list[bytes]:
    """Asks over a new connection. Returns the frames of the answer, one or more, of ``most_bytes`` in all. Raises as
    `read`."""
    await greet(reader, writer, b"REQ")
    write(writer, (b"", question))
    found = await read(reader, most_bytes)
    if not 2 <= len(found) <= 3 or found[0]:
        raise ValueError(f"found {len(found)} frames; expected an empty one and 1 or 2 others")
    return found[1:]


async def greet(reader: StreamReader, writer: StreamWriter, socket_type: bytes) -> None:
    """Begins a connection, on either side, as a socket of this type. Raises as `read`."""
    writer.write(_GREETING)
    greeting = await reader.readexactly(_SIGNATURE_BYTES)
    if (greeting[0], greeting[-1]) != (0xFF, 0x7F):
        raise ValueError(f"found {greeting!r}; expected ZMTP")
    greeting += await reader.readexactly(len(_GREETING) - _SIGNATURE_BYTES)
    if greeting[10] < 3 or greeting[12:32] != _NULL:
        raise ValueError(f"found version {greeting[10]} of ZMTP with {greeting[12:32]!r}; expected 3 with NULL")
    ready = _READY + b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    writer.write(_frame(_COMMAND, ready))
    flags, body = await _read(reader, _LONGEST_READY_BYTES)
    if not flags & _COMMAND or not body.startswith(_READY):
        raise ValueError(f"found {body!r:.200}; expected that the connection is ready")


async def read(reader: StreamReader, most_bytes: int) -> list[bytes]:
    """Returns the frames of the next message, one or more, of ``most_bytes`` in all.

    Raises ValueError: something else was received. OSError or EOFError: the connection has ended.
    """
    found: list[bytes] = []
    for _ in range(_MOST_FRAMES):
        flags, body = await _read(reader, most_bytes)
        most_bytes -= len(body)
        if not flags & _COMMAND:
            found.append(body)
            if not flags & _MORE:
                return found
    raise ValueError(f"found no end of a message after {_MOST_FRAMES} frames")


def write(writer: StreamWriter, frames: Sequence[bytes]) -> None:
    writer.write(b"".join(_frame(_MORE, one) for one in frames[:-1]) + _frame(0, frames[-1]))


def _frame(flags: int, body: bytes) -> bytes:
    size = len(body)
    return (bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8, "big")) + body


async def _read(reader: StreamReader, most_bytes: int) -> tuple[int, bytes]:
    (flags,) = await reader.readexactly(1)
    if flags > _MORE | _LONG | _COMMAND:
        raise ValueError(f"found a frame with the flags {flags:#x}; expected ZMTP's")
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    if size > most_bytes:
        raise ValueError(f"found a frame of {size} bytes; expected at most {most_bytes}")
    return flags, await reader.readexactly(size)
