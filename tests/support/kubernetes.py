# SPDX-License-Identifier: Apache-2.0
"""Reads the Kubernetes manifests of docs/deploy/kubernetes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs/deploy/kubernetes"
ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
ADDRESS, PORT, RANGE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_TCP_PORT_RANGE"
KEY = "VLLM_API_KEY"

Object = dict[str, Any]


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
        """Where the cluster gets a variable from."""
        found: Object = next(one for one in self.spec["env"] if one["name"] == variable)["valueFrom"]
        return found

    def value(self, flag: str) -> str:
        """The value of ``--flag=value``, or of ``--flag value``."""
        words = self.command
        given = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        return given[0] if given else words[words.index(flag) + 1]

    @property
    def transfer(self) -> Object:
        found: Object = json.loads(self.value("--kv-transfer-config"))
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
