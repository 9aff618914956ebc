# SPDX-License-Identifier: Apache-2.0
"""Reads the Kubernetes manifests of docs/deploy/kubernetes, and compares what they repeat in several places.

What no server shows that tests/stacks starts from them: a schema validator accepts a NetworkPolicy without the side
channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs/deploy/kubernetes"
ROLES = ("prefill", "decode")
COMPONENT = "app.kubernetes.io/component"
ADDRESS, PORT, RANGE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TCP_PORT_RANGE"
KEY = "VLLM_API_KEY"


LEAST_SHARED_GIB = 1

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

    def source_of(self, variable: str) -> Object:
        """Where the cluster gets a variable from; empty if it does not."""
        found = next((one for one in self.spec.get("env", ()) if one["name"] == variable), {})
        source: Object = found.get("valueFrom", {})
        return source

    @property
    def ports(self) -> dict[str, int]:
        return {one["name"]: one["containerPort"] for one in self.spec.get("ports", ())}

    @property
    def probes(self) -> dict[str, Object]:
        return {name: probe for name, probe in self.spec.items() if name.endswith("Probe")}


@dataclass(frozen=True)
class Workload:
    """A Deployment; its first container is the one that serves."""

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


def workloads(objects: Sequence[Object]) -> dict[str, Workload]:
    return {one["metadata"]["name"]: Workload(one) for one in objects if one["kind"] == "Deployment"}


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


def environment(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """What a server's process has to have around it."""
    for name in ROLES:
        workload = found[name]
        one, pod = workload.serving, workload.pod
        if one.environ.get("ENABLE_KVCACHED") != "true":
            yield f"{name}: ENABLE_KVCACHED is {one.environ.get('ENABLE_KVCACHED')!r}"
        if (source := one.source_of(ADDRESS)) != {"fieldRef": {"fieldPath": "status.podIP"}}:
            yield f"{name}: {ADDRESS} is {source}"
        if pod.get("enableServiceLinks") is not False:
            yield f"{name}: a Service could set VLLM_PORT"
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
        spread = [one["labelSelector"] for one in pod.get("topologySpreadConstraints", ())]
        if not spread or not all(selects(one, workload.labels) for one in spread):
            yield f"{name}: nothing spreads its pods over nodes"


def network(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Servers reach each other's side channel and NIXL's ports, decode prefill's HTTP, and clients decode's."""
    first, _, last = found["prefill"].serving.environ.get(RANGE, "0-0").partition("-")
    of_ucx = (int(first), int(last))
    for name in ROLES:
        target = found[name]
        http, side_channel = (target.serving.ports[port] for port in ("http", "side-channel"))
        if target.serving.environ.get(RANGE) != f"{first}-{last}":
            yield f"{name}: {RANGE}={target.serving.environ.get(RANGE)}"
        hand_over = frozenset({(side_channel, side_channel), of_ucx})
        of_http = frozenset({(http, http)})
        of_all = of_http if name == "decode" else frozenset()
        asks = of_http if name == "prefill" else frozenset()
        # As far as both policies let them: decode's ingress lets everybody in, and the other server's egress does not.
        for source, some in {"prefill": hand_over, "decode": hand_over | asks, "anything else": of_all}.items():
            labels = found[source].labels if source in found else {"app": "other"}
            into = one_way(objects, "Ingress", target.labels, labels)
            # Not only together with the source's own policy: that one may be gone tomorrow.
            for ports, expected in ((into, some | of_all), (allowed(objects, labels, target.labels), some)):
                if ports != expected:
                    yield f"{source} may reach {name} at {'every port' if ports is None else sorted(ports)}"
    for name, dns in (("prefill", frozenset()), ("decode", frozenset({(53, 53)}))):
        if (outside := allowed(objects, found[name].labels, {"app": "other"})) != dns:
            yield f"{name} may connect to others: {outside}"


CHECKS: tuple[Callable[[Sequence[Object], Found], Iterator[str]], ...] = (
    selectors,
    environment,
    network,
)
