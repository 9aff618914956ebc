# SPDX-License-Identifier: Apache-2.0
"""The claims of this tier with the real vLLM and kvcached of this environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import FOLDER
from support.environments import REPOSITORY, SITECUSTOMIZE, Environment

from kvcached_nixl.vllm.adapter.versions import ROWS, found_version, row_of

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.skipif(
        row_of(found_version("vllm")) is None or found_version("kvcached") is None,
        reason=f"needs kvcached and one of vLLM {', '.join(row.tested for row in ROWS)} in this environment",
    ),
]

PATH = (SITECUSTOMIZE, REPOSITORY)
"""An installed package would come before the former's."""


def probe(environment: Environment, what: str, *path: Path, **environ: str) -> dict[str, Any]:
    done = environment.run(str(FOLDER / "real_probe.py"), what, path=path, **environ)
    assert done.returncode == 0, done.stderr
    state: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return state


def test_every_target_is_the_stock_object_when_off_and_again_after_uninstalling(
    this_environment: Environment, unpacked: Path
) -> None:
    """Compared by identity, in one process, for every object that a patch replaces."""
    state = probe(this_environment, "untouched", unpacked)
    assert len(state["targets"]) >= 5
    assert sorted(state["same_when_closed"]) == state["targets"]
    assert state["changed_when_open"] == state["applied"]
    assert sorted(state["same_after"]) == state["targets"]
    assert state["left"] == []


def test_a_script_that_opens_the_gate_ends_as_an_interpreter_that_started_with_it(
    this_environment: Environment, unpacked: Path
) -> None:
    """vLLM's plugin loader, run by EngineArgs, is early enough; kvcached's own patch comes off the real classes. And no
    plugin loader is needed where the package was there at the start of the interpreter."""
    script = probe(this_environment, "script", unpacked)
    started = probe(this_environment, "start", *PATH, ENABLE_KVCACHED="1")
    watched = probe(this_environment, "enabled", *PATH, VLLM_PLUGINS="lora_filesystem_resolver")
    assert watched == started
    assert script["outcomes"] == started["outcomes"]
    assert {state for state, _ in script["outcomes"].values()} <= {"applied", "skipped"}
    assert script["refusals"] == started["refusals"] == []
    assert "inherited again" in script["notes"]["kvcached.patch_connector"][0]
    assert any("superseded" in note for note in started["notes"]["kvcached.patch_connector"])


def test_a_gate_that_opens_after_vllm_was_imported_leaves_vllm_stock(this_environment: Environment) -> None:
    """kvcached would have patched it, and be on when an engine is made. A child of the script has both or none."""
    environ = {"KVCACHED_AUTOPATCH": "1", "VLLM_PLUGINS": "lora_filesystem_resolver"}
    state = probe(this_environment, "late", *PATH, **environ)
    assert (state["is_elastic"], state["is_ours"]) == (False, False)
    assert state["child"] == probe(this_environment, "start", *PATH, ENABLE_KVCACHED="1", **environ)
    assert state["child"]["refusals"] == []


def test_the_command_finds_nothing_to_refuse(this_environment: Environment) -> None:
    """Exit status 0 with a tested vLLM, kvcached and NIXL; but not where kvcached is told to leave vLLM alone."""
    done = this_environment.run("-m", "kvcached_nixl", path=PATH)
    assert done.returncode == 0, done.stdout + done.stderr
    done = this_environment.run("-m", "kvcached_nixl", path=PATH, KVCACHED_AUTOPATCH="0")
    assert done.returncode == 1
    assert done.stdout.count("\nrefused: ") == done.stdout.count("\nrefused: kvcached's patches\n") == 1
