# SPDX-License-Identifier: Apache-2.0
"""The table of stacks. To try another one, add a row. And Dynamo, whose workers call vLLM's engine themselves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx

from experiments.common.families import STAND_INS
from experiments.common.servers import HOST, Server, ServerSpec, environment_with, free_ports, python_path
from experiments.stacks import routers, traffic
from experiments.stacks.ray_serve import RayServe, ray_serve
from experiments.stacks.routers import Say, Servers, alone, behind, overlay, running_router

Deployment = Servers | RayServe
Deploy = Callable[[Sequence[ServerSpec], Path, Say], AbstractContextManager[Deployment]]
"""(servers, whose names say their roles; an empty folder; progress) -> the deployment, while it runs."""


@dataclass(frozen=True)
class Stack:
    """One stack.

    Attributes:
        version: of what is started.
        modes: transfer modes that it asks for.
        asks_both_at_once: modes in which decode may be asked before prefill has answered.
        constrains_tools_itself: it asks vLLM for a tool's arguments by their schema, not for the call of a tool.
        vllm: the one that it needs; empty if any will do.
        most_engines: how many engines of each role it can have; None: any number.
    """

    name: str
    version: str
    deploy: Deploy
    modes: tuple[str, ...] = ("pull", "push")
    asks_both_at_once: tuple[str, ...] = ()
    constrains_tools_itself: bool = False
    vllm: str = ""
    most_engines: int | None = None

    def reason_to_skip(self, vllm: str, engines_per_role: int) -> str:
        """Return why it cannot be run, or an empty text."""
        if self.vllm and self.vllm != vllm:
            return f"it needs vLLM {self.vllm}"
        if self.most_engines is not None and self.most_engines < engines_per_role:
            return f"it has {self.most_engines} engine of each role"
        return ""


def _push_demo(specs: Sequence[ServerSpec], logs: Path, say: Say) -> AbstractContextManager[Servers]:
    """Servers whose engines have the ids that the demo's arguments name."""
    fixed = [replace(one, kv_transfer={**(one.kv_transfer or {}), "engine_id": one.name}) for one in specs]
    return behind(routers.push_demo, fixed, logs, say)


@dataclass(frozen=True)
class DynamoWorker(ServerSpec):
    """A worker of Dynamo's. Its port is that of its ``/health`` and ``/metrics``; requests come from the frontend.

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
    """Workers and frontend find each other by files. There is no etcd and no NATS."""
    packages = overlay("dynamo", say)
    found_in, template = logs / "discovery", logs / "template.jinja"
    found_in.mkdir(parents=True)
    template.write_text(traffic.TEMPLATE)
    variables = {
        # Its module of Qwen's images imports torchvision, of which no build fits the installed torch.
        "PYTHONPATH": python_path(STAND_INS, packages),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(found_in),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_SYSTEM_HOST": HOST,
        # An interface.
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
    }
    workers = [DynamoWorker(**vars(spec), template=template, variables=variables) for spec in specs]

    @contextlib.contextmanager
    def frontend(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Iterator[str]:
        (port,) = free_ports(1)
        url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
        environ = {**environment_with(), **variables}
        with running_router(command, log, lambda: _knows_model(url), "a model at /v1/models", environ):
            yield url

    return behind(frontend, workers, logs, say)


def _knows_model(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(httpx.get(f"{url}/v1/models", trust_env=False, timeout=2.0).json()["data"])
    return False


STACKS: tuple[Stack, ...] = (
    Stack("none: decode asks prefill", "this package", alone, most_engines=1),
    Stack("vllm-router", "0.1.17", partial(behind, routers.vllm_router), asks_both_at_once=("push",)),
    Stack("Ray Serve LLM", "2.58.1", ray_serve, vllm="0.28.0"),
    Stack("Dynamo", "1.5.1", dynamo, constrains_tools_itself=True, vllm="0.28.0"),
    Stack("vLLM's toy proxy", "0.28.0", partial(behind, routers.toy_proxy)),
    Stack(
        "vLLM's push demo",
        "0.28.0",
        _push_demo,
        modes=("push",),
        asks_both_at_once=("push",),
        most_engines=1,
    ),
)
