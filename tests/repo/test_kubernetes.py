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
from support.kubernetes import Object, faults, read, workloads


def test_the_manifests_fit_together() -> None:
    assert faults(read()) == []


def test_no_file_is_left_out() -> None:
    names = {path.name for path in kubernetes.FOLDER.iterdir()}
    assert names == {"prefill.yaml", "decode.yaml", "network-policy.yaml"}


def of(objects: list[Object], kind: str, name: str) -> Any:
    (found,) = [one["spec"] for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def test_decode_knows_each_prefill_and_clients_know_one_name_for_all_decodes() -> None:
    """Decode would know one address for all servers behind a Service that is not headless."""
    assert [of(read(), "Service", name).get("clusterIP") for name in ("prefill", "decode")] == ["None", None]


def container(objects: list[Object], name: str) -> Any:
    return workloads(objects)[name].pod["containers"][0]


def drop_variable(objects: list[Object], name: str, variable: str) -> None:
    one = container(objects, name)
    one["env"] = [each for each in one["env"] if each["name"] != variable]


def policy(objects: list[Object], name: str = "kvcached-nixl-servers") -> Any:
    return of(objects, "NetworkPolicy", name)


def drop_port(objects: list[Object], direction: str, port: int) -> None:
    for rule in policy(objects)[direction]:
        rule["ports"] = [one for one in rule["ports"] if one["port"] != port]


PLANTED: dict[str, tuple[Callable[[list[Object]], Any], str]] = {
    "policy without the side channel": (lambda o: drop_port(o, "ingress", 5600), "network: prefill may reach"),
    "servers open to all": (lambda o: policy(o)["ingress"].append({}), "network: anything else may reach"),
    "decode may go anywhere": (lambda o: policy(o)["egress"].append({}), "network: decode may connect to others"),
    "Service of other pods": (
        lambda o: of(o, "Service", "prefill")["selector"].update({kubernetes.COMPONENT: "decode"}),
        "selectors: Service prefill selects ['decode']",
    ),
    "gate": (lambda o: drop_variable(o, "prefill", "ENABLE_KVCACHED"), "environment: prefill: ENABLE_KVCACHED"),
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
