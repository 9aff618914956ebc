# SPDX-License-Identifier: Apache-2.0
"""Two servers, prefill and decode, that answer at once: ``python -m experiments.router_overhead.stub PORT PORT``.

They only look for the end of a request, so that they cost as little as possible.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

from kvcached_nixl.wire.manifest import PROTOCOL

HOST = "127.0.0.1"
TOKENS = 16
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

_MANIFEST = {
    **{
        "protocol": PROTOCOL,
        "incarnation": "0" * 16,
        "request_id": "cmpl-x-0-00000000",
        "digest": "0" * 32,
        "num_tokens": 1,
    },
    **{"block_sizes": [16], "context_parallel": [1, 1], "lease_seconds": 30.0, "num_media": 0},
    "groups": [{"first_token": 0, "block_ids": [7]}],
}
_PARAMS = {
    **{"do_remote_prefill": True, "do_remote_decode": False, "transfer_mode": "pull", "remote_engine_id": "stub"},
    **{"remote_request_id": "cmpl-x-0-00000000", "remote_host": HOST, "remote_port": 5600, "tp_size": 1},
    **{"remote_block_ids": [[]], "kvcached_nixl": _MANIFEST},
}


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


PREFILLED = _whole(json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": _PARAMS}).encode())


def _event(reason: str | None) -> bytes:
    choice = {"index": 0, "text": " token", "finish_reason": reason}
    said = {"id": "cmpl-x", "object": "text_completion", "model": "m", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(said).encode() + b"\n\n")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = _event(None)
END = _event("length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection. ``token_seconds`` is the pause between tokens; 0: the whole answer is one write."""

    def __init__(self, is_prefill: bool, token_seconds: float) -> None:
        self._is_prefill = is_prefill
        self._token_seconds = token_seconds
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while (end := self._heard.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._heard, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._heard) < whole:
                return
            is_post, self._heard = self._heard.startswith(b"POST"), self._heard[whole:]
            if not is_post:
                self._transport.write(_whole(b""))
            elif self._is_prefill:
                self._transport.write(PREFILLED)
            elif self._token_seconds:
                asyncio.ensure_future(self._stream())
            else:
                self._transport.write(HEAD + EVENT * (TOKENS - 1) + END)

    async def _stream(self) -> None:
        self._transport.write(HEAD)
        for _ in range(TOKENS - 1):
            self._transport.write(EVENT)
            await asyncio.sleep(self._token_seconds)
        self._transport.write(END)


async def main(ports: list[int], token_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda role=role: Stub(role, token_seconds), HOST, port, backlog=4096)
        for role, port in zip((True, False), ports, strict=True)
    ]
    await asyncio.gather(*(one.serve_forever() for one in servers))


if __name__ == "__main__":
    asyncio.run(main([int(word) for word in sys.argv[1:3]], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
