# SPDX-License-Identifier: Apache-2.0
"""Starts the processes to compare: the router, the pass-through and nginx, in front of the same stub servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.stacks.environments import Say, environment

HOST = "127.0.0.1"
START_SECONDS = 60.0
NGINX = """\
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  upstream decode {{ server {host}:{decode}; keepalive 1024; }}
  server {{ listen {host}:{port}; location / {{
    proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


def ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind((HOST, 0))
            found.append(one.getsockname()[1])
        return found


def cores() -> tuple[set[int], set[int]]:
    """Return the core of the measured process, and those of servers and clients; the same if there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return {usable[0]}, set(usable[1:]) or {usable[0]}


@contextlib.contextmanager
def process(command: Sequence[str], port: int, on: set[int]) -> Iterator[int]:
    """Run a process on the cores ``on`` during a ``with`` block. Yields its id when it listens."""
    running = subprocess.Popen(
        command, preexec_fn=lambda: os.sched_setaffinity(0, on), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
                break
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"found {command[0:4]} ended or not listening; expected it to listen on {port}")
            time.sleep(0.05)
        yield running.pid
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, words)]


def router_command(port: int, prefill: int, decode: int) -> list[str]:
    where = ["--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}"]
    return module("kvcached_nixl", "proxy", "--port", port, "--max-inflight", 4096, *where)


def passthrough_command(port: int, prefill: int, decode: int) -> list[str]:
    return module("experiments.router_overhead.passthrough", port, prefill, decode)


def vllm_router_command(port: int, prefill: int, decode: int, metrics: int, say: Say) -> list[str]:
    """Return the command of vllm-router; its environment is made on first use."""
    where = ["--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}"]
    command = [
        str(environment("vllm-router", say) / "vllm-router"),
        "--vllm-pd-disaggregation",
        "--kv-connector",
        "nixl",
    ]
    command += ["--host", HOST, "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(metrics)]
    return [*command, "--worker-startup-check-interval", "1", "--max-concurrent-requests", "4096", *where]


def nginx_command(port: int, decode: int, folder: Path) -> list[str] | None:
    """Return nginx's command, or None where it is not installed."""
    found = shutil.which("nginx")
    if found is None:
        return None
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, host=HOST, port=port, decode=decode))
    return [found, "-c", str(config)]


def resident_bytes(pid: int) -> int:
    """Return a process's current resident memory."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """Return how many files and connections a process keeps open: the least of 5 s, since idle ones are closed."""
    counts = []
    for _ in range(10):
        counts.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        time.sleep(0.5)
    return min(counts)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
