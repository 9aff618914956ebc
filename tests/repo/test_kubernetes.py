# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests of docs/deploy fit together, and a server that they start is as the doctor wants it.

Schemas are in tests/stacks/test_kubernetes.py, where the command lines are run, too; vLLM's own parser is asked in
tests/contract/test_deploy.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="reading manifests needs PyYAML, which vLLM brings")
from support import kubernetes
from support.kubernetes import ADDRESS, ROLES, Object, faults, read, workloads

from kvcached_nixl.cli.deploy import examine
from kvcached_nixl.cli.deploy.situation import Host
from kvcached_nixl.cli.limits import FILES, LOCKED, MAPPINGS, SHARED, UNLIMITED, Limits

SERVERS = ("prefill.yaml", "decode.yaml", "network-policy.yaml")
ROUTERS = ("router-vllm-router.yaml", "router-kvcached-nixl.yaml")
POD = "10.1.2.3"


@pytest.mark.parametrize("router", ROUTERS)
def test_the_manifests_fit_together(router: str) -> None:
    assert faults(read(*SERVERS, router)) == []


def test_no_file_is_left_out() -> None:
    assert {path.name for path in kubernetes.FOLDER.iterdir()} == {*SERVERS, *ROUTERS}


def of(objects: list[Object], kind: str, name: str) -> Any:
    (found,) = [one["spec"] for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def container(objects: list[Object], name: str) -> Any:
    return workloads(objects)[name].pod["containers"][0]


def drop_variable(objects: list[Object], name: str, variable: str) -> None:
    one = container(objects, name)
    one["env"] = [each for each in one["env"] if each["name"] != variable]


def replace(objects: list[Object], name: str, old: str, new: str) -> None:
    one = container(objects, name)
    replaced = [word.replace(old, new) for word in one["args"]]
    assert replaced != one["args"]
    one["args"] = replaced


def policy(objects: list[Object], name: str = "kvcached-nixl-servers") -> Any:
    return of(objects, "NetworkPolicy", name)


def drop_port(objects: list[Object], direction: str, port: int) -> None:
    for rule in policy(objects)[direction]:
        rule["ports"] = [one for one in rule["ports"] if one["port"] != port]


PLANTED: dict[str, tuple[Callable[[list[Object]], Any], str]] = {
    "policy without the side channel": (lambda o: drop_port(o, "ingress", 5600), "network: prefill may reach"),
    "policy that lets none out to it": (lambda o: drop_port(o, "egress", 5600), "network: prefill may reach"),
    "policy without NIXL's ports": (lambda o: drop_port(o, "ingress", 20000), "network: prefill may reach"),
    "side channel open to the router": (
        lambda o: policy(o)["ingress"][0]["ports"].append({"port": 5600}),
        "network: router may reach",
    ),
    "servers open to all": (lambda o: policy(o)["ingress"].append({}), "network: anything else may reach"),
    "servers without a policy": (lambda o: o.remove(next(x for x in o if x["kind"] == "NetworkPolicy")), "every port"),
    "decode may go anywhere": (lambda o: policy(o)["egress"].append({}), "network: decode may connect to others"),
    "policy of another component": (
        lambda o: policy(o)["podSelector"]["matchExpressions"][0].update(values=["decoder"]),
        "selectors: NetworkPolicy kvcached-nixl-servers selects nothing",
    ),
    "clients kept out": (
        lambda o: policy(o, "kvcached-nixl-router")["ingress"].clear(),
        "network: clients cannot reach the router",
    ),
    "another range of ports": (lambda o: drop_variable(o, "decode", "UCX_TCP_PORT_RANGE"), "network: decode: UCX_TCP"),
    "Service of other pods": (
        lambda o: of(o, "Service", "prefill")["selector"].update({kubernetes.COMPONENT: "decode"}),
        "selectors: Service prefill selects ['decode']",
    ),
    "budget of all pods": (
        lambda o: of(o, "PodDisruptionBudget", "decode").update(selector={}),
        "selectors: PodDisruptionBudget decode selects",
    ),
    "names that do not exist": (
        lambda o: of(o, "Service", "decode").pop("clusterIP"),
        "selectors: decode: serviceName decode is no headless Service",
    ),
    "HTTP port": (lambda o: replace(o, "prefill", "--port=8000", "--port=8001"), "ports: prefill: --port 8001"),
    "side-channel port": (
        lambda o: container(o, "decode")["ports"][1].update(containerPort=5601),
        "ports: decode: VLLM_NIXL_SIDE_CHANNEL_PORT=5600",
    ),
    "probe of no port": (
        lambda o: container(o, "decode")["readinessProbe"]["httpGet"].update(port="htpp"),
        "ports: decode: readinessProbe asks port htpp",
    ),
    "no startup probe": (lambda o: container(o, "prefill").pop("startupProbe"), "ports: prefill lacks a probe"),
    "side channel behind a Service": (
        lambda o: of(o, "Service", "prefill")["ports"].append({"targetPort": "side-channel"}),
        "ports: Service prefill leads to side-channel",
    ),
    "role": (lambda o: replace(o, "prefill", "kv_producer", "kv_both"), "configuration: prefill: kv_role kv_both"),
    "policy of one side": (lambda o: replace(o, "decode", "recompute", "fail"), "configuration: prefill and decode"),
    "no policy": (lambda o: replace(o, "decode", "recompute", "retry"), "configuration: decode: no kv_load_failure"),
    "leases": (lambda o: replace(o, "prefill", 'duration": 30', 'duration": 40'), "configuration: prefill and decode"),
    "gate": (lambda o: drop_variable(o, "prefill", "ENABLE_KVCACHED"), "environment: prefill: ENABLE_KVCACHED"),
    "address": (lambda o: drop_variable(o, "decode", ADDRESS), f"environment: decode: {ADDRESS}"),
    "service links": (lambda o: workloads(o)["decode"].pod.pop("enableServiceLinks"), "could set VLLM_PORT"),
    "doctor of another server": (
        lambda o: workloads(o)["decode"].pod["initContainers"][0]["args"].append("--enforce-eager"),
        "environment: decode: the doctor examines another",
    ),
    "shared memory": (
        lambda o: next(v for v in workloads(o)["prefill"].pod["volumes"] if v["name"] == "shared-memory")[
            "emptyDir"
        ].pop("medium"),
        "environment: prefill: /dev/shm",
    ),
    "/tmp": (
        lambda o: container(o, "decode")["volumeMounts"].pop(2),
        "environment: decode: /tmp is no folder of its own",
    ),
    "grace period": (
        lambda o: workloads(o)["decode"].pod.update(terminationGracePeriodSeconds=30),
        "shutdown: decode: a grace period of 30 s",
    ),
    "decode replaced by itself": (
        lambda o: of(o, "StatefulSet", "decode")["updateStrategy"].update(type="RollingUpdate"),
        "shutdown: decode: updateStrategy RollingUpdate",
    ),
    "shorter than a lease": (
        lambda o: replace(o, "prefill", "timeout=60", "timeout=20"),
        "shutdown: prefill: --shutdown-timeout 20 and a lease of 30 s",
    ),
    "a pod without requests": (
        lambda o: of(o, "StatefulSet", "decode").update(replicas=3),
        "router: --decode ['http://decode-0.decode:8000', 'http://decode-1.decode:8000'], and the pods are",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    plant, found = PLANTED[name]
    # A copy without YAML's aliases: a change in one place must not appear in the other.
    objects = [without_aliases(one) for one in read(*SERVERS, ROUTERS[0])]
    plant(objects)
    assert [line for line in faults(objects) if found in line]


def without_aliases(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_aliases(one) for key, one in value.items()}
    return [without_aliases(one) for one in value] if isinstance(value, list) else copy.copy(value)


def test_a_router_flag_that_does_not_exist_is_found() -> None:
    objects = [without_aliases(one) for one in read(*SERVERS, ROUTERS[1])]
    container(objects, "router")["args"].append("--policies=none")
    assert faults(objects) == ["router: the router knows no --policies=none"]


class Pod(Host):
    """A pod as the manifests make it."""

    def why_not_bound(self, address: str, port: int) -> int | None:
        return None

    def why_not_written(self, folder: Path) -> str | None:
        return None if folder in (Path("/tmp"), Path("/cache/.cache")) else "Read-only file system"

    def limits(self) -> Limits:
        return {LOCKED: UNLIMITED, FILES: 65_536, MAPPINGS: 65_530, SHARED: 4 << 30}

    def most_open_files(self) -> int:
        return 1 << 20

    def has(self, path: str) -> bool:
        return path == "/dev/nvidiactl"


@pytest.mark.parametrize("name", ROLES)
def test_the_doctor_finds_nothing_in_a_pod(name: str) -> None:
    """No advice either. What is installed here is not what the image has."""
    one = workloads(read(*SERVERS))[name].serving
    environ = {**one.environ, ADDRESS: POD, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    found = examine.examine(environ, command=one.command, host=Pod())
    of_image = ("vLLM version", "kvcached version", "NIXL", "runner")
    assert [one for one in found.findings if one.name not in of_image] == []
    assert found.facts["role"] == ROLES[name] and f"peers get {POD}:5600 " in found.facts["side channel"]
