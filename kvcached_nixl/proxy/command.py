# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl proxy``: the router as a process, and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import sys
from types import FrameType

import uvicorn

from kvcached_nixl.proxy.app import create_app
from kvcached_nixl.proxy.http import BoundedHttp
from kvcached_nixl.proxy.options import Options

__all__ = ["Router", "run"]

KEEP_ALIVE_SECONDS = 65
"""Longer than clients and load balancers usually keep a connection, so that they close it first."""
LAST_SECONDS = 5.0
"""How long a client may take to read the error that ended its response."""


class Router(uvicorn.Server):
    """A uvicorn server that shuts down in three steps: refuse new requests, let the others finish, end what is left.

    SIGTERM or SIGINT starts the shutdown. A second signal ends all requests at once.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._deadline_seconds: float | None = None
        self._is_hurried = False
        app, self.routed = create_app(options)
        super().__init__(
            uvicorn.Config(
                app,
                host=options.host,
                port=options.port,
                http=BoundedHttp,
                ws="none",
                # X-Forwarded-* headers of a client are not trusted. The router logs requests itself (`record`).
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, int(LAST_SECONDS)),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal handler. Only sets flags; `on_tick` acts on them in the event loop."""
        self._is_hurried = self.routed.is_draining
        self.routed.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Stops the server once it is drained, or out of time."""
        if self.routed.is_draining and not self.should_exit:
            now = asyncio.get_running_loop().time()
            if self._deadline_seconds is None:
                self._deadline_seconds = now + self._options.drain_timeout_seconds
            if self._is_hurried or now > self._deadline_seconds:
                self.routed.end_all()
                self.should_exit = True
            self.should_exit = self.should_exit or not self.routed.in_flight
        return await super().on_tick(counter)


def run(options: Options) -> int:
    """Serve until a signal. Returns the exit status.

    Raises:
        SettingsError: an option has an unusable value.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    router = Router(options)
    router.run()
    return 0 if router.started else 1
