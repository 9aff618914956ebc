# SPDX-License-Identifier: Apache-2.0
"""The known servers: adds, drains, removes, health-checks and chooses them. Once per process."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any

from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.admission import Admission
from kvcached_nixl.proxy.affinity import PrefixTree
from kvcached_nixl.proxy.cost import Costs
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.instance import Booking, Health, Instance, Role
from kvcached_nixl.proxy.kind import Kind
from kvcached_nixl.proxy.metrics import Metrics
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.policy import Wanted, make
from kvcached_nixl.proxy.retry_budget import RetryBudget
from kvcached_nixl.proxy.upstream import Upstream

__all__ = ["Fleet"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_INSTANCES = 1024
"""Limited because each server adds time series to the metrics."""
PANIC_SHARE = 0.5
"""If a smaller share of a role's servers is up, silent ones get requests, too: the checks are doubted."""


class Fleet:
    """See the module. Create, use and close it on one event loop.

    Args:
        watch: runs the health checks of one server, until it is cancelled.

    Raises:
        SettingsError: the policy or a URL cannot be used.
    """

    def __init__(self, options: Options, watch: Callable[[Instance, Fleet], Coroutine[Any, Any, None]]) -> None:
        self.options = options
        self._watch = watch
        self._instances: dict[str, Instance] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._policies = {role: make(options.policy) for role in Role}
        self._changed = asyncio.Event()
        self._draw = random.Random()
        self._decoded = PrefixTree()
        self.costs = Costs()
        self.admission = Admission(options.queue_timeout_seconds, self._decodes_room_tokens)
        self.metrics = Metrics(self._instances.values, lambda: self.admission.waiting_requests)
        self.upstream = Upstream(options.connect_timeout_seconds, options.unresponsive_timeout_seconds)
        self.retry_budget = RetryBudget()
        for role, urls in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
            for url in urls:
                self.add(role, url, dict(options.weights).get(address_of(url), 1.0))

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    async def close(self) -> None:
        """Stop all health checks, and close the idle connections."""
        watchers = list(self._watchers.values())
        self._instances.clear()
        for one in watchers:
            one.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self.upstream.close()

    # --------------------------------------------------------------------------------------------------- administration

    def add(self, role: Role, url: str, weight: float = 1.0) -> Instance:
        """Add a server. It gets requests as soon as a health check succeeds.

        Raises:
            SettingsError: the URL cannot be used.
            Refusal: the server is known already, or there are too many.
        """
        name = address_of(url)
        if name in self._instances:
            raise Refusal(409, RouterFailure.BODY, f"{name} is known already, as {self._instances[name].role.value}.")
        if len(self._instances) >= MOST_INSTANCES:
            raise Refusal(409, RouterFailure.BODY, f"{MOST_INSTANCES} servers are known already, which is the limit.")
        instance = self._instances[name] = Instance(role, url, weight)
        self.metrics.added(instance)
        self._watchers[name] = asyncio.create_task(self._watch(instance, self))
        logger.info("%s server %s: added", role.value, name)
        return instance

    def drain(self, name: str, *, is_draining: bool = True) -> Instance:
        """Send no new requests to a server, or send some again. Those it works on continue.

        Raises:
            Refusal: the server is not known.
        """
        instance = self.known(name)
        instance.is_draining = is_draining
        what = "draining" if is_draining else "not draining any more"
        logger.info("%s server %s: %s, %d requests in flight", instance.role.value, name, what, instance.requests)
        self.notify()
        return instance

    async def remove(self, name: str, *, at_once: bool) -> None:
        """Remove a server.

        Args:
            at_once: end the requests that it works on. Otherwise a busy server is not removed.

        Raises:
            Refusal: the server is not known, or is busy and ``at_once`` is false.
        """
        instance = self.known(name)
        if instance.is_busy and not at_once:
            number = instance.requests + instance.keeping
            raise Refusal(409, RouterFailure.BODY, f"{name} works on {number} requests: drain it first.")
        instance.is_draining = True
        del self._instances[name]
        watcher = self._watchers.pop(name)
        watcher.cancel()
        instance.end_legs("it was removed")
        logger.info("%s server %s: removed", instance.role.value, name)
        try:
            await asyncio.gather(watcher, return_exceptions=True)
            await instance.quiet.wait()
        finally:
            # Else it was added again meanwhile.
            if name not in self._instances:
                self.metrics.removed(instance)

    # ---------------------------------------------------------------------------------------------------------- choice

    def notify(self) -> None:
        """Wake the requests that wait for a server."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.admission.look()

    async def change(self) -> None:
        """Wait until a server has become usable, or has stopped to be."""
        await self._changed.wait()

    def is_up(self, role: Role, beside: Role | None = None) -> bool:
        """Whether any server of this role can take requests, and one of ``beside`` that fits it."""
        return bool(self._usable(role, beside))

    def suspect(self, name: str = "") -> None:
        """Look soon at the server of this name, or at all, if they are up: what is known of them may be outdated."""
        for one in self:
            if one.state is Health.UP and name in (one.name, ""):
                one.suspected.set()

    def is_known(self, instance: Instance) -> bool:
        return self._instances.get(instance.name) is instance

    def has(self, role: Role) -> bool:
        """Whether any server of this role is known."""
        return any(one.role is role for one in self)

    def retry_seconds(self, role: Role) -> int:
        """Returns when a client should try again that found no server of this role: after their next checks."""
        waits = [one.next_look_seconds - time.monotonic() for one in self if one.role is role and not one.is_draining]
        return max(1, math.ceil(min(waits, default=self.options.health_interval_seconds)))

    def choose(
        self,
        role: Role,
        request: Wanted,
        tried: Collection[str] = (),
        preferred: str = "",
        beside: Role | None = None,
        fits: Kind | None = None,
    ) -> Booking | None:
        """Returns where a request goes, preferably a server neither tried nor doubted; None if none is up that fits.

        Args:
            preferred: name of the server that is chosen if it is among those.
            beside: only a server that fits one of this role.
            fits: only a server that fits this kind.
        """
        usable = _fitting(self._usable(role, beside), {fits})
        fresh = [one for one in usable if one.name not in tried] or usable
        fresh = [one for one in fresh if not one.is_doubted] or fresh
        fresh = [one for one in fresh if one.name == preferred] or fresh
        fresh = self._by_weight(fresh)
        return self._choose(role, request, [place for one in fresh for place in one.places])

    def alone(self, request: Wanted) -> tuple[Booking, int] | None:
        """Returns the decode server that should compute a prompt itself, and how many tokens it would compute.

        None: prefill should. See `cost`.
        """
        if not self.options.alone_most_tokens:
            return None
        prefills, decodes = self._usable(Role.PREFILL, Role.DECODE), self._usable(Role.DECODE)
        if not prefills:
            return None
        pieces = self._decoded.pieces(request.namespace, request.prefix)
        known = {name: count * request.piece_tokens for name, count in pieces.items()}
        found = [
            (max(1, request.prompt_tokens - known.get(_epoch_of(one), 0)), one)
            for one in self._by_weight(decodes)
            if not one.is_doubted
        ]
        costs = [
            (self.costs.of_computing_alone(tokens, one.computing_tokens, one.requests), tokens, one)
            for tokens, one in found
            if tokens <= self.options.alone_most_tokens
        ]
        if not costs:
            return None
        alone_seconds, tokens, server = min(costs, key=lambda one: one[0])
        ahead = min(one.tokens for one in prefills) + request.prompt_tokens
        return (Booking(server, None), tokens) if self.costs.is_alone_better(alone_seconds, ahead) else None

    def _decodes_room_tokens(self) -> float:
        """How many tokens of prompts the usable decode servers may still get, by ``--decode-fill``."""
        fill, usable = self.options.decode_fill, self._usable(Role.DECODE)
        # Who has too much to do takes no room from the others.
        return sum(one.room_tokens(fill) for one in usable) if fill and usable else math.inf

    def decoded(self, server: Instance, request: Wanted) -> None:
        """A decode server has this prompt in its prefix cache from now on."""
        if self.options.alone_most_tokens:
            self._decoded.add(request.namespace, request.prefix, _epoch_of(server))

    def _by_weight(self, usable: list[Instance]) -> list[Instance]:
        """Returns the servers of one kind and weight, drawn with the sum of their weights as probability."""
        classes: dict[object, list[Instance]] = {}
        for one in usable:
            classes.setdefault((one.kind and one.kind.group, one.weight), []).append(one)
        if len(classes) < 2:
            return usable
        shares = [sum(one.weight for one in some) for some in classes.values()]
        return self._draw.choices(list(classes.values()), shares)[0]

    def choose_rank(self, instance: Instance, request: Wanted) -> Booking:
        """Returns where on this server a request goes."""
        return self._choose(instance.role, request, instance.places) or Booking(instance, None)

    def _usable(self, role: Role, beside: Role | None = None) -> list[Instance]:
        known = [one for one in self if one.role is role and not one.is_draining]
        usable = [one for one in known if one.state is Health.UP]
        if len(usable) < PANIC_SHARE * len(known):
            usable += [one for one in known if one.state is Health.SILENT]
        return usable if beside is None else _fitting(usable, {one.kind for one in self._usable(beside)})

    def _choose(self, role: Role, request: Wanted, places: list[Booking]) -> Booking | None:
        if not places:
            return None
        return places[self._policies[role].choose([one.server.load(one.rank) for one in places], request)]

    def known(self, name: str) -> Instance:
        """Raises `Refusal`: the server is not known."""
        instance = self._instances.get(name)
        if instance is None:
            raise Refusal(404, RouterFailure.BODY, f"No server {name[:200]!r} is known.")
        return instance


def _epoch_of(server: Instance) -> str:
    """Names a server until it goes down, and takes its prefix cache with it."""
    return f"{server.name} {server.epoch}"


def _fitting(servers: list[Instance], kinds: Collection[Kind | None]) -> list[Instance]:
    """Returns the servers that fit at least one of the kinds. What is not known may fit."""
    if None in kinds:
        return servers
    return [one for one in servers if one.kind is None or any(one.kind.fits(kind) for kind in kinds if kind)]
