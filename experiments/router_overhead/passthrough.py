# SPDX-License-Identifier: Apache-2.0
"""A simple proxy, as demos use, with FastAPI and httpx: ``python -m experiments.router_overhead.passthrough PORT P D``.

Prefill gets the request with one token, its parameters go to decode, decode's answer is streamed. It has no limits, no
handling of failures and no metrics, so its cost is that of the two libraries.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

HOST = "127.0.0.1"


def make_app(prefill: str, decode: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=prefill, timeout=None, limits=limits) as app.state.prefill,
            httpx.AsyncClient(base_url=decode, timeout=None, limits=limits) as app.state.decode,
        ):
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        asked = await request.json()
        first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        prefilled = await app.state.prefill.post("/v1/completions", json=first)
        prefilled.raise_for_status()
        asked["kv_transfer_params"] = prefilled.json().get("kv_transfer_params")

        async def pieces() -> AsyncIterator[bytes]:
            async with app.state.decode.stream("POST", "/v1/completions", json=asked) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    app = make_app(f"http://{HOST}:{sys.argv[2]}", f"http://{HOST}:{sys.argv[3]}")
    uvicorn.run(app, host=HOST, port=int(sys.argv[1]), log_level="warning", access_log=False)
