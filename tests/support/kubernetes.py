# SPDX-License-Identifier: Apache-2.0
"""Reads the Kubernetes manifests of docs/deploy/kubernetes, and compares what they repeat in several places.

A schema validator accepts a NetworkPolicy without the side channel, or a probe of a port that nothing listens at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcached_nixl.cli.deploy.serve_command import ServeCommand
from kvcached_nixl.proxy.options import add_arguments, from_arguments
from kvcached_nixl.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "docs/deploy/kubernetes"
ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
COMPONENT = "app.kubernetes.io/component"
ADDRESS, PORT, RANGE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TCP_PORT_RANGE"
LEAST_SHARED_GIB = 1
WORKLOADS = ("StatefulSet", "Deployment")

Object = dict[str, Any]
Ports = frozenset[tuple[int, int]]
"""(first, last) of each range."""


def read(*names: str) -> list[Object]:
    """The objects of these files; of every file without names."""
    paths = [FOLDER / name for name in names] or sorted(FOLDER.glob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


@dataclass(frozen=True)
class Container:
    """A container of a workload. Its variables are "" where the cluster fills them in."""

    spec: Object

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.spec.get("command", ()), *self.spec.get("args", ()))

    @property
    def environ(self) -> dict[str, str]:
        return {one["name"]: one.get("value", "") for one in self.spec.get("env", ())}

    def field_of(self, variable: str) -> str | None:
        """The pod's field that a variable has."""
        found = next((one for one in self.spec.get("env", ()) if one["name"] == variable), {})
        path = found.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        return path if isinstance(path, str) else None

    @property
    def ports(self) -> dict[str, int]:
        return {one["name"]: one["containerPort"] for one in self.spec.get("ports", ())}

    @property
    def probes(self) -> dict[str, Object]:
        return {name: probe for name, probe in self.spec.items() if name.endswith("Probe")}


@dataclass(frozen=True)
class Workload:
    """A StatefulSet or Deployment; its first container is the one that serves."""

    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def pod(self) -> Object:
        found: Object = self.object["spec"]["template"]["spec"]
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.object["spec"]["template"]["metadata"]["labels"]
        return found

    @property
    def serving(self) -> Container:
        return Container(self.pod["containers"][0])

    @property
    def serve(self) -> ServeCommand:
        return ServeCommand(self.serving.command)

    @property
    def shutdown_seconds(self) -> int:
        """What the serving program takes at most to end, by its own flags, and before it is told to."""
        flags = ("--shutdown-timeout", "--drain-timeout")
        sleeps = self.serving.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())
        waits = int(sleeps[1]) if sleeps[:1] == ["sleep"] else 0
        return waits + max(int(self.serve.value(flag) or 0) for flag in flags)


def workloads(objects: Sequence[Object]) -> dict[str, Workload]:
    return {one["metadata"]["name"]: Workload(one) for one in objects if one["kind"] in WORKLOADS}


def faults(objects: Sequence[Object]) -> list[str]:
    """What does not fit together, a line each."""
    found = workloads(objects)
    return [f"{check.__name__}: {fault}" for check in CHECKS for fault in check(objects, found)]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector of a policy selects a pod; an empty one selects every pod."""
    for rule in selector.get("matchExpressions", ()):
        if rule["operator"] != "In":
            raise ValueError(f"found operator {rule['operator']}; expected In. The check would not mean anything.")
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def one_way(objects: Sequence[Object], direction: str, of: Mapping[str, str], peer: Mapping[str, str]) -> Ports | None:
    """The TCP ports that the policies of a pod allow it to receive at ("Ingress") or to connect to ("Egress").

    As Kubernetes defines it: without a policy for a direction everything is allowed. None: every port.
    """
    side = {"Ingress": "from", "Egress": "to"}[direction]
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    named = [one for one in policies if selects(one["podSelector"], of) and direction in one["policyTypes"]]
    rules = [rule for policy in named for rule in policy.get(direction.lower(), ())]
    fitting = [
        rule
        for rule in rules
        if side not in rule or any(selects(one.get("podSelector", {}), peer) for one in rule[side])
    ]
    if not named or any("ports" not in rule for rule in fitting):
        return None
    found = [port for rule in fitting for port in rule["ports"] if port.get("protocol", "TCP") == "TCP"]
    return frozenset((port["port"], port.get("endPort", port["port"])) for port in found)


def allowed(objects: Sequence[Object], source: Mapping[str, str], target: Mapping[str, str]) -> Ports | None:
    """The TCP ports of ``target`` that pods labelled ``source`` may connect to, by the policies of both."""
    into, out = one_way(objects, "Ingress", target, source), one_way(objects, "Egress", source, target)
    return out if into is None else into if out is None else into & out


# ------------------------------------------------------------------------------------------------------------- checks

Found = Mapping[str, Workload]


def selectors(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """A Service, a PodDisruptionBudget and a workload's own selector mean exactly one workload."""
    for one in objects:
        kind, name, spec = one["kind"], one["metadata"]["name"], one["spec"]
        if kind == "NetworkPolicy":
            if not any(selects(spec["podSelector"], workload.labels) for workload in found.values()):
                yield f"NetworkPolicy {name} selects nothing"
            continue
        selector = {"matchLabels": spec["selector"]} if kind == "Service" else spec["selector"]
        selected = [other for other, workload in found.items() if selects(selector, workload.labels)]
        if selected != [name]:
            yield f"{kind} {name} selects {selected}"
    for name, workload in found.items():
        service = workload.object["spec"].get("serviceName")
        headless = [
            o["metadata"]["name"] for o in objects if o["kind"] == "Service" and o["spec"].get("clusterIP") == "None"
        ]
        if service is not None and service not in headless:
            yield f"{name}: serviceName {service} is no headless Service"


def ports(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Flags, container ports, probes and Services name the same ports; no Service leads to the side channel."""
    for name, workload in found.items():
        one = workload.serving
        if workload.serve.value("--port") != str(one.ports.get("http")):
            yield f"{name}: --port {workload.serve.value('--port')}, container port http {one.ports.get('http')}"
        if name in ROLES and one.environ.get(PORT) != str(one.ports.get("side-channel")):
            yield f"{name}: {PORT}={one.environ.get(PORT)}, container port {one.ports.get('side-channel')}"
        for kind, probe in one.probes.items():
            port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
            if port not in one.ports:
                yield f"{name}: {kind} asks port {port}"
        if name in ROLES and {"startupProbe", "readinessProbe", "livenessProbe"} - {*one.probes}:
            yield f"{name} lacks a probe"
    for service in (one for one in objects if one["kind"] == "Service"):
        workload = found[service["metadata"]["name"]]
        for port in service["spec"]["ports"]:
            if port["targetPort"] != "http" or port["targetPort"] not in workload.serving.ports:
                yield f"Service {workload.name} leads to {port['targetPort']}"


def configuration(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Both sides have the same settings, which this package accepts, and differ in the role."""
    configs = {name: dict(found[name].serve.transfer or {}) for name in ROLES}
    for name, config in configs.items():
        role = config.pop("kv_role", None)
        if role != ROLES[name]:
            yield f"{name}: kv_role {role}"
        if config.get("kv_load_failure_policy") not in ("fail", "recompute"):
            yield f"{name}: no kv_load_failure_policy"
        Settings.from_extra_config(config.get("kv_connector_extra_config", {}))
    if configs["prefill"] != configs["decode"]:
        yield f"prefill and decode differ: {configs}"


def environment(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """What a server's process has to have around it; the doctor before it has the same."""
    for name in ROLES:
        workload = found[name]
        one, pod = workload.serving, workload.pod
        if one.environ.get("ENABLE_KVCACHED") != "true":
            yield f"{name}: ENABLE_KVCACHED is {one.environ.get('ENABLE_KVCACHED')!r}"
        if one.field_of(ADDRESS) != "status.podIP":
            yield f"{name}: {ADDRESS} is {one.field_of(ADDRESS)}"
        if pod.get("enableServiceLinks") is not False:
            yield f"{name}: a Service could set VLLM_PORT"
        (doctor,) = map(Container, pod["initContainers"])
        if doctor.command[-len(one.command) - 1 :] != ("--", *one.command) or doctor.spec["env"] != one.spec["env"]:
            yield f"{name}: the doctor examines another command or environment"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one.spec["volumeMounts"]}
        shared = mounts.get("/dev/shm", {}).get("emptyDir", {})
        size = str(shared.get("sizeLimit", "0Gi"))
        if shared.get("medium") != "Memory" or not size.endswith("Gi") or int(size[:-2]) < LEAST_SHARED_GIB:
            yield f"{name}: /dev/shm is {shared}"
        for folder in ("/tmp", one.environ.get("HOME", "/")):
            if "emptyDir" not in mounts.get(folder, {}):
                yield f"{name}: {folder} is no folder of its own"
        if one.spec["resources"]["limits"].get("nvidia.com/gpu") != 1:
            yield f"{name}: no GPU"


def shutdown(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """The grace period is longer than what a program takes to end; prefill's is not shorter than a lease.

    Decode's pods are not replaced by themselves: vLLM answers requests with status 200 and no text while it drains.
    """
    for name, workload in found.items():
        grace = workload.pod["terminationGracePeriodSeconds"]
        if not grace > workload.shutdown_seconds:
            yield f"{name}: a grace period of {grace} s, and {workload.shutdown_seconds} s to end"
    prefill = found["prefill"]
    extra = (prefill.serve.transfer or {}).get("kv_connector_extra_config", {})
    lease = Settings.from_extra_config(extra).kv_lease_duration_seconds
    if (kind := found["decode"].object["spec"]["updateStrategy"]["type"]) != "OnDelete":
        yield f"decode: updateStrategy {kind}"
    if prefill.shutdown_seconds < lease:
        yield f"prefill: --shutdown-timeout {prefill.shutdown_seconds} and a lease of {lease:g} s"


def network(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Servers reach each other's side channel and NIXL's ports, the router HTTP only, and nobody else anything."""
    first, _, last = found["prefill"].serving.environ.get(RANGE, "0-0").partition("-")
    of_ucx = (int(first), int(last))
    for name in ROLES:
        target = found[name]
        http, side_channel = (target.serving.ports[port] for port in ("http", "side-channel"))
        if target.serving.environ.get(RANGE) != f"{first}-{last}":
            yield f"{name}: {RANGE}={target.serving.environ.get(RANGE)}"
        expected = {
            **{other: frozenset({(side_channel, side_channel), of_ucx}) for other in ROLES},
            "router": frozenset({(http, http)}),
            "anything else": frozenset(),
        }
        for source, some in expected.items():
            labels = found[source].labels if source in found else {"app": "other"}
            # Not only together with the source's own policy: that one may be gone tomorrow.
            for ports in (one_way(objects, "Ingress", target.labels, labels), allowed(objects, labels, target.labels)):
                if ports != some:
                    yield f"{source} may reach {name} at {'every port' if ports is None else sorted(ports)}"
    outside = allowed(objects, found["decode"].labels, {"app": "other"})
    if outside != frozenset():
        yield f"decode may connect to others: {outside}"
    router = found["router"]
    port = router.serving.ports["http"]
    if allowed(objects, {"app": "client"}, router.labels) != frozenset({(port, port)}):
        yield "clients cannot reach the router, or reach more than its port"


def router(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """It has one URL for each replica of each role, and its own program accepts the command line."""
    words = found["router"].serving.command
    for name in ROLES:
        workload = found[name]
        service, port = workload.object["spec"]["serviceName"], workload.serving.ports["http"]
        expected = [f"http://{name}-{i}.{service}:{port}" for i in range(workload.object["spec"]["replicas"])]
        given = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
        if given != expected:
            yield f"--{name} {given}, and the pods are {expected}"
    if words[:2] == ("kvcached-nixl", "proxy"):
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(parser)
        arguments, unknown = parser.parse_known_args(words[2:])
        if unknown:
            yield f"the router knows no {' '.join(unknown)}"
        from_arguments(arguments, {})


CHECKS: tuple[Callable[[Sequence[Object], Found], Iterator[str]], ...] = (
    selectors,
    ports,
    configuration,
    environment,
    shutdown,
    network,
    router,
)
