# SPDX-License-Identifier: Apache-2.0
"""The known servers: adds, drains, removes, health-checks and chooses them. Once per process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator

from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.health import watch
from kvcached_nixl.proxy.instance import Booking, Health, Instance, Role
from kvcached_nixl.proxy.metrics import Metrics
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.policy import Wanted, make

__all__ = ["Fleet"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_INSTANCES = 1024
"""Limited because each server adds time series to the metrics."""


class Fleet:
    """See the module. Create, use and close it on one event loop.

    Raises:
        SettingsError: the policy or a URL cannot be used.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._instances: dict[str, Instance] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._policies = {role: make(options.policy) for role in Role}
        self.metrics = Metrics(self._instances.values)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def start(self) -> None:
        """Add the servers of the command line. Needs a running event loop."""
        for role, urls in ((Role.PREFILL, self._options.prefill), (Role.DECODE, self._options.decode)):
            for url in urls:
                self.add(role, url)

    async def close(self) -> None:
        """Stop all health checks, and close the idle connections."""
        watchers = list(self._watchers.values())
        for one in watchers:
            one.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for instance in self._instances.values():
            instance.connections.close()

    def add(self, role: Role, url: str) -> Instance:
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
        instance = self._instances[name] = Instance(role, url, self._options.connect_timeout_seconds)
        self._watchers[name] = asyncio.create_task(watch(instance, self._options, self.metrics))
        logger.info("%s server %s: added", role.value, name)
        return instance

    def drain(self, name: str) -> Instance:
        """Send no new requests to a server. Those it works on continue.

        Raises:
            Refusal: the server is not known.
        """
        instance = self._known(name)
        instance.is_draining = True
        logger.info("%s server %s: draining, %d requests left", instance.role.value, name, instance.requests)
        return instance

    async def remove(self, name: str, *, at_once: bool) -> None:
        """Remove a server.

        Args:
            at_once: end the requests that it works on. Otherwise a busy server is not removed.

        Raises:
            Refusal: the server is not known, or is busy and ``at_once`` is false.
        """
        instance = self._known(name)
        if instance.is_busy and not at_once:
            number = instance.requests + instance.keeping
            raise Refusal(409, RouterFailure.BODY, f"{name} works on {number} requests: drain it first.")
        instance.is_draining = True
        del self._instances[name]
        watcher = self._watchers.pop(name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        if instance.requests:
            instance.went_down("it was removed")
            await instance.quiet.wait()
        instance.connections.close()
        self.metrics.removed(instance)
        logger.info("%s server %s: removed", instance.role.value, name)

    def is_up(self, role: Role) -> bool:
        """Whether any server of this role can take requests."""
        return any(one.role is role and one.is_usable for one in self)

    def is_known(self, instance: Instance) -> bool:
        return self._instances.get(instance.name) is instance

    def choose(self, role: Role, request: Wanted, tried: Collection[str] = ()) -> Booking | None:
        """Returns where a request goes, preferably a server neither tried nor doubted; None if no server is up."""
        usable = [one for one in self if one.role is role and one.is_usable]
        fresh = [one for one in usable if one.name not in tried] or usable
        fresh = [one for one in fresh if not one.is_doubted] or fresh
        return self._choose(role, request, [place for one in fresh for place in one.places])

    def choose_rank(self, instance: Instance, request: Wanted) -> Booking:
        """Returns where on this server a request goes."""
        return self._choose(instance.role, request, instance.places) or Booking(instance, None)

    def _choose(self, role: Role, request: Wanted, places: list[Booking]) -> Booking | None:
        if not places:
            return None
        return places[self._policies[role].choose([one.server.load(one.rank) for one in places], request)]

    def _known(self, name: str) -> Instance:
        instance = self._instances.get(name)
        if instance is None:
            raise Refusal(404, RouterFailure.BODY, f"No server {name[:200]!r} is known.")
        return instance


def as_dict(instance: Instance) -> dict[str, object]:
    """Returns a server's entry in ``/instances``."""
    ranks = instance.ranks
    found = ranks.latest
    return {
        "name": instance.name,
        "role": instance.role.value,
        "url": instance.url,
        "state": instance.state.value,
        "draining": instance.is_draining,
        "drained": instance.is_draining and not instance.is_busy,
        "requests": instance.requests,
        "keeping": instance.keeping,
        "outstanding_tokens": instance.tokens,
        "transfer_mode": None if found is None else found.mode.value,
        "engine_id": None if found is None else found.where.engine_id,
        "incarnation": None if found is None else found.incarnation,
        "ranks": [_rank_as_dict(instance, rank) for rank in ranks.named] or None,
        "last_failure": instance.last_failure if instance.state is not Health.UP else "",
    }


def _rank_as_dict(instance: Instance, rank: int) -> dict[str, object]:
    load, found = instance.load(rank), instance.ranks.found(rank)
    return {
        "rank": rank,
        "requests": load.requests,
        "outstanding_tokens": load.tokens,
        "engine_id": None if found is None else found.where.engine_id,
        "incarnation": None if found is None else found.incarnation,
    }
