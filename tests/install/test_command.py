# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl``: reports what a server would do, and its exit status says the same."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import FOLDER
from support.environments import REPOSITORY, Environment, make_environment

COMMAND = ("-m", "kvcached_nixl")
ON = {"ENABLE_KVCACHED": "1"}
Tree = Callable[..., Path]


@pytest.mark.parametrize("environ", [{}, ON], ids=str)
def test_a_supported_environment_exits_with_zero_whatever_the_gate(
    installed: Environment, tree: Tree, environ: dict[str, str]
) -> None:
    """The command says what would happen with the gate open, and what the gate is now."""
    done = installed.run(*COMMAND, path=(tree("0.28.0"),), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("0.28.0", "0.1.6", "applied  connector.__init__", "compared with every peer"):
        assert word in done.stdout
    assert ("what ENABLE_KVCACHED=true would give" in done.stdout) == (environ != ON)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("environ", [{}, ON], ids=str)
def test_an_environment_that_keeps_this_package_off_exits_with_one(
    with_wheel: Environment, tree: Tree, environ: dict[str, str]
) -> None:
    """A server would start, with wrong tokens."""
    done = with_wheel.run(*COMMAND, path=(tree("0.28.0"),), KVCACHED_NIXL="0", **environ)
    assert done.returncode == 1
    assert "refused: activation" in done.stdout and "KVCACHED_NIXL is 0" in done.stdout


@pytest.mark.parametrize("has_start_file", [False, True], ids=["clone", "start file for another folder"])
def test_a_package_that_does_not_start_with_the_interpreter_exits_with_one(
    bare: Environment, tree: Tree, tmp_path: Path, has_start_file: bool
) -> None:
    """The command is run in a clone, and `pip install .` was forgotten; or the clone was moved since."""
    environment = make_environment(tmp_path / "env") if has_start_file else bare
    if has_start_file:
        shutil.copy(REPOSITORY / "kvcached_nixl" / "kvcached_nixl.pth", environment.site_packages)
    # As in the clone: the folder is on the path once the interpreter has started.
    code = f"import runpy, sys; sys.path.insert(0, {str(REPOSITORY)!r}); "
    code += "runpy.run_module('kvcached_nixl', run_name='__main__')"
    done = environment.run("-c", code, path=(tree("0.28.0"),), **ON)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "refused: activation" in done.stdout and "PYTHONPATH" in done.stdout
    assert ("No module named 'kvcached_nixl'" in done.stdout) == has_start_file


@pytest.mark.parametrize(("version", "options"), [("0.25.1", ()), ("0.28.0", ("--no-nixl",))])
def test_an_environment_that_would_be_refused_exits_with_one(
    with_wheel: Environment, tree: Tree, version: str, options: tuple[str, ...]
) -> None:
    """Each refusal is printed with its message."""
    done = with_wheel.run(*COMMAND, path=(tree(version, *options),))
    assert done.returncode == 1
    assert "refused:" in done.stdout and "remedy:" in done.stdout


def test_without_vllm_it_says_so_and_exits_with_one(with_wheel: Environment) -> None:
    """Nothing installed is not a crash."""
    done = with_wheel.run(*COMMAND)
    assert done.returncode == 1
    assert "no vLLM in this environment" in done.stdout and "Traceback" not in done.stderr


def test_a_vllm_that_cannot_be_imported_is_a_refusal(with_wheel: Environment, tree: Tree, tmp_path: Path) -> None:
    """The import error is in the report."""
    (tmp_path / "vllm.py").write_text("raise OSError('no libcuda')")
    done = with_wheel.run(*COMMAND, path=(tmp_path, tree("0.28.0")))
    assert done.returncode == 1
    assert "no libcuda" in done.stdout


def test_json_has_the_same_content(with_wheel: Environment, tree: Tree) -> None:
    """For programs: nothing else is on standard output."""
    report = json.loads(with_wheel.run(*COMMAND, "--json", path=(tree("0.28.0"),)).stdout)
    assert report["versions"]["vllm"] == "0.28.0"
    assert {patch["state"] for patch in report["patches"]} == {"applied", "skipped"}
    assert report["refusals"] == []


ADVERTISE = "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE"


def test_the_side_channels_addresses_are_shown(with_wheel: Environment, tree: Tree) -> None:
    """And what speaks against other hosts reaching it. Others are in tests/unit/test_side_channel_address.py."""
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", f"{ADVERTISE}_HOST": "10.0.0.5"}
    done = with_wheel.run(*COMMAND, "--json", path=(tree("0.28.0"),), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)["side_channel"]
    assert len(shown) == 2 and "peers get 10.0.0.5:5600" in shown[0] and "receives" in shown[1], shown
    text = with_wheel.run(*COMMAND, path=(tree("0.28.0"),), **environ).stdout
    assert all(line in text for line in ("\nside channel\n", *shown))


@pytest.mark.parametrize("environ", [{f"{ADVERTISE}_HOST": "0.0.0.0"}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "abc"}], ids=str)
def test_a_side_channel_that_nobody_could_reach_is_refused(
    with_wheel: Environment, tree: Tree, environ: dict[str, str]
) -> None:
    done = with_wheel.run(*COMMAND, path=(tree("0.28.0"),), **environ)
    assert done.returncode == 1
    _, _, said = done.stdout.partition("refused: side channel\n")
    assert [word for word in ("found:", "expected:", "consequence:", "remedy:") if word not in said] == []
    assert all(value in said for value in environ.values())


def test_help_teaches_and_wrong_usage_exits_with_two(with_wheel: Environment) -> None:
    """The exit statuses are written down where people look."""
    shown = with_wheel.run(*COMMAND, "--help")
    assert shown.returncode == 0 and "exit status" in shown.stdout
    assert with_wheel.run(*COMMAND, "--colour").returncode == 2


@pytest.mark.parametrize("end", ["| true", ">&-", ">&- 2>&-"])
def test_output_that_nobody_reads_is_no_crash(with_wheel: Environment, tree: Tree, end: str) -> None:
    code = "import subprocess, sys; p = subprocess.run(['bash', '-c', sys.argv[1]], capture_output=True, text=True); "
    code += "print(p.returncode); print(p.stderr, file=sys.stderr)"
    command = f"{with_wheel.python} -m kvcached_nixl {end}; exit ${{PIPESTATUS[0]}}"
    done = with_wheel.run("-c", code, command, path=(tree("0.28.0"),))
    assert int(done.stdout) == (128 + signal.SIGPIPE if "|" in end else 0), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_the_summary_is_logged_once_per_process(with_wheel: Environment, tree: Tree) -> None:
    """Two connectors, one summary, through vLLM's logger."""
    code = (
        "import logging, sys; logging.basicConfig(level='INFO', format='%(name)s %(message)s')\n"
        "sys.path.insert(0, sys.argv[1]); import probe\n"
        "probe.run(['vllm', 'create=NixlConnector', 'create=NixlConnector'])"
    )
    folder = str(FOLDER)
    done = with_wheel.run("-c", code, folder, path=(tree("0.28.0"),), ENABLE_KVCACHED="1")
    assert done.stderr.count("vllm.kvcached_nixl kvcached_nixl ") == 1, done.stderr


def test_the_doctor_says_what_is_missing(with_wheel: Environment) -> None:
    """Where there is no vLLM to look at, it is no crash."""
    done = with_wheel.run(*COMMAND, "doctor")
    assert done.returncode == 1
    assert "where vLLM, kvcached and NIXL are installed" in done.stderr and "Traceback" not in done.stderr
    assert "exit status:" in with_wheel.run(*COMMAND, "doctor", "--help").stdout


def test_doctor_says_what_is_missing_to_ask_prefill(with_wheel: Environment) -> None:
    done = with_wheel.run(*COMMAND, "doctor", "--prefill", "http://127.0.0.1:1")
    assert done.returncode == 1 and "where vLLM is installed" in done.stderr and "Traceback" not in done.stderr
