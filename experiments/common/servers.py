# SPDX-License-Identifier: Apache-2.0
"""Starts and stops real ``vllm serve`` processes: each in its own session, with free ports and its own IPC names.

Every wait is bounded, and stopping a server removes what it leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from experiments.common import device
from experiments.common.client import is_up
from experiments.common.device import role, with_extra

SERVER_SIDE = Path(__file__).resolve().parent / "server_side"
REPOSITORY = Path(__file__).resolve().parents[2]
"""Servers import the package from this tree, even if their environment was made for another worktree."""
HOST = "127.0.0.1"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor for one device, by its full path. By its short name, vLLM >= 0.28 replaces it on a CPU with one that
keeps two more processes per server busy-waiting; four of those on two cores stall a hand-over for seconds."""
READY_SECONDS = 300.0
STOP_SECONDS, ENDING_SECONDS = 20.0, 60.0
LOG_TAIL_LINES = 40

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_SERVER_DEV_MODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM compiles one sampler helper even under --enforce-eager; on a cold machine that costs minutes per server.
    "TORCH_COMPILE_DISABLE": "1",
    # vLLM's cache of model information. Two versions of vLLM with one folder would discard each other's entries.
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache-of-vllm"),
}
GIVES_BACK: Mapping[str, str] = {
    "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_MAX_RESERVED_PAGES": "0",
    # A cached block would keep its page mapped.
    "KVCACHED_MAX_CACHED_TOKENS": "0",
}
"""Makes kvcached unmap a page as soon as it is empty, so that a leaked block is visible as a mapped page."""
INHERITED_PREFIXES_DROPPED = ("KVCACHED_", "ENABLE_KVCACHED", "VLLM_", "UCX_", "NIXL_", "TRITON_", "PYTHONPATH")
"""Prefixes of environment variables that servers do not inherit: they would change what an arm runs."""


class ServerError(RuntimeError):
    """A server that did not start, or died."""


def inherited() -> dict[str, str]:
    """Return this process's environment variables without those that would change what an arm runs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(INHERITED_PREFIXES_DROPPED)}


def python_path(*more: Path) -> str:
    """Return PYTHONPATH of a process that runs vLLM: what it imports of this tree, and ``more``."""
    return os.pathsep.join(map(str, (SERVER_SIDE, REPOSITORY, *more)))


def environment_with(*packages: Path) -> dict[str, str]:
    """Return the variables of a process that runs vLLM, and imports ``packages``, too."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**inherited(), **ENVIRONMENT, "PATH": path, "PYTHONPATH": python_path(*packages)}


def free_ports(count: int) -> list[int]:
    """Return ``count`` distinct loopback ports that were free a moment ago.

    They are below the kernel's range for outgoing connections: otherwise one of NIXL's own sockets could take a port
    before the server that it is reserved for has bound it.
    """
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.SystemRandom().sample(range(10_000, min(lowest_ephemeral, 32_768)), 200)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ServerError(
        f"found {len(found)} free ports of {len(candidates)} tried on {HOST}; expected {count}. No server can be "
        "started. Stop the processes that use these ports."
    )


@dataclass(frozen=True)
class ServerSpec:
    """Configuration of one server: a name for its log, the model, and the settings of its arm.

    ``kv_transfer`` is the value of ``--kv-transfer-config`` or None for an instance without a connector.
    ``block_size`` is None for vLLM's choice. ``kv_space_gib`` is vLLM's own KV budget (on a CPU VLLM_CPU_KVCACHE_SPACE,
    whole GiB). ``arguments`` are more of the engine's, ``http_arguments`` of ``vllm serve`` itself. ``forks``: the
    engine is forked, which halves the time to start on a CPU; ``vllm serve`` itself spawns its engine.
    """

    name: str
    model: Path
    dtype: str = "bfloat16"
    block_size: int | None = 32
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    executor: str = UNIPROC
    tensor_parallel_size: int = 1
    kv_space_gib: int = 1
    kv_transfer: Mapping[str, object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    http_arguments: tuple[str, ...] = ()
    executable: Path = Path(sys.prefix) / "bin" / "vllm"
    forks: bool = False

    def command(self, port: int, engine_id: str) -> list[str]:
        """Return the argument list of ``vllm serve`` on ``port``. ``engine_id``: the connector's, unless
        ``kv_transfer`` has one."""
        return [
            *(str(self.executable), "serve", str(self.model), "--host", HOST, "--port", str(port)),
            *("--uvicorn-log-level", "warning"),
            *self.http_arguments,
            *self.engine_arguments(engine_id),
        ]

    def environment_at(self, port: int) -> Mapping[str, str]:
        """Return more variables, of a server that does not take its port as an argument."""
        return {}

    def engine_arguments(self, engine_id: str) -> list[str]:
        """Return the arguments of vLLM's engine, whatever serves it."""
        arguments = [
            *("--served-model-name", "model", "--dtype", self.dtype, "--enforce-eager", "--seed", "0"),
            *(() if self.block_size is None else ("--block-size", str(self.block_size))),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--max-num-seqs", str(self.max_num_seqs), "--enable-chunked-prefill", "--enable-prefix-caching"),
            *("--distributed-executor-backend", self.executor),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *device.arguments(self.kv_space_gib),
            *("--worker-extension-cls", "kv_probe.KvProbe", "--max-logprobs", "20"),
        ]
        if self.kv_transfer is not None:
            config = device.transfer(self.environment, self.kv_transfer)
            arguments += ["--kv-transfer-config", json.dumps({"engine_id": engine_id, **config})]
        return [*arguments, *self.arguments]


def tag_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def prefill_and_decode(tag: str, kv_transfer: Mapping[str, object], **more: Any) -> list[ServerSpec]:
    """Return the configurations of two servers that differ in their role only; ``more`` are fields of both."""
    return [
        ServerSpec(name=f"{tag_of(tag)}-{side}", kv_transfer={**kv_transfer, "kv_role": role(side)}, **more)
        for side in ("prefill", "decode")
    ]


class Server:
    """A running ``vllm serve``; made by :func:`running`. Not thread-safe. ``ports``: of HTTP and of the side channel,
    to reuse those of an earlier server."""

    def __init__(self, spec: ServerSpec, logs: Path, ports: tuple[int, int] | None = None) -> None:
        self.spec = spec
        self.port, self.side_channel_port = ports or free_ports(2)
        self.identity = f"kvx{uuid.uuid4().hex[:10]}"
        self.log = logs / f"{spec.name}.log"
        self.base_url = f"http://{HOST}:{self.port}"
        self.started_at = time.monotonic()
        environment = {
            **environment_with(),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "KVCACHED_IPC_NAME": self.identity,
            "KVCACHED_HOSTVMM_DEVICE": self.identity,
        }
        environment |= device.environment(spec.environment, spec.kv_space_gib, forks=spec.forks)
        environment |= spec.environment_at(self.port)
        command = spec.command(self.port, self.identity)
        logs.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            differs = {name: value for name, value in sorted(environment.items()) if os.environ.get(name) != value}
            log.write(f"# {json.dumps(command)}\n# {json.dumps(differs)}\n")
            log.flush()
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=logs, start_new_session=True
            )

    @property
    def coordinates(self) -> dict[str, object]:
        """This server's address for a decode server, as fields of ``kv_transfer_params``."""
        return {
            "remote_engine_id": (self.spec.kv_transfer or {}).get("engine_id", self.identity),
            "remote_host": HOST,
            "remote_port": self.side_channel_port,
            "tp_size": self.spec.tensor_parallel_size,
        }

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server's session that still run; zombies do not count."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def check_alive(self) -> None:
        """Raise :class:`ServerError`, with the log's tail, if the server has ended."""
        status = self.process.poll()
        if status is not None:
            raise ServerError(
                f"{self.spec.name}: found the server ended with status {status}; expected it to serve. Nothing can be "
                f"compared without it. Its log, {self.log}, ends with:\n{self.tail()}"
            )

    def kill(self) -> None:
        """End the whole session by SIGKILL, like a machine that fails: no peer is notified."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def shut_down(self) -> None:
        """Send SIGTERM to the process that was started, as a container's runtime does, and wait until it has ended.
        Raises ServerError if it has not after `ENDING_SECONDS`."""
        self.process.terminate()
        try:
            self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"found {self.spec.name} still running {ENDING_SECONDS} s after SIGTERM") from error

    def stand_still(self) -> None:
        """Stop every process (SIGSTOP), as a debugger or a frozen container does, until :meth:`go_on`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the whole session, also if it stands still."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.go_on()

    def stop(self) -> None:
        """End the whole session by SIGTERM, after a bounded wait by SIGKILL; then remove the files that it left."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        # The leader may have ended while its children still run.
        self.kill()
        # The ports and the memory are free for the next server only when every process has ended.
        deadline = time.monotonic() + STOP_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        shared = Path("/dev/shm").glob(f"*{self.identity}*")
        for leftover in [*shared, *Path("/tmp").glob(f"kvcached-tp-{self.identity}*")]:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


class Running:
    """Servers that run during a ``with`` block: started together on entry, waited for by :meth:`ready`.

    Starting takes most of an experiment's time, so several blocks may be entered before the first ``ready``.
    """

    def __init__(self, specs: list[ServerSpec], logs: Path, on_wait: Callable[[str], None] | None = None) -> None:
        self.specs, self.logs, self.on_wait = specs, logs, on_wait
        self.servers: list[Server] = []
        self.ports: list[tuple[int, int] | None] = [None] * len(specs)

    def __enter__(self) -> Running:
        # Servers are in sessions of their own: without this, a terminated experiment would leave them running.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            for spec, ports in zip(self.specs, self.ports, strict=True):
                self.servers.append(Server(self.configured(spec), self.logs, ports))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def configured(self, spec: ServerSpec) -> ServerSpec:
        """Return ``spec`` with what is known of the servers before it."""
        return spec

    def ready(self) -> list[Server]:
        """Return the servers when all of them answer; raises :class:`ServerError` if one ends or takes too long."""
        waiting = list(self.servers)
        begun = time.monotonic()
        while waiting := [server for server in waiting if not is_up(f"{server.base_url}/health")]:
            for server in waiting:
                server.check_alive()
            seconds = time.monotonic() - begun
            names = ", ".join(server.spec.name for server in waiting)
            if seconds > READY_SECONDS:
                tails = "\n".join(f"--- {server.log}\n{server.tail()}" for server in waiting)
                raise ServerError(
                    f"found {names} not ready after {READY_SECONDS:.0f} s; expected /health to answer. Nothing can be "
                    f"compared. See the logs:\n{tails}"
                )
            if self.on_wait is not None:
                self.on_wait(f"starting {names}: {seconds:.0f} s")
            time.sleep(0.2)
        return self.servers

    def replace(self, index: int, spec: ServerSpec | None = None) -> Server:
        """Start a new server on the ports of the dead one at ``index``, with another configuration if ``spec`` is
        given. It is returned before it is ready."""
        dead = self.servers[index]
        dead.stop()  # removes what it left in shared memory
        generation = int(dead.spec.name.partition("+")[2] or 0) + 1
        spec = replace(spec or dead.spec, name=f"{dead.spec.name.partition('+')[0]}+{generation}")
        self.servers[index] = Server(spec, self.logs, (dead.port, dead.side_channel_port))
        return self.servers[index]

    def bring_back(self, index: int, spec: ServerSpec | None = None) -> None:
        """:meth:`replace` a dead server, and return when all of them answer."""
        self.replace(index, spec)
        self.ready()

    def stop(self) -> None:
        servers, self.servers = self.servers, []
        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.callback(server.stop)
            for server in servers:
                server.ask_to_stop()


@contextlib.contextmanager
def running(
    specs: list[ServerSpec], logs: Path, on_wait: Callable[[str], None] | None = None
) -> Iterator[list[Server]]:
    """Start ``specs`` together, yield the servers when all of them answer, and always stop them afterwards."""
    with Running(specs, logs, on_wait) as launched:
        yield launched.ready()


def asks(decode: ServerSpec, prefills: Sequence[Server]) -> ServerSpec:
    """Return the configuration of a decode server that asks ``prefills``."""
    assert decode.kv_transfer is not None
    urls = {"prefill": [one.base_url for one in prefills]}
    return replace(decode, kv_transfer=with_extra(decode.kv_transfer, urls))


class Asking(Running):
    """Prefill servers, and after them decode servers that ask all of them; their names say their roles."""

    def configured(self, spec: ServerSpec) -> ServerSpec:
        prefills = [one for one in self.servers if role(one.spec.name) == "kv_producer"]
        return asks(spec, prefills) if role(spec.name) == "kv_consumer" else spec
