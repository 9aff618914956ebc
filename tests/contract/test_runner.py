# SPDX-License-Identifier: Apache-2.0
"""Compares what `adapter.versions` says about kvcached and vLLM with both, and with vLLM's own answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")

from kvcached_nixl.errors import Refused
from kvcached_nixl.vllm.adapter.platform import ask
from kvcached_nixl.vllm.adapter.series import BEYOND_KVCACHED
from kvcached_nixl.vllm.adapter.versions import SWITCH, accepted, found_version, installed_has, outlook, row_of, stated
from kvcached_nixl.vllm.patches.windows import Windows

VLLM = str(found_version("vllm"))
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


class HasBegun(Exception):
    """kvcached has let the engine start."""


def starts(monkeypatch: pytest.MonkeyPatch, version: str, is_v2: bool) -> str:
    """What kvcached says to an engine of this version with this runner; empty if it lets it start."""
    from kvcached.integration.vllm import interfaces, patches
    from kvcached.utils import KVCachedConfigError

    def begin(**_: Any) -> None:
        raise HasBegun

    class EngineCore:
        def __init__(self, vllm_config: Any) -> None:
            raise AssertionError("kvcached asks before vLLM starts")

    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setenv("KVCACHED_PP_SIZE", "1")
    monkeypatch.setattr(interfaces, "init_kvcached", begin)
    patch = patches.EngineCorePatch()
    patch.detected_version = version
    module = types.ModuleType("engine")
    module.EngineCore = EngineCore  # type: ignore[attr-defined]
    assert patch.patch_engine_init(module)
    parallel = types.SimpleNamespace(
        pipeline_parallel_size=1, tensor_parallel_size=1, distributed_executor_backend="mp"
    )
    config = types.SimpleNamespace(
        use_v2_model_runner=is_v2,
        parallel_config=parallel,
        scheduler_config=types.SimpleNamespace(async_scheduling=False),
    )
    try:
        EngineCore(config)
    except HasBegun:
        return ""
    except KVCachedConfigError as cause:
        return str(cause)
    raise AssertionError("neither refused nor begun")


@pytest.mark.parametrize("minor", range(26, 34))
def test_kvcached_accepts_what_is_written_down(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    """Its own check, asked for every series and both runners; where it says what to set, so do we. Beyond its windows
    with these open, as in a server with a series of the table."""
    from kvcached.integration.version_utils import VersionRange

    version = f"0.{minor}.0"
    opened, original = Windows(), VersionRange.contains
    opened.is_open = row_of(version) is not None
    monkeypatch.setattr(VersionRange, "contains", lambda self, ver: original(self, ver) or opened.contains(self, ver))
    said = {runner: starts(monkeypatch, version, runner == "V2") for runner in ("V1", "V2")}
    assert tuple(runner for runner, words in said.items() if not words) == accepted(version)
    for runner, words in said.items():
        (one,) = outlook(version, {SWITCH: str(int(runner == "V2"))})
        assert (f"{SWITCH}=0" in words) == (one.refusal is not None and f"{SWITCH}=0" in one.refusal.remedy)


@pytest.mark.parametrize("text", [None, "0", "1", "2", "", "true"])
def test_vllm_reads_its_switch_like_that(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Unset, as a number, and what it cannot read."""
    from vllm import envs

    monkeypatch.delenv(SWITCH, raising=False)
    if text is not None:
        monkeypatch.setenv(SWITCH, text)
    try:
        read = envs.VLLM_USE_V2_MODEL_RUNNER
    except ValueError:
        with pytest.raises(Refused):
            stated(os.environ)
    else:
        assert stated(os.environ) is read
        assert (read is None) == (text is None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_command_gives_vllms_own_answer(tmp_path: Path) -> None:
    """For this device and, on a CPU, for a GPU as well. Nothing but JSON is on standard output."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environ = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-m", "kvcached_nixl", "--json", "--model", str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    found = json.loads(done.stdout)
    rows = found["runner"]
    refused = {"model", "runner"} & {refusal["name"] for refusal in found["refusals"]}
    # Without Triton, as on most machines without a GPU, it is V1, which kvcached accepts up to 0.28.
    is_refused = any(row["is_here"] and row["runner"] not in accepted(VLLM) for row in rows)
    assert refused == ({"runner"} if is_refused else set())
    assert all("Qwen3ForCausalLM" in row["why"] for row in rows)
    by_device = {row["device"]: row for row in rows}
    assert by_device["cuda"]["runner"] == "V2" and by_device["cuda"]["is_here"] == ("cpu" not in by_device)
    # vLLM 0.31 gives the reason when it is imported, before it is asked.
    is_said_here = not installed_has(BEYOND_KVCACHED)
    if "cpu" in by_device and by_device["cpu"]["runner"] == "V1" and is_said_here:
        assert "requires Triton" in by_device["cpu"]["why"]


def test_a_model_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """By vLLM, in our four lines."""
    with pytest.raises(Refused, match="vLLM cannot make a configuration for"):
        ask(str(tmp_path), VLLM)
