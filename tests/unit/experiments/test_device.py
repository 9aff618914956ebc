# SPDX-License-Identifier: Apache-2.0
"""The same arms on a CPU and on a GPU: the device options that a server gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.byte_equivalence.arms import ARMS, specs
from experiments.common import device
from experiments.common.servers import REPOSITORY, ServerSpec


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


def test_no_harness_names_a_buffer_device() -> None:
    """On a GPU "cpu" is refused, and "cuda" is not there without one."""
    files = [*(REPOSITORY / "experiments").rglob("*.py"), *(REPOSITORY / "tests" / "e2e").rglob("*.py")]
    assert [str(path.relative_to(REPOSITORY)) for path in files if "kv_buffer_device" in path.read_text()] == []
    assert any("kv_connector" in path.read_text() for path in files)
