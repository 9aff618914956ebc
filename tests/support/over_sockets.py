# SPDX-License-Identifier: Apache-2.0
"""An ASGI application behind uvicorn, as vLLM runs it, and a client that sends a large request before it reads."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal


@contextmanager
def served_by_uvicorn(app: Any, lifespan: Literal["on", "off"] = "on") -> Iterator[int]:
    """Gives the port."""
    import uvicorn

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan)
    server = app.state.server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until_seconds = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until_seconds
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)


def status_of(port: int, path: str, body: bytes, **headers: str) -> int:
    """Raises OSError where the answer is lost because the server has closed the connection before it has read all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, body, {**headers, "Connection": "close"})
        return connection.getresponse().status
    finally:
        connection.close()
