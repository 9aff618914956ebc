# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl proxy``: the router as a process, and how it ends."""

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
"""Above what clients and balancers keep a connection for, so that they close it first."""
LAST_SECONDS = 5.0
"""For a client to read the end of what was broken off."""


class Router(uvicorn.Server):
    """uvicorn, which ends in three steps: it refuses new requests, lets others end, and breaks off what is left.

    SIGTERM or SIGINT begins, a second one breaks off at once.
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
                # A client's words are not to be believed, and paths are in no log of their own.
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, int(LAST_SECONDS)),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal's handler: what follows is done by the event loop."""
        self._is_hurried = self.routed.is_draining
        self.routed.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to stop listening."""
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
        SettingsError: an option cannot be used.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    router = Router(options)
    router.run()
    return 0 if router.started else 1
