# SPDX-License-Identifier: Apache-2.0
"""What the start of an interpreter costs and reports, and another sitecustomize beside this package's."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import FOLDER
from support.environments import REPOSITORY, SITECUSTOMIZE, Environment, install_wheel, make_environment

ON = {"ENABLE_KVCACHED": "1"}
NIXL = ("vllm", "create=NixlConnector", "create=MultiConnector:NixlConnector", "create=OtherConnector")
PTH = (REPOSITORY / "kvcached_nixl" / "kvcached_nixl.pth").read_text()
MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
OURS = ("", ".activation", ".activation.autostart", ".version", ".vllm")


@pytest.fixture
def own(wheels: Path, tmp_path: Path) -> Environment:
    """With the package, from the normal wheel, and nobody else's: it may be damaged."""
    (wheel,) = (wheels / "standard").glob("*.whl")
    return install_wheel(make_environment(tmp_path / "env"), wheel)


def test_the_start_file_is_one_line_that_python_executes() -> None:
    """site.py executes a .pth line only if it starts with "import", and each line by itself."""
    assert PTH.startswith("import ") and PTH.count("\n") == 1 and PTH.endswith("\n")


@pytest.mark.parametrize("environ", [{}, ON], ids=["off", "on"])
def test_a_start_imports_five_small_modules(bare: Environment, installed: Environment, environ: dict[str, str]) -> None:
    """pip, compile workers and shells start with it, too: no wrapt, no patching, nothing of inspect or typing. These
    five take 0.8 ms, of which 0.2 ms are for ``__future__``. Python 3.13 decodes the first .pth file with utf_8_sig."""
    without, with_ours = (set(json.loads(one.run("-c", MODULES, **environ).stdout)) for one in (bare, installed))
    added = with_ours - without - {"__future__", "encodings.utf_8_sig"}
    assert added == {f"kvcached_nixl{name}" for name in OURS}


def test_searching_for_kvcached_is_not_importing_it(installed: Environment, tree: Callable[..., Path]) -> None:
    """kvcached's own start file searches for it in every process."""
    code = "import importlib.util as u, sys; print(u.find_spec('kvcached') is not None, 'wrapt' in sys.modules)"
    assert installed.run("-c", code, path=(tree("0.28.0"),), **ON).stdout.split() == ["True", "False"]


@pytest.mark.parametrize("first", ["vllm", "kvcached"])
def test_the_hook_of_another_tool_in_front_changes_nothing(
    with_wheel: Environment, tree: Callable[..., Path], first: str
) -> None:
    """A tracer hooks vLLM after our start: its search for vLLM is under way when we put our hooks."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import json, probe, wrapt\n"
        "wrapt.register_post_import_hook(lambda module: print('theirs ran'), 'vllm')\n"
        "print(json.dumps(probe.run(sys.argv[2:])))"
    )
    actions = (first, "vllm", "create=NixlConnector")
    done = with_wheel.run("-c", code, str(FOLDER), *actions, path=(tree("0.28.0"),), **ON)
    theirs, ours = done.stdout.splitlines()
    plain = with_wheel.probe(*actions, path=(tree("0.28.0"),), **ON)
    assert theirs == "theirs ran"
    assert (json.loads(ours)["wrapped"], json.loads(ours)["outcomes"]) == (plain["wrapped"], plain["outcomes"])
    assert plain["wrapped"]


def test_uninstalling_before_vllm_is_imported_takes_the_watch_away(
    with_wheel: Environment, tree: Callable[..., Path]
) -> None:
    """The import that comes later is stock."""
    state = with_wheel.probe("uninstall", "vllm", "kvcached", "create=NixlConnector", path=(tree("0.28.0"),), **ON)
    assert (state["wrapped"], state["outcomes"]) == ({}, {})


def test_a_package_that_cannot_be_read_says_so_in_one_line(own: Environment) -> None:
    (own.site_packages / "kvcached_nixl" / "activation" / "__init__.py").write_text("(")
    (line,) = set(own.run("-c", "", **ON).stderr.splitlines())
    assert "never closed" in line and "unset ENABLE_KVCACHED" in line


@pytest.mark.parametrize("left", [False, True], ids=["all gone", "a folder left"])
def test_a_start_file_that_outlives_the_package_says_so_in_one_line(own: Environment, left: bool) -> None:
    """And nothing at all where nobody asked for kvcached."""
    package = own.site_packages / "kvcached_nixl"
    shutil.rmtree(package)
    if left:
        (package / "__pycache__").mkdir(parents=True)
    assert own.run("-c", "print('runs')").stderr == ""
    done = own.run("-c", "print('runs')", **ON)
    assert done.stdout == "runs\n"
    # site.py runs start files twice in a virtual environment.
    (line,) = set(done.stderr.splitlines())
    assert line.startswith("kvcached_nixl.pth: No module named 'kvcached_nixl")
    assert "not patched" in line and "unset ENABLE_KVCACHED" in line


@pytest.mark.parametrize("how", ["all gone", "unreadable", "a part unreadable"])
def test_a_start_file_that_outlives_the_package_stops_the_connector(
    own: Environment, tree: Callable[..., Path], how: str
) -> None:
    """As where the clone of an editable installation was moved. Other connectors are not disturbed, nor is anything
    where nobody asked for kvcached."""
    package = own.site_packages / "kvcached_nixl"
    if how == "all gone":
        shutil.rmtree(package)
    else:
        broken = package / ("activation/__init__.py" if "part" in how else "__init__.py")
        broken.write_bytes(b"\0")
    for begins, environ in (((), ON), (("enable",), {})):
        first, second, other = own.probe(*begins, *NIXL, path=(tree("0.28.0"),), **environ)["created"]
        assert all("NixlConnector is not patched" in error for error in (first, second))
        assert other == "OtherConnector"
    assert own.probe(*NIXL, path=(tree("0.28.0"),))["created"][0].startswith("Nixl")


def test_the_sitecustomize_folder_without_the_package_stops_the_connector(
    bare: Environment, tree: Callable[..., Path], tmp_path: Path
) -> None:
    """A copy of this one folder."""
    folder = shutil.copytree(SITECUSTOMIZE, tmp_path / "a" / "b" / "sitecustomize")
    path = (folder, tree("0.28.0"))
    for begins, environ in (((), ON), (("enable",), {})):
        first, second, other = bare.probe(*begins, *NIXL, path=path, **environ)["created"]
        assert all("NixlConnector is not patched" in error for error in (first, second))
        assert other == "OtherConnector"
    assert "No module named 'kvcached_nixl'" in bare.run("-c", "", path=path, **ON).stderr
    assert bare.probe(*NIXL, path=path)["created"][0].startswith("Nixl")
    assert bare.run("-c", "", path=path).stderr == ""


AUTOPATCH = "import vllm, os; print(os.environ.get('KVCACHED_AUTOPATCH'))"


@pytest.mark.parametrize(("environ", "left"), [({}, "None"), (ON, "1")], ids=["off", "on"])
@pytest.mark.parametrize("how", ["installed", "all gone", "sitecustomize", "the folder alone"])
def test_kvcached_patches_nothing_where_the_gate_is_closed_at_the_import(
    own: Environment, tree: Callable[..., Path], tmp_path: Path, how: str, environ: dict[str, str], left: str
) -> None:
    """It would ask later whether it is on, and the connector would be stock."""
    folder: tuple[Path, ...] = (SITECUSTOMIZE,) if how == "sitecustomize" else ()
    if how != "installed":
        shutil.rmtree(own.site_packages / "kvcached_nixl")
    if how == "the folder alone":
        folder = (shutil.copytree(SITECUSTOMIZE, tmp_path / "a" / "b" / "sitecustomize"),)
    if folder:
        (own.site_packages / "kvcached_nixl.pth").unlink()
    done = own.run("-c", AUTOPATCH, path=(*folder, tree("0.28.0")), KVCACHED_AUTOPATCH="1", **environ)
    assert done.stdout == f"{left}\n"


def test_a_package_of_which_a_part_is_gone_does_not_open_the_gate(own: Environment, tree: Callable[..., Path]) -> None:
    """The connector cannot be imported, and the error says why. Other connectors are not disturbed."""
    (own.site_packages / "kvcached_nixl" / "settings.py").unlink()
    state = own.probe(*NIXL, path=(tree("0.28.0"),), **ON)
    assert all(error.startswith("ImportError") for error in state["created"][:2])
    assert all(word in state["created"][0] for word in ("kvcached_nixl.settings", "found", "remedy"))
    assert state["created"][2] == "OtherConnector"
    assert own.probe(*NIXL, path=(tree("0.28.0"),))["created"][0].startswith("Nixl")


ENDS = """
import time, weakref
import vllm
import multiprocessing
class Client: pass
client, engine = Client(), multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
engine.start()
weakref.finalize(client, engine.terminate)
print(int(time.time()))
"""


def test_a_script_ends_whose_engine_ends_with_it(with_wheel: Environment, tree: Callable[..., Path]) -> None:
    """vLLM's engines end in finalizers, before multiprocessing waits for them, unless one is created too early."""
    done = with_wheel.run("-c", ENDS, path=(tree("0.28.0"),), **ON)
    assert time.time() - int(done.stdout) < 30


PRINT = "import sys; print(sys.modules['sitecustomize'].__file__, 'kvcached_nixl' in sys.modules)"


@pytest.mark.parametrize("environ", [{}, {"ENABLE_KVCACHED": "1"}], ids=["off", "on"])
def test_another_sitecustomize_runs_and_takes_its_place(
    bare: Environment, tmp_path: Path, environ: dict[str, str]
) -> None:
    """``sitecustomize`` in sys.modules is the other one, whether the gate is open or not."""
    theirs = tmp_path / "sitecustomize.py"
    theirs.write_text("print('theirs ran')")
    done = bare.run("-c", PRINT, path=(SITECUSTOMIZE, tmp_path), **environ)
    assert done.stdout.splitlines() == ["theirs ran", f"{theirs} True"]
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
    """The path grows at its end, so that a script can call install() itself."""
    done = bare.run("-c", f"import sys; print(sys.path[-1]); {PRINT}", path=(SITECUSTOMIZE,))
    assert done.stdout.splitlines() == [str(REPOSITORY), f"{SITECUSTOMIZE / 'sitecustomize.py'} True"]
