# SPDX-License-Identifier: Apache-2.0
"""The table of stacks. To try another one, add a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common.servers import ServerSpec
from experiments.stacks import routers
from experiments.stacks.dynamo import dynamo
from experiments.stacks.environments import Say
from experiments.stacks.ray_serve import RayServe, ray_serve
from experiments.stacks.routers import Router, Servers, alone, behind

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
        needs: environment variable that it needs; empty if none.
    """

    name: str
    version: str
    deploy: Deploy
    modes: tuple[str, ...] = ("pull", "push")
    asks_both_at_once: tuple[str, ...] = ()
    constrains_tools_itself: bool = False
    vllm: str = ""
    most_engines: int | None = None
    needs: str = ""

    def reason_to_skip(self, vllm: str, engines_per_role: int) -> str:
        """Return why it cannot be run, or an empty text."""
        if self.vllm and self.vllm != vllm:
            return f"it needs vLLM {self.vllm}"
        if self.most_engines is not None and self.most_engines < engines_per_role:
            return f"it has {self.most_engines} engine of each role"
        if self.needs and not os.environ.get(self.needs):
            return f"{self.needs} names no checkout of it"
        return ""


def _before(router: Router, *, engine_ids_are_fixed: bool = False) -> Deploy:
    def deploy(specs: Sequence[ServerSpec], logs: Path, say: Say) -> AbstractContextManager[Deployment]:
        if engine_ids_are_fixed:
            specs = [replace(one, kv_transfer={**(one.kv_transfer or {}), "engine_id": one.name}) for one in specs]
        return behind(router, specs, logs, say)

    return deploy


STACKS: tuple[Stack, ...] = (
    Stack("none: decode asks prefill", "this package", alone, most_engines=1),
    Stack("vllm-router", "0.1.17", _before(routers.vllm_router), asks_both_at_once=("push",)),
    Stack("Ray Serve LLM", "2.58.1", ray_serve, vllm="0.28.0"),
    Stack("Dynamo", "1.5.1", dynamo, constrains_tools_itself=True, vllm="0.28.0"),
    Stack("vLLM's toy proxy", "0.28.0", _before(routers.toy_proxy)),
    Stack(
        "vLLM's push demo",
        "0.28.0",
        _before(routers.push_demo, engine_ids_are_fixed=True),
        modes=("push",),
        asks_both_at_once=("push",),
        most_engines=1,
    ),
    Stack("production-stack", "a6c01db0", _before(routers.production_stack), needs=routers.PRODUCTION_STACK),
)
