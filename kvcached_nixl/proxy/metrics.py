# SPDX-License-Identifier: Apache-2.0
"""The router's metrics. Once per process. Label values are bounded: routes, roles, causes, and the known servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvcached_nixl.proxy.asked import Alone
from kvcached_nixl.proxy.failure import RouterFailure
from kvcached_nixl.proxy.instance import Health, Instance, Role

__all__ = ["Metrics"]

PREFIX = "kvcached_nixl_router"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300)


class Metrics:
    """See the module.

    Args:
        instances: returns the current servers, for the gauges; called for each GET of ``/metrics``.
        waiting: returns how many requests wait until decode has room; called likewise.
    """

    def __init__(self, instances: Callable[[], Iterable[Instance]], waiting: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", description, labels, registry=registry)

        def histogram(name: str, description: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", description, labels, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Requests by outcome: ok, or the cause of the failure", "route", "outcome")
        self.legs = counter(
            "legs",
            "Requests to one server by outcome: ok, the cause of the failure, or ended by the router",
            "role",
            "instance",
            "outcome",
        )
        self.handovers = counter(
            "handovers",
            "Successful requests by direction: pull, push, or alone (decode computed the prompt)",
            "direction",
        )
        self.alone = counter("decode_alone", "Prompts that decode had to compute itself, by reason", "reason")
        self.retries = counter("retries", "Attempts that failed and were followed by another, by cause", "cause")
        self.without_parameters = counter(
            "prefills_without_parameters",
            "Responses of prefill without kv_transfer_params: decode computed those prompts",
            "instance",
        )
        self.reported = counter(
            "reported_handover_failures",
            "Hand-over failures that decode servers report: recomputed or failed, as kv_load_failure_policy says",
            "instance",
        )
        self.ejections = counter(
            "ejections",
            "How often a server stopped getting requests because its health checks failed",
            "role",
            "instance",
        )
        self.first_seconds = histogram(
            "time_to_first_token_seconds",
            "Seconds until the client has the first piece, of successful requests",
            "route",
        )
        self.request_seconds = histogram(
            "request_seconds", "Seconds until the client has the whole response, of successful requests", "route"
        )
        self.leg_seconds = histogram("leg_seconds", "Seconds of one request to one server", "role")
        self._routes: set[str] = set()
        # Where a series appears with its first count, Prometheus sees no rise.
        for family, values in (
            (self.handovers, ("pull", "push", "alone")),
            (self.alone, [one.value for one in Alone]),
            (self.retries, [one.value for one in RouterFailure]),
        ):
            for value in values:
                family.labels(value)
        registry.register(_Gauges(instances, waiting))

    def added(self, instance: Instance) -> None:
        """Show a server's counters from 0 on."""
        self.ejections.labels(instance.role.value, instance.name)
        (self.without_parameters if instance.role is Role.PREFILL else self.reported).labels(instance.name)

    def ended(self, route: str, outcome: str) -> None:
        """Count a request that has ended; from the first one of a route on, all its outcomes are shown."""
        if route not in self._routes:
            self._routes.add(route)
            for one in RouterFailure:
                self.requests.labels(route, one.value)
        self.requests.labels(route, outcome).inc()

    def removed(self, instance: Instance) -> None:
        """Remove the time series of a server that was removed."""
        for family in (self.legs, self.without_parameters, self.reported, self.ejections):
            family.remove_by_labels({"instance": instance.name})

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, instances: Callable[[], Iterable[Instance]], waiting: Callable[[], int]) -> None:
        self._instances = instances
        self._waiting = waiting

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["role", "instance"]
        up = GaugeMetricFamily(f"{PREFIX}_up", "1 if the health checks of a server succeed, otherwise 0", labels=labels)
        requests = GaugeMetricFamily(f"{PREFIX}_in_flight", "Legs in flight at a server", labels=labels)
        tokens = GaugeMetricFamily(
            f"{PREFIX}_outstanding_tokens", "Estimated tokens of the legs in flight at a server", labels=labels
        )
        for one in self._instances():
            where = [one.role.value, one.name]
            up.add_metric(where, float(one.state is Health.UP))
            requests.add_metric(where, one.requests)
            tokens.add_metric(where, one.tokens)
        yield from (up, requests, tokens)
        yield GaugeMetricFamily(
            f"{PREFIX}_waiting_requests", "Requests that wait until decode servers have room", value=self._waiting()
        )
