# SPDX-License-Identifier: Apache-2.0
"""The folder for PYTHONPATH does not hide another ``sitecustomize``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.environments import REPOSITORY, SITECUSTOMIZE, Environment

PRINT = "import sys; print(sys.modules['sitecustomize'].__file__, 'kvcached_nixl' in sys.modules)"


@pytest.mark.parametrize("environ", [{}, {"ENABLE_KVCACHED": "1"}], ids=["off", "on"])
def test_another_sitecustomize_runs_and_takes_its_place(
    bare: Environment, tmp_path: Path, environ: dict[str, str]
) -> None:
    """``sitecustomize`` in sys.modules is the other one, whether the gate is open or not."""
    theirs = tmp_path / "sitecustomize.py"
    theirs.write_text("print('theirs ran')")
    done = bare.run("-c", PRINT, path=(SITECUSTOMIZE, tmp_path), **environ)
    assert done.stdout.splitlines() == ["theirs ran", f"{theirs} {bool(environ)}"]
    assert done.stderr == ""


def test_a_sitecustomize_that_chains_too_makes_no_circle(bare: Environment, tmp_path: Path) -> None:
    """Tracers remove their own folder from the path and import the next one, which is ours again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print('theirs ran')\n"
        "sys.modules.pop('sitecustomize', None)\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "sys.path.remove(here)\n"
        "import sitecustomize\n"
        "sys.path.append(here)\n"
    )
    for path in ((SITECUSTOMIZE, tmp_path), (tmp_path, SITECUSTOMIZE)):
        done = bare.run("-c", "import kvcached_nixl; print(kvcached_nixl.__version__)", path=path, ENABLE_KVCACHED="1")
        assert done.stdout.splitlines()[0] == "theirs ran"
        assert done.stdout.count("theirs ran") == 1 and done.stderr == ""


def test_one_that_looks_past_itself_as_ours_does_makes_no_circle(bare: Environment, tmp_path: Path) -> None:
    """Each of the two finds the other; ours chains once."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery, importlib.util, os, sys\n"
        "print('theirs ran')\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "spec = importlib.machinery.PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
    )
    done = bare.run("-c", "print('end')", path=(SITECUSTOMIZE, tmp_path))
    assert (done.stdout.splitlines(), done.stderr) == (["theirs ran", "end"], "")


def test_a_sitecustomize_that_fails_does_not_undo_ours(
    bare: Environment, tree: Callable[..., Path], tmp_path: Path
) -> None:
    """Python reports their error as it always does."""
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs is broken')")
    code = "import vllm, kvcached_nixl.activation.bootstrap as b; print(b.current() is not None)"
    done = bare.run("-c", code, path=(SITECUSTOMIZE, tmp_path, tree("0.28.0")), ENABLE_KVCACHED="1")
    assert done.stdout.split() == ["True"]
    assert "theirs is broken" in done.stderr


def test_without_another_one_the_package_is_importable_and_nothing_else_happens(bare: Environment) -> None:
    """With the gate closed only the path grows, at its end, so that a script can call install() itself."""
    done = bare.run("-c", f"import sys; print(sys.path[-1]); {PRINT}", path=(SITECUSTOMIZE,))
    assert done.stdout.splitlines() == [str(REPOSITORY), f"{SITECUSTOMIZE / 'sitecustomize.py'} False"]
