# SPDX-License-Identifier: Apache-2.0
"""The forms of a stack that serves: servers, and most with a router before them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from experiments.common.asking import Asking
from experiments.common.counted import Counters, counters
from experiments.common.servers import Running, Server, ServerSpec
from experiments.stacks.environments import Say

ENDING_SECONDS = 60.0

Router = Callable[[Sequence[Server], Sequence[Server], Path, Say], AbstractContextManager[str]]
"""(prefill servers, decode servers, log, progress) -> the URL that clients use, without a path, while it runs."""


class Servers:
    """A stack that serves, of servers that are started one by one.

    Attributes:
        url: that clients use, without a path.
        engines: names of what `restart` takes.
    """

    def __init__(self, launched: Running, url: str) -> None:
        self.url = url
        self.engines: Sequence[str] = [one.spec.name for one in launched.servers]
        self._launched = launched

    def hand_overs(self) -> Counters:
        """Return how many requests' KV was moved, by each counter of the engines that run now."""
        return counters(f"{one.base_url}/metrics" for one in self._launched.servers)

    def kill(self, engine: str) -> None:
        """End an engine's processes like a machine that fails."""
        self._launched.servers[self.engines.index(engine)].kill()

    def restart(self, engine: str) -> None:
        """End an engine as an operator does, where the stack can; `restore` brings it back."""
        server = self._launched.servers[self.engines.index(engine)]
        # To the process that was started, as a container's runtime does; `stop` would tell its engine as well.
        server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(ENDING_SECONDS)
        server.stop()

    def restore(self, engine: str) -> None:
        """Return when a new engine serves in place of the one that was ended last; raises ServerError if none came."""
        self._launched.replace(self.engines.index(engine))
        self._launched.ready()


@contextlib.contextmanager
def alone(specs: Sequence[ServerSpec], logs: Path, say: Say) -> Iterator[Servers]:
    """Start prefill, and a decode server that asks it and that clients ask.

    Raises:
        ServerError: one of them did not start.
    """
    with Asking(list(specs), logs) as launched:
        yield Servers(launched, launched.ready()[-1].base_url)


@contextlib.contextmanager
def behind(router: Router, specs: Sequence[ServerSpec], logs: Path, say: Say) -> Iterator[Servers]:
    """Start servers, whose names say their roles, and a router before them.

    Raises:
        ServerError: one of them did not start.
    """
    with Running(list(specs), logs) as launched:
        ready = launched.ready()
        prefills, decodes = ([one for one in ready if role in one.spec.name] for role in ("prefill", "decode"))
        with router(prefills, decodes, logs / "stack.log", say) as url:
            yield Servers(launched, url)
