# SPDX-License-Identifier: Apache-2.0
"""What the router counts. Once per process; labels are short lists: routes, roles, causes, servers that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvcached_nixl.proxy.instance import Instance, State

__all__ = ["Metrics"]

PREFIX = "kvcached_nixl_router"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300)


class Metrics:
    """See the module.

    Args:
        instances: the servers of the moment, for gauges; read when ``/metrics`` is.
    """

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", description, labels, registry=registry)

        def histogram(name: str, description: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", description, labels, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Requests, by outcome: ok, or the cause of failure", "route", "outcome")
        self.legs = counter("legs", "Legs, by outcome: ok, or the cause of failure", "role", "instance", "outcome")
        self.handovers = counter("handovers", "Requests by direction: pull, push or decode alone", "direction")
        self.alone = counter("decode_alone", "Prompts that decode was to compute itself, by reason", "reason")
        self.retries = counter("retries", "Attempts that were followed by another, by cause", "cause")
        self.without_parameters = counter(
            "prefills_without_parameters", "Prefill's answers without kv_transfer_params: decode computed", "instance"
        )
        self.reported = counter(
            "reported_handover_failures",
            "Hand-overs without KV that decode servers count: recomputed, or failed, as kv_load_failure_policy says",
            "instance",
        )
        self.ejections = counter("ejections", "Servers that get no requests any more", "role", "instance")
        self.first_seconds = histogram("time_to_first_token_seconds", "Until the client has the first piece", "route")
        self.request_seconds = histogram("request_seconds", "Until the client has the whole answer", "route")
        self.leg_seconds = histogram("leg_seconds", "In one leg", "role")
        registry.register(_Gauges(instances))

    def removed(self, instance: Instance) -> None:
        """A server is not known any more: its series go."""
        for family in (self.legs, self.without_parameters, self.reported, self.ejections):
            family.remove_by_labels({"instance": instance.name})

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self._instances = instances

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["role", "instance"]
        up = GaugeMetricFamily(f"{PREFIX}_up", "Whether a server's health checks succeed", labels=labels)
        requests = GaugeMetricFamily(f"{PREFIX}_in_flight", "Legs that a server works on", labels=labels)
        tokens = GaugeMetricFamily(f"{PREFIX}_outstanding_tokens", "About how many a server has to do", labels=labels)
        for one in self._instances():
            where = [one.role.value, one.name]
            up.add_metric(where, float(one.state is State.UP))
            requests.add_metric(where, one.requests)
            tokens.add_metric(where, one.tokens)
        yield from (up, requests, tokens)
