# SPDX-License-Identifier: Apache-2.0
"""Ray Serve LLM: replicas of a prefill and of a decode deployment, which Ray starts, names and restarts itself.

``python -m experiments.stacks.ray_serve CONFIG`` is the process that runs it, until SIGTERM or until its parent ends.
CONFIG is a JSON file: ``port``, ``metrics_port``, ``status``, and the arguments of ``build_pd_openai_app`` as ``app``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from experiments.common import device
from experiments.common.counted import Counters, counters
from experiments.common.servers import HOST, ServerError, ServerSpec, environment_with, free_ports, python_path
from experiments.stacks import traffic
from experiments.stacks.routers import STOP_SECONDS, Say, overlay, running_router

START_SECONDS, RESTART_SECONDS = 400.0, 180.0
HAND_OVERS = "ray_vllm_nixl_xfer_time_seconds_count"
"""vLLM's counter as Ray exports it."""
LOOKED_SECONDS = 0.2
TITLE = "ray::ServeReplica:default:{deployment}"


@dataclass
class RayServe:
    """Has what `routers.Servers` has."""

    process: psutil.Process
    url: str
    metrics: str
    status: Path
    engines: Sequence[str]
    lines_before_kill: int = 0

    def hand_overs(self) -> Counters:
        return counters([self.metrics], HAND_OVERS)

    def kill(self, engine: str) -> None:
        self.lines_before_kill = len(self._found())
        title, replicas = TITLE.format(deployment=_deployment(engine)), []
        for one in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "".join(one.cmdline()[:1]).startswith(title):
                    replicas.append(one)
        for one in [replicas[0], *replicas[0].children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)

    restart = kill
    """Ray offers no restart of one replica."""

    def restore(self, engine: str) -> None:
        deployment, deadline = _deployment(engine), time.monotonic() + RESTART_SECONDS
        wanted = sum(_deployment(one) == deployment for one in self.engines)
        while True:
            counts = [line[deployment] for line in self._found()[self.lines_before_kill :]]
            if counts and counts[-1] == wanted:
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"found {counts} replicas of {deployment} since {engine} was killed; expected {wanted} within "
                    f"{RESTART_SECONDS:.0f} s. See stack.log."
                )
            time.sleep(0.1)

    def _found(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in self.status.read_text().splitlines()]


def _deployment(engine: str) -> str:
    return ("Prefill" if "prefill" in engine else "Decode") + ":model"


@contextlib.contextmanager
def ray_serve(specs: Sequence[ServerSpec], logs: Path, say: Say) -> Iterator[RayServe]:
    """Start Ray on this machine, and one deployment for each role, with as many replicas as ``specs`` has servers."""
    logs.mkdir(parents=True)
    port, metrics_port = free_ports(2)
    roles = ["prefill" if "prefill" in one.name else "decode" for one in specs]
    packages = overlay("ray", say)
    of_role = dict(zip(roles, specs, strict=True))
    counts = Counter(roles)
    app = {f"{role}_config": _config(of_role[role], count, python_path(packages)) for role, count in counts.items()}
    config, status = logs / "config.json", logs / "status.jsonl"
    status.touch()
    config.write_text(
        json.dumps({"port": port, "metrics_port": metrics_port, "status": str(status), "app": app}, indent=1)
    )
    environ = {**environment_with(packages), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray says its own.
    del environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    command = [sys.executable, "-m", "experiments.stacks.ray_serve", str(config)]
    log = logs / "stack.log"
    with running_router(
        command, log, lambda: bool(status.read_text()), "its replicas to run", environ, START_SECONDS
    ) as process:
        root = psutil.Process(process.pid)
        try:
            engines = [f"{role}-{number}" for role, count in counts.items() for number in range(count)]
            yield RayServe(root, f"http://{HOST}:{port}", f"http://{HOST}:{metrics_port}/metrics", status, engines)
        finally:
            # Ray's daemons are in sessions of their own.
            all_of_it = root.children(recursive=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            for one in all_of_it:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def _config(spec: ServerSpec, count: int, path: str) -> dict[str, Any]:
    """The ``LLMConfig`` of a role. Variables for the engine stand there: those of the process apply to all of Ray."""
    variables = {**device.environment(spec.environment, spec.kv_space_gib, forks=False), "PYTHONPATH": path}
    keywords = as_keywords(spec.engine_arguments("unused"))
    # Ray makes one of its own, with the address of the side channel.
    del keywords["kv_transfer_config"]["engine_id"], keywords["served_model_name"]
    return {
        "model_loading_config": {"model_id": "model", "model_source": str(spec.model)},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": count},
        # Its default is one port; another stack may run on this machine. A replica adds its rank.
        "experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": free_ports(1)[0]},
        "log_engine_metrics": True,
        "runtime_env": {"env_vars": variables},
        "engine_kwargs": {
            **keywords,
            "chat_template": traffic.TEMPLATE,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "enable_prompt_tokens_details": True,
        },
    }


def as_keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """Return arguments of ``vllm serve`` as those of vLLM's ``AsyncEngineArgs``: numbers and JSON are read."""
    found: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        name = waiting.pop(0).removeprefix("--").replace("-", "_")
        if not waiting or waiting[0].startswith("--"):
            found[name] = True
            continue
        value = waiting.pop(0)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def serve_app(config: dict[str, object], ends: threading.Event) -> None:
    """Run the app. Whenever that changes, add a line to the file ``status``: how many replicas each deployment has."""
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    # Actors are placed by what they ask for, not by what they use.
    ray.init(
        "local",
        num_cpus=32,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _metrics_export_port=config["metrics_port"],
        # Its default is 10 s: counters would be read too early.
        _system_config={"metrics_report_interval_ms": 500},
        _node_ip_address=HOST,
    )
    serve.start(http_options={"host": HOST, "port": config["port"]}, proxy_location="HeadOnly")
    serve.run(build_pd_openai_app(config["app"]), blocking=False)
    before, parent = None, os.getppid()
    with Path(str(config["status"])).open("a") as status:
        while os.getppid() == parent and not ends.wait(LOOKED_SECONDS):
            (application,) = serve.status().applications.values()
            found = {name: one.replica_states.get("RUNNING", 0) for name, one in application.deployments.items()}
            if found != before:
                before = found
                status.write(json.dumps(found) + "\n")
                status.flush()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    serve_app(json.loads(Path(sys.argv[1]).read_text()), ended)
