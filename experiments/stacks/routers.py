# SPDX-License-Identifier: Apache-2.0
"""Routers that are started before running servers, each as a process; to try another one, add a function. And servers
with one of them, or with none, as a stack that serves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common.client import is_up
from experiments.common.counted import Counters, counters
from experiments.common.servers import HOST, Asking, Running, Server, ServerError, ServerSpec, free_ports, inherited
from experiments.stacks.environments import Say, environment, sources

Url = AbstractContextManager[str]
"""Of a router, without a path, while it runs."""
STOP_SECONDS = 60.0
PRODUCTION_STACK = "PRODUCTION_STACK"
"""Environment variable: a checkout of production-stack, which is on no package index."""


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


def production_stack(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Url:
    """Its mode that asks prefill, then decode, with the host of prefill's URL in place of the answer's."""
    python = environment("production-stack", say) / "python"
    servers = [*prefills, *decodes]
    labels = ["prefill"] * len(prefills) + ["decode"] * len(decodes)
    (port,) = free_ports(1)
    command = [str(python), "-m", "vllm_router.app", "--host", HOST, "--port", str(port)]
    command += ["--service-discovery", "static", "--static-backends", ",".join(one.base_url for one in servers)]
    command += ["--static-models", ",".join("model" for _ in servers), "--static-model-labels", ",".join(labels)]
    command += ["--routing-logic", "disaggregated_prefill_orchestrated"]
    command += ["--prefill-model-labels", "prefill", "--decode-model-labels", "decode"]
    return running(command, log, port, "/health", {"PYTHONPATH": f"{os.environ[PRODUCTION_STACK]}/src"})


NGINX = """\
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  upstream decode {{ {servers} }}
  server {{
    listen {host}:{port};
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection close; proxy_buffering off;
      proxy_connect_timeout 2s; proxy_read_timeout 1h;
      proxy_next_upstream error timeout;  # what has been sent to one server is not sent to another one
    }}
  }}
}}
"""


def nginx(decodes: Sequence[Server], folder: Path) -> Url:
    program = shutil.which("nginx")
    if program is None:
        raise ServerError("found no nginx; expected it in PATH. Nothing can be asked through it. Install nginx.")
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    servers = " ".join(f"server {HOST}:{one.port};" for one in decodes)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers, host=HOST, port=port))
    return running([program, "-c", str(config)], folder / "nginx.log", port, "/health")


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
def running(
    command: Sequence[str], log: Path, port: int, answers: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a process; yields its URL, without a path, when the path ``answers`` does. It is ended by SIGTERM. Its
    variables are ``environ`` and this process's, without those that would change what is run. Raises ServerError if it
    ended, or did not answer in time."""
    url = f"http://{HOST}:{port}"
    variables = {**inherited(), **(environ or {})}
    with running_router(command, log, lambda: is_up(url + answers), f"{answers} to answer", variables) as process:
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
        self._launched.bring_back(place, spec=replace(self._launched.servers[place].spec, **changed))


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
