# SPDX-License-Identifier: Apache-2.0
"""The same arms on a CPU and on a GPU: the device options that a server gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.byte_equivalence.arms import ARMS, of_size, specs
from experiments.common import device
from experiments.common.servers import ServerSpec


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(device, "has_gpu", lambda: request.param)
    return bool(request.param)


def extra_of(spec: ServerSpec) -> dict[str, Any]:
    command = spec.command(8000, "e")
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra: dict[str, Any] = config["kv_connector_extra_config"]
    return extra


def test_an_arm_takes_the_path_of_its_name(has_gpu: bool, tmp_path: Path) -> None:
    """On a CPU the proof finds it out, where registrations are as the arm has them; on a GPU it is asked for."""
    for arm in (arm for arm in ARMS if arm.kvcached):
        for number, spec in enumerate(specs(arm, tmp_path, "float32", {})):
            is_decode = number >= arm.servers
            is_staged = is_decode if arm.decode else arm.is_staged and not (arm.prefill and is_decode)
            path = extra_of(spec).get("memory_path")
            given = device.environment(spec.environment, 1, forks=True)
            if has_gpu:
                assert path in (("device", "host") if is_staged else ("direct",)), spec.name
                assert not any("HOSTVMM" in name or "CPU" in name or "EXPERIMENT" in name for name in given)
            else:
                is_pinned = given[device.REGISTRATION] == "pinned"
                assert is_staged is (is_pinned or path in ("device", "host")), spec.name


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_have_a_gpu_each(has_gpu: bool, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Servers share one; the ranks of a server cannot. On a CPU there is nothing to share."""
    monkeypatch.setattr(device, "num_gpus", lambda: gpus if has_gpu else 0)
    most = max(arm.ranks for arm in of_size("full", "0.28.0"))
    assert most == (1 if has_gpu and gpus == 1 else 2)


@pytest.mark.parametrize(("vllm", "usual"), [("0.28.0", "V1"), ("0.30.0", "V2"), (None, "V1")])
def test_runner_v2_is_interpreted_where_there_is_no_gpu(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: str | None, usual: str
) -> None:
    """All servers of an arm have the runner of its name, the others the usual one; Triton compiles on a GPU."""
    monkeypatch.setattr(device, "found_version", lambda library: vllm)
    for arm in ARMS:
        for spec in specs(arm, tmp_path, "float32", {}):
            given = device.environment(spec.environment, 1, forks=True)
            expected = "V2" if arm.has_own_runner else usual
            assert given["VLLM_USE_V2_MODEL_RUNNER"] == {"V1": "0", "V2": "1"}[expected]
            assert ("TRITON_INTERPRET" in given) is (expected == "V2" and not has_gpu)
