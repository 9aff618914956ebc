# SPDX-License-Identifier: Apache-2.0
"""What the checks look at: the environment, the command line, and this host."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcached_nixl.cli.deploy.serve_command import ServeCommand
from kvcached_nixl.cli.limits import Limits, limits

__all__ = ["Host", "Situation"]

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


class Host:
    """Questions to this host. Nothing that they do outlives the call."""

    def own_ip(self) -> str:
        """The address of this host towards the internet, as vLLM finds it without VLLM_HOST_IP; 0.0.0.0 without one."""
        for family, there in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Sends nothing.
                probe.connect((there, 80))
                return str(probe.getsockname()[0])
        return "0.0.0.0"

    def why_not_bound(self, address: str, port: int) -> int | None:
        """The error number with which binding a socket there fails, on any port if it is 0; None if it works."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As ZeroMQ and uvicorn do: a connection that has ended does not keep the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            return error.errno or errno.EINVAL
        return None

    def why_not_written(self, folder: Path) -> str | None:
        """Why nothing can be created in a folder, or in its parent if it does not exist; None if it can."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            with tempfile.TemporaryDirectory(prefix="kvcached-nixl-", dir=folder):
                return None
        except OSError as error:
            return str(error)

    def limits(self) -> Limits:
        return limits()

    def most_open_files(self) -> int:
        """The hard limit; -1 if it is unlimited."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def has(self, path: str) -> bool:
        return Path(path).exists()


@dataclass(frozen=True)
class Situation:
    """One server that is to be started here.

    Attributes:
        transfer: its ``--kv-transfer-config``; None if it is not known.
        vllm: the installed version.
    """

    environ: Mapping[str, str]
    command: ServeCommand | None = None
    transfer: Mapping[str, Any] | None = None
    vllm: str | None = None
    host: Host = field(default_factory=Host)

    @property
    def role(self) -> str | None:
        found = (self.transfer or {}).get("kv_role")
        return found if isinstance(found, str) else None

    @property
    def extra(self) -> Mapping[str, Any]:
        """``kv_connector_extra_config``."""
        found = (self.transfer or {}).get("kv_connector_extra_config")
        return found if isinstance(found, Mapping) else MappingProxyType({})

    @property
    def is_in_cluster(self) -> bool:
        """Whether a scheduler of containers has started this process: its peers are in other network namespaces."""
        return "KUBERNETES_SERVICE_HOST" in self.environ

    @property
    def is_in_container(self) -> bool:
        return self.is_in_cluster or any(map(self.host.has, _CONTAINER_MARKS))

    @property
    def is_dynamo_worker(self) -> bool:
        return self.command is not None and "dynamo.vllm" in self.command.words

    def value(self, flag: str) -> str | None:
        """The value of a flag of the server's command line; None if the flag or the command line is missing."""
        return None if self.command is None else self.command.value(flag)

    def number(self, flag: str, default: int) -> int:
        """The value of a flag as a number; ``default`` without the flag, or if vLLM would say that it is no number."""
        text = self.value(flag) or ""
        return int(text) if text.isdecimal() else default

    def has(self, flag: str) -> bool:
        return self.value(flag) is not None

    @property
    def ranks(self) -> range:
        """vLLM's ``data_parallel_index`` of each engine that runs here: ``EngineArgs.create_engine_config``."""
        size, nodes = self.number("--data-parallel-size", 1), self.number("--nnodes", 1)
        per_rank = self.number("--tensor-parallel-size", 1) * self.number("--pipeline-parallel-size", 1)
        # Without the number of local ranks, vLLM does not look at the start rank.
        start, local = 0, size
        if is_of_nodes := nodes > 1 and per_rank > 0:
            here = size * per_rank // nodes
            first = self.number("--node-rank", 0) * here
            # A node with only a part of a rank's workers has its engine if it has the first of them.
            start, local = first // per_rank, max(here // per_rank, int(first % per_rank == 0))
        if self.has("--data-parallel-rank"):
            start, local = self.number("--data-parallel-rank", 0), 1
        elif is_of_nodes and self.has("--data-parallel-external-lb"):
            local = min(local, 1)
        elif is_of_nodes or self.has("--data-parallel-size-local"):
            start = self.number("--data-parallel-start-rank", start)
            local = self.number("--data-parallel-size-local", local)
        if size == 1:
            # vLLM does not look at a rank then.
            start = 0
        return range(start, start + local)
