# SPDX-License-Identifier: Apache-2.0
"""Reads the Kubernetes manifests of docs/deploy/kubernetes, and compares what they repeat in several places.

A schema validator accepts a NetworkPolicy without the side channel, or a probe of a port that nothing listens at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcached_nixl.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "docs/deploy/kubernetes"
ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
COMPONENT = "app.kubernetes.io/component"
ADDRESS, PORT, RANGE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TCP_PORT_RANGE"
KEY = "VLLM_API_KEY"
KEYS: Mapping[str, str] = {"prefill": "prefill-api-key", "decode": "api-key"}
"""Of the secret: what each role wants to be told."""
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

    def value(self, flag: str) -> str | None:
        """The value of ``--flag=value`` or ``--flag value`` in its command line."""
        words = self.command
        for word, following in zip(words, (*words[1:], None), strict=True):
            if word == flag:
                return following
            if word.startswith(f"{flag}="):
                return word.partition("=")[2]
        return None

    @property
    def transfer(self) -> Object:
        found: Object = json.loads(self.value("--kv-transfer-config") or "{}")
        return found

    @property
    def extra(self) -> Object:
        found: Object = self.transfer.get("kv_connector_extra_config", {})
        return found

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

    @property
    def shutdown_seconds(self) -> int:
        """What the serving program takes at most to end, by its own flag."""
        return int(self.serving.value("--shutdown-timeout") or 0)


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


def ports(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Flags, container ports, probes and Services name the same ports; no Service leads to the side channel."""
    for name, workload in found.items():
        one = workload.serving
        if one.value("--port") != str(one.ports.get("http")):
            yield f"{name}: --port {one.value('--port')}, container port http {one.ports.get('http')}"
        if one.environ.get(PORT) != str(one.ports.get("side-channel")):
            yield f"{name}: {PORT}={one.environ.get(PORT)}, container port {one.ports.get('side-channel')}"
        for kind, probe in one.probes.items():
            port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
            if port not in one.ports:
                yield f"{name}: {kind} asks port {port}"
        if {"startupProbe", "readinessProbe", "livenessProbe"} - {*one.probes}:
            yield f"{name} lacks a probe"
    for service in (one for one in objects if one["kind"] == "Service"):
        workload = found[service["metadata"]["name"]]
        for port in service["spec"]["ports"]:
            if port["targetPort"] != "http" or port["targetPort"] not in workload.serving.ports:
                yield f"Service {workload.name} leads to {port['targetPort']}"


def configuration(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Both sides have the same settings, which this package accepts, and differ in the role and in whom decode asks."""
    configs = {name: found[name].serving.transfer for name in ROLES}
    for name, config in configs.items():
        if (role := config.pop("kv_role", None)) != ROLES[name]:
            yield f"{name}: kv_role {role}"
        if config.get("kv_load_failure_policy") not in ("fail", "recompute"):
            yield f"{name}: no kv_load_failure_policy"
        Settings.from_extra_config(config["kv_connector_extra_config"])
    for key in ("prefill", "prefill_api_key_file"):
        configs["decode"]["kv_connector_extra_config"].pop(key, None)
    if configs["prefill"] != configs["decode"]:
        yield f"prefill and decode differ: {configs}"


def asking(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """Decode asks prefill's headless Service, with prefill's key. Clients have a key and a Service of their own."""
    decode = found["decode"]
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    asked = decode.serving.extra.get("prefill")
    if asked != [f"http://prefill:{found['prefill'].serving.ports['http']}"]:
        yield f"decode asks {asked}"
    if services["prefill"].get("clusterIP") != "None":
        yield "prefill's Service is not headless: decode would know one address for all"
    if services["decode"].get("clusterIP") == "None":
        yield "decode's Service is headless: clients would balance by themselves"
    for name, key in KEYS.items():
        secret = found[name].serving.source_of(KEY).get("secretKeyRef", {})
        if secret.get("key") != key:
            yield f"{name}: {KEY} is {secret}"
    volumes = {one["name"]: one.get("secret", {}) for one in decode.pod["volumes"]}
    files = {
        f"{mount['mountPath']}/{item['path']}": item["key"]
        for mount in decode.serving.spec["volumeMounts"]
        for item in volumes[mount["name"]].get("items", ())
    }
    file = decode.serving.extra.get("prefill_api_key_file")
    if files.get(file) != KEYS["prefill"]:
        yield f"decode: prefill_api_key_file {file}, and {files} are mounted"


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


def shutdown(objects: Sequence[Object], found: Found) -> Iterator[str]:
    """The grace period is longer than what a program takes to end; prefill's is not shorter than a lease. An update
    takes one pod at a time, and one is left."""
    for name, workload in found.items():
        grace, of_update = workload.pod["terminationGracePeriodSeconds"], workload.object["spec"]["strategy"]
        if not grace > workload.shutdown_seconds:
            yield f"{name}: a grace period of {grace} s, and {workload.shutdown_seconds} s to end"
        if of_update["rollingUpdate"]["maxUnavailable"] >= workload.object["spec"]["replicas"]:
            yield f"{name}: nobody serves while it is updated"
    prefill = found["prefill"]
    lease = Settings.from_extra_config(prefill.serving.extra).kv_lease_duration_seconds
    if prefill.shutdown_seconds < lease:
        yield f"prefill: --shutdown-timeout {prefill.shutdown_seconds} and a lease of {lease:g} s"


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
    ports,
    configuration,
    asking,
    environment,
    shutdown,
    network,
)
