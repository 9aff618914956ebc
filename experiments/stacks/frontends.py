# SPDX-License-Identifier: Apache-2.0
"""The table of stacks: how each is started in front of running servers. To try another one, add a row."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from experiments.common.router import STOP_SECONDS, routed, running_router
from experiments.common.servers import HOST, Server, free_ports
from experiments.stacks.environments import environment

Say = Callable[[str], None]
Launch = Callable[[Sequence[Server], Sequence[Server], Path, Say], AbstractContextManager[str]]
"""(prefill servers, decode servers, log, progress) -> the URL that clients use, without a path, while it runs."""


@dataclass(frozen=True)
class Stack:
    """One router.

    Attributes:
        version: of what is started.
        modes: transfer modes that it asks for.
        passes_answers_in: those in which decode always gets prefill's answer. In the others both are asked at once.
    """

    name: str
    version: str
    launch: Launch
    modes: tuple[str, ...] = ("pull", "push")
    passes_answers_in: tuple[str, ...] = ("pull",)


@contextlib.contextmanager
def _own(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Iterator[str]:
    with routed(prefills, decodes, log) as url:
        yield url


@contextlib.contextmanager
def _vllm_router(prefills: Sequence[Server], decodes: Sequence[Server], log: Path, say: Say) -> Iterator[str]:
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
    url = f"http://{HOST}:{port}"
    with running_router(command, log, lambda: _answers(f"{url}/health"), "/health to answer") as process:
        yield url
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False, timeout=2.0).status_code == httpx.codes.OK
    return False


STACKS: tuple[Stack, ...] = (
    Stack("kvcached-nixl proxy", "this package", _own),
    Stack("vllm-router", "0.1.17", _vllm_router),
)
