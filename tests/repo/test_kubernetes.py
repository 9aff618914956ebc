# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests of docs/deploy fit together.

Schemas are in tests/stacks/test_kubernetes.py, where the command lines are run, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("yaml", reason="reading manifests needs PyYAML, which vLLM brings")
from support import kubernetes
from support.kubernetes import ADDRESS, Object, faults, read, workloads


def test_the_manifests_fit_together() -> None:
    assert faults(read()) == []


def test_no_file_is_left_out() -> None:
    names = {path.name for path in kubernetes.FOLDER.iterdir()}
    assert names == {"prefill.yaml", "decode.yaml", "network-policy.yaml"}


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
    "side channel open to clients": (
        lambda o: policy(o, "kvcached-nixl-decode")["ingress"][0]["ports"].append({"port": 5600}),
        "network: anything else may reach decode",
    ),
    "prefill open to clients": (
        lambda o: policy(o, "kvcached-nixl-prefill")["ingress"][0].pop("from"),
        "network: anything else may reach prefill",
    ),
    "decode may not ask": (
        lambda o: policy(o, "kvcached-nixl-decode")["egress"].pop(0),
        "network: decode may reach prefill",
    ),
    "decode may look up no name": (
        lambda o: policy(o, "kvcached-nixl-decode")["egress"].pop(1),
        "network: decode may connect to others",
    ),
    "servers open to all": (lambda o: policy(o)["ingress"].append({}), "network: anything else may reach"),
    "servers without a policy": (
        lambda o: o.__setitem__(slice(None), [x for x in o if x["kind"] != "NetworkPolicy"]),
        "every port",
    ),
    "decode may go anywhere": (lambda o: policy(o)["egress"].append({}), "network: decode may connect to others"),
    "policy of another component": (
        lambda o: policy(o)["podSelector"]["matchExpressions"][0].update(values=["decoder"]),
        "selectors: NetworkPolicy kvcached-nixl-servers selects nothing",
    ),
    "clients kept out": (
        lambda o: policy(o, "kvcached-nixl-decode")["ingress"].clear(),
        "network: anything else may reach decode",
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
    "prefill behind one address": (
        lambda o: of(o, "Service", "prefill").pop("clusterIP"),
        "asking: prefill's Service is not headless",
    ),
    "decode behind many": (
        lambda o: of(o, "Service", "decode").update(clusterIP="None"),
        "asking: decode's Service is headless",
    ),
    "another name": (lambda o: replace(o, "decode", "//prefill:", "//prefills:"), "asking: decode asks"),
    "nobody to ask": (lambda o: replace(o, "decode", '"prefill"', '"Prefill"'), "asking: decode asks None"),
    "prefill without a key": (lambda o: drop_variable(o, "prefill", "VLLM_API_KEY"), "asking: prefill: VLLM_API_KEY"),
    "clients have prefill's key": (
        lambda o: container(o, "decode")["env"][1]["valueFrom"]["secretKeyRef"].update(key="prefill-api-key"),
        "asking: decode: VLLM_API_KEY",
    ),
    "key that is not mounted": (
        lambda o: container(o, "decode")["volumeMounts"][-1].update(mountPath="/secrets"),
        "asking: decode: prefill_api_key_file",
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
    "all on one node": (
        lambda o: workloads(o)["decode"].pod.pop("topologySpreadConstraints"),
        "environment: decode: nothing spreads its pods",
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
    "all replaced at once": (
        lambda o: of(o, "Deployment", "decode").update(replicas=1),
        "shutdown: decode: nobody serves",
    ),
    "shorter than a lease": (
        lambda o: replace(o, "prefill", "timeout=60", "timeout=20"),
        "shutdown: prefill: --shutdown-timeout 20 and a lease of 30 s",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    plant, found = PLANTED[name]
    # A copy without YAML's aliases: a change in one place must not appear in the other.
    objects = [without_aliases(one) for one in read()]
    plant(objects)
    assert [line for line in faults(objects) if found in line]


def without_aliases(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_aliases(one) for key, one in value.items()}
    return [without_aliases(one) for one in value] if isinstance(value, list) else copy.copy(value)
