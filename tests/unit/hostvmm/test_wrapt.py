# SPDX-License-Identifier: Apache-2.0
"""Every module that uses wrapt can be imported with each wrapt that pyproject.toml admits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USERS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "kvcached_nixl").rglob("*.py")
    if "\nimport wrapt\n" in path.read_text()
)
# wrapt 1.16, 1.17 and the first 2.x are like this.
CANNOT_BE_SUBSCRIPTED = """
import importlib, sys, wrapt
class ObjectProxy(wrapt.ObjectProxy):
    __class_getitem__ = None
wrapt.ObjectProxy = ObjectProxy
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", USERS)
def test_it_is_imported_with_a_wrapt_whose_proxies_cannot_be_subscripted(module: str) -> None:
    """bootstrap imports these, so one that fails would refuse every connector."""
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    if "import torch" in source and importlib.util.find_spec("torch") is None:
        pytest.skip("this module needs torch")
    command = [sys.executable, "-c", CANNOT_BE_SUBSCRIPTED, module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_those_that_are_known_to_use_it_are_among_them() -> None:
    """A list that is empty would pass."""
    assert {"kvcached_nixl.hostvmm.hooks", "kvcached_nixl.patching.attach"} <= set(USERS)
