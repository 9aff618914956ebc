# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ASGI application; one behind uvicorn, and a client that sends a large request before it reads."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from support.patches import first_bound
from support.waiting import until


def vllm_application(transfer: Mapping[str, Any], *arguments: str) -> tuple[Any, Any]:
    """Returns vLLM's application, whose key is "key", and the parsed ``kv_transfer_config``."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    places = ("common.cli_args", "launchers.cli_args", "openai.cli_args")
    make_parser = first_bound([f"vllm.entrypoints.{one}" for one in places], "make_arg_parser")
    build = first_bound(("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"), "build_app")
    given = ["--model", "m", "--api-key", "key", "--kv-transfer-config", json.dumps(transfer), *arguments]
    parsed = make_parser(FlexibleArgumentParser()).parse_args(given)
    return build(parsed, ("generate",)), parsed.kv_transfer_config


@contextmanager
def served_by_uvicorn(
    app: Any, lifespan: Literal["on", "off"] = "on", loop: Literal["auto", "asyncio", "uvloop"] = "auto"
) -> Iterator[int]:
    """Gives the port."""
    import uvicorn

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan, loop=loop)
    server = app.state.server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
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
