# SPDX-License-Identifier: Apache-2.0
"""What the Kubernetes manifests of docs/deploy repeat in several places agrees.

A schema validator (tests/stacks/test_kubernetes.py) accepts a NetworkPolicy without the side channel, or a probe of a
port that nothing listens at. The command lines are run there, too.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("yaml", reason="reading manifests needs PyYAML, which vLLM brings")
from support.kubernetes import ADDRESS, FOLDER, KEY, PORT, RANGE, ROLES, Container, read, workloads

from kvcached_nixl.settings import Settings

OBJECTS = read()
WORKLOADS = workloads(OBJECTS)
PREFILL, DECODE = (WORKLOADS[name] for name in ROLES)
KEYS = {"prefill": "prefill-api-key", "decode": "api-key"}
both = pytest.mark.parametrize("name", ROLES)


def spec_of(kind: str, name: str) -> Any:
    (found,) = [one["spec"] for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def extra_of(one: Container) -> dict[str, Any]:
    return {**one.transfer["kv_connector_extra_config"]}


def test_no_file_is_left_out() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"prefill.yaml", "decode.yaml", "network-policy.yaml"}


@both
def test_a_service_and_a_budget_mean_their_workload(name: str) -> None:
    labels = WORKLOADS[name].labels
    assert spec_of("Service", name)["selector"] == labels
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert spec_of(kind, name)["selector"]["matchLabels"] == labels
    assert [one["targetPort"] for one in spec_of("Service", name)["ports"]] == ["http"], "not the side channel"


@both
def test_flags_ports_and_probes_name_the_same_ports(name: str) -> None:
    one = WORKLOADS[name].serving
    assert (one.value("--port"), one.environ[PORT]) == tuple(str(one.ports[port]) for port in ("http", "side-channel"))
    assert {*one.probes} == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {probe["httpGet"]["port"] for probe in one.probes.values()} == {"http"}


def test_both_sides_have_the_same_settings_but_for_whom_decode_asks() -> None:
    configs = {name: WORKLOADS[name].serving.transfer for name in ROLES}
    assert {name: config.pop("kv_role") for name, config in configs.items()} == ROLES
    for config in configs.values():
        Settings.from_extra_config(config["kv_connector_extra_config"])
    for key in ("prefill", "prefill_api_key_file"):
        del configs["decode"]["kv_connector_extra_config"][key]
    assert configs["prefill"] == configs["decode"]


def test_decode_asks_the_headless_service_with_prefills_key() -> None:
    extra, pod = extra_of(DECODE.serving), DECODE.pod
    assert extra["prefill"] == [f"http://prefill:{PREFILL.serving.ports['http']}"]
    assert spec_of("Service", "prefill")["clusterIP"] == "None" and "clusterIP" not in spec_of("Service", "decode")
    found = {name: WORKLOADS[name].serving.source_of(KEY)["secretKeyRef"]["key"] for name in ROLES}
    assert found == KEYS
    (keys,) = [one["secret"]["items"] for one in pod["volumes"] if one["name"] == "keys"]
    assert keys == [{"key": KEYS["prefill"], "path": extra["prefill_api_key_file"].removeprefix("/keys/")}]


@both
def test_what_a_server_has_around_it(name: str) -> None:
    one, pod = WORKLOADS[name].serving, WORKLOADS[name].pod
    assert one.environ["ENABLE_KVCACHED"] == "true" and pod["enableServiceLinks"] is False
    assert one.source_of(ADDRESS) == {"fieldRef": {"fieldPath": "status.podIP"}}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one.spec["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert all("emptyDir" in mounts[folder] for folder in ("/tmp", one.environ["HOME"]))


@both
def test_a_pod_has_the_time_that_its_server_takes_to_end(name: str) -> None:
    one = WORKLOADS[name]
    seconds = int(one.serving.value("--shutdown-timeout"))
    assert one.pod["terminationGracePeriodSeconds"] > seconds >= extra_of(one.serving)["kv_lease_duration"]


def test_the_policies_open_the_side_channel_and_nixls_ports_between_servers_only() -> None:
    first, last = map(int, PREFILL.serving.environ[RANGE].split("-"))
    assert DECODE.serving.environ[RANGE] == f"{first}-{last}"
    side_channel, http = (PREFILL.serving.ports[port] for port in ("side-channel", "http"))
    servers = spec_of("NetworkPolicy", "kvcached-nixl-servers")
    of_hand_over = [(side_channel, side_channel), (first, last)]
    for direction, side in (("ingress", "from"), ("egress", "to")):
        (rule,) = servers[direction]
        assert rule[side] == [{"podSelector": servers["podSelector"]}]
        assert [(one["port"], one.get("endPort", one["port"])) for one in rule["ports"]] == of_hand_over
    (asks,) = spec_of("NetworkPolicy", "kvcached-nixl-prefill")["ingress"]
    assert asks["from"] == [{"podSelector": {"matchLabels": DECODE.labels}}] and asks["ports"][0]["port"] == http
    outside, dns = spec_of("NetworkPolicy", "kvcached-nixl-decode")["egress"]
    assert outside["to"] == [{"podSelector": {"matchLabels": PREFILL.labels}}] and outside["ports"][0]["port"] == http
    assert {one["port"] for one in dns["ports"]} == {53}
