# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl proxy``: the router as a process, and its shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import anyio
from aiohttp import web

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.account import fit_descriptors
from kvcached_nixl.proxy.app import App
from kvcached_nixl.proxy.listener import Listener
from kvcached_nixl.proxy.options import Options

__all__ = ["Router", "run"]

logger = logging.getLogger("kvcached_nixl.proxy")

LAST_SECONDS = 5.0
"""How long a client may take to read the error that ended its response."""
BACKLOG = 1024
ACCEPTED_AT_ONCE = 32
"""asyncio accepts as many connections as its ``backlog`` says before it serves one, and each needs a descriptor."""


class Router:
    """A router that listens. Create it on the event loop.

    It shuts down in steps: say that it is not ready, refuse new requests, let the others finish, end what is left.

    Attributes:
        port: on which it listens, once `started` is set.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stopping = asyncio.Event()
        self._forgotten = asyncio.Event()
        self._hurried = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.app = App(options)
        self.started = asyncio.Event()
        self.port = 0

    def stop(self, *, waits_for_balancers: bool = True) -> None:
        """Begin to shut down. The second call ends the requests in flight at once."""
        if self._stopping.is_set():
            self._hurried.set()
        if self._stopping.is_set() or not waits_for_balancers:
            self._forgotten.set()
        self._stopping.set()

    async def serve(self) -> None:
        """Serve until `stop`.

        Raises:
            SettingsError: the address or the socket cannot be used.
        """
        runner = web.ServerRunner(
            Listener(self.app.answer, self.app.account, self._options), shutdown_timeout=LAST_SECONDS
        )
        await runner.setup()
        try:
            await self._listen(runner)
            self.started.set()
            await self._stopping.wait()
            await self._drain()
        finally:
            if self._server is not None:
                self._server.close()
            await runner.cleanup()
            await self.app.close()

    async def _listen(self, runner: web.ServerRunner) -> None:
        options = self._options
        loop = asyncio.get_running_loop()
        assert runner.server is not None
        try:
            self._server = await loop.create_server(
                runner.server, options.host, options.port, backlog=ACCEPTED_AT_ONCE, reuse_address=True
            )
            for one in self._server.sockets:
                with socket.socket(fileno=os.dup(one.fileno())) as same:
                    same.listen(BACKLOG)
            if options.admin_socket:
                await _listen_for_own_user(runner, Path(options.admin_socket))
        except (OSError, UnicodeError) as error:
            # UnicodeError: a host that is no name.
            raise SettingsError(
                found=f"{error}",
                expected=f"that {options.host}:{options.port} and --admin-socket {options.admin_socket!r} are free",
                consequence="The router cannot listen, and does not start.",
                remedy="Give another --host, --port or --admin-socket, or stop who listens there.",
            ) from error
        names = [one.getsockname()[:2] for one in self._server.sockets]
        self.port = names[0][1]
        logger.info("listening on %s", ", ".join(f"{host}:{port}" for host, port in names))

    async def _drain(self) -> None:
        """Let the requests in flight finish, at first also new ones, then end what is left."""
        app, options = self.app, self._options
        app.is_ready = False
        with anyio.move_on_after(options.drain_timeout_seconds):
            with anyio.move_on_after(options.drain_delay_seconds):
                await self._forgotten.wait()
            app.is_draining = True
            await _first(self._hurried, app.quiet)
        app.is_draining = True
        app.end_all()
        with anyio.move_on_after(LAST_SECONDS):
            await app.quiet.wait()


async def _listen_for_own_user(runner: web.ServerRunner, path: Path) -> None:
    if path.is_socket():
        if _is_used(path):
            raise OSError(errno.EADDRINUSE, f"another process listens on {path}")
        path.unlink()
    before = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(path)).start()
    finally:
        os.umask(before)


def _is_used(path: Path) -> bool:
    """Whether somebody listens on a socket: its file stays when who has made it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Where the backlog is full, it would have to wait.
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN, errno.EINPROGRESS)


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def run(options: Options) -> int:
    """Serve until a signal. SIGINT does not wait for load balancers; a second signal ends all requests at once.

    Raises:
        SettingsError: an option has an unusable value.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    options = fit_descriptors(options)

    async def serve() -> None:
        router = Router(options)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, router.stop)
        loop.add_signal_handler(signal.SIGINT, lambda: router.stop(waits_for_balancers=False))
        await router.serve()

    asyncio.run(serve())
    return 0
