# SPDX-License-Identifier: Apache-2.0
"""The locked packages of one vLLM are in several files, which together are one environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_loading import load_script

LOCKS = Path(__file__).parents[3] / "experiments" / "locks"

pytest.importorskip("tomllib", reason="locks are made with the Python of experiments/env.sh; tomllib is new in 3.11")
lock = load_script("experiments_lock", LOCKS / "lock.py")


@pytest.mark.parametrize("target", lock.targets(), ids=lambda target: target.own)
def test_files_of_a_target_are_one_environment(target: lock.Target) -> None:  # type: ignore[name-defined]
    """No package twice, none without a hash, and the vLLM, torch and NIXL that versions.in names."""
    lines = [line for file in target.files for line in (LOCKS / file).read_text().splitlines()]
    names = [line.split("==")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert all(" --hash=sha256:" in line for line in lines)
    pins = {line.split()[0] for line in lines}
    assert {*target.requirements(), f"torch=={target.torch}"} <= pins


def test_what_is_common_is_shared() -> None:
    """A package stands in the one file that all targets read that have it, and in no other."""
    found = [lock.Target("0.2", "2.1.0", "1", (), "cuda"), lock.Target("0.2", "2.1.0", "1", (), "cpu")]
    found += [lock.Target("0.1", "2.1.0", "1", (), "cuda"), lock.Target("0.1", "2.1.0", "1", (), "cpu")]
    for target in found:
        of_kind = "tile==1" if target.kind == "cuda" else "openmp==1"
        numpy = f"numpy=={target.vllm}"
        names = ["torch==2.1.0", "triton==3", "rich==1", "nixl==1", f"vllm=={target.vllm}", of_kind, numpy]
        target.pins.update({name: f"{name} --hash=sha256:0" for name in names})
    files = {file: set(pins) for file, pins in lock.spread(found).items()}
    assert files == {
        "torch-2.1.txt": {"torch==2.1.0", "triton==3"},
        "torch-2.1-common.txt": {"rich==1"},
        "torch-2.1-cpu.txt": {"openmp==1"},
        "torch-2.1-cuda.txt": {"tile==1"},
        **{
            f"vllm-{version}-{kind}.txt": {f"vllm=={version}", "nixl==1", f"numpy=={version}"}
            for version in ("0.1", "0.2")
            for kind in ("cpu", "cuda")
        },
    }


def test_torch_has_the_same_libraries_everywhere() -> None:
    """A CPU build of torch comes without them, so they must all be in the file that it replaces."""
    found = [lock.Target("0.2", "2.1.0", "1", (), "cuda"), lock.Target("0.2", "2.1.0", "1", (), "cpu")]
    for target in found:
        target.pins[f"triton=={target.kind}"] = ""
    with pytest.raises(SystemExit, match="triton==cpu"):
        lock.spread(found)
