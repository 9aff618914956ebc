# SPDX-License-Identifier: Apache-2.0
"""Dynamo: its own workers, which call vLLM's engine without vLLM's HTTP server, and its frontend before them.

Workers and frontend find each other by files. There is no etcd and no NATS.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.common.servers import (
    ENVIRONMENT,
    HOST,
    REPOSITORY,
    SERVER_SIDE,
    Server,
    ServerSpec,
    free_ports,
    inherited,
)
from experiments.stacks import traffic
from experiments.stacks.environments import Say, overlay
from experiments.stacks.routers import Servers, behind, running_router

STAND_INS = SERVER_SIDE.parent / "stand_ins"
"""Its module of Qwen's images imports torchvision, of which no build fits the installed torch."""


@dataclass(frozen=True)
class Worker(ServerSpec):
    """A worker. Its port is that of its ``/health`` and ``/metrics``; requests come from the frontend.

    ``template``: file of the chat template. ``variables``: as the frontend's.
    """

    template: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int, engine_id: str) -> list[str]:
        role = "prefill" if "prefill" in self.name else "decode"
        return [
            *(sys.executable, "-m", "dynamo.vllm", "--model", str(self.model), "--disaggregation-mode", role),
            *("--custom-jinja-template", str(self.template), "--dyn-tool-call-parser", "hermes"),
            *self.engine_arguments(engine_id),
        ]

    def environment_at(self, port: int) -> dict[str, str]:
        return {**self.variables, "DYN_SYSTEM_PORT": str(port)}


def dynamo(specs: Sequence[ServerSpec], logs: Path, say: Say) -> AbstractContextManager[Servers]:
    packages = overlay("dynamo", say)
    found_in, template = logs / "discovery", logs / "template.jinja"
    found_in.mkdir(parents=True)
    template.write_text(traffic.TEMPLATE)
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (SERVER_SIDE, REPOSITORY, STAND_INS, packages))),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(found_in),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_SYSTEM_HOST": HOST,
        # An interface.
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
    }
    workers = [Worker(**vars(spec), template=template, variables=variables) for spec in specs]

    @contextlib.contextmanager
    def frontend(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Iterator[str]:
        (port,) = free_ports(1)
        url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
        environ = {**inherited(), **ENVIRONMENT, **variables}
        with running_router(command, log, lambda: _knows_model(url), "a model at /v1/models", environ):
            yield url

    return behind(frontend, workers, logs, say)


def _knows_model(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(httpx.get(f"{url}/v1/models", trust_env=False, timeout=2.0).json()["data"])
    return False
