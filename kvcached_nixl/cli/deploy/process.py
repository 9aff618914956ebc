# SPDX-License-Identifier: Apache-2.0
"""Checks of what a server's processes need of this host: folders, limits, names, transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding
from kvcached_nixl.cli.limits import shortfalls
from kvcached_nixl.settings import MemoryPath
from kvcached_nixl.worker.transfer.host import only_networks

__all__ = ["cache_folder", "limits", "multiprocessing", "open_files", "sockets", "transports"]

_SOCKETS = Path("/tmp")
"""kvcached's ``TP_SOCKET_DIR_ROOT``."""
_OPEN_FILES = 65_535
"""vLLM raises its soft limit to this."""
_GPU = "/dev/nvidiactl"


def sockets(at: Situation) -> Iterator[Finding]:
    if (why := at.host.why_not_written(_SOCKETS)) is not None:
        yield Finding(
            "sockets",
            f"{_SOCKETS} cannot be written: {why}",
            "a folder where this user may create folders, shared by the processes of one engine",
            "kvcached's workers have no sockets, and the server does not start.",
            f"Mount a writable {_SOCKETS} (Kubernetes: an emptyDir).",
        )


def cache_folder(at: Situation) -> Iterator[Finding]:
    home = at.environ.get("XDG_CACHE_HOME") or str(Path(at.environ.get("HOME") or "/") / ".cache")
    if (why := at.host.why_not_written(Path(home))) is not None:
        yield Finding(
            "cache folder",
            f"{home} cannot be written: {why}",
            "a folder where this user may write",
            "The proof of NIXL's transports is not kept: each start repeats it, for up to 300 s.",
            "Set HOME or XDG_CACHE_HOME to a writable folder.",
            is_wrong=False,
        )


def limits(at: Situation) -> Iterator[Finding]:
    yield from shortfalls(at.host.limits(), pins=at.host.has("/sys/class/infiniband"))


def open_files(at: Situation) -> Iterator[Finding]:
    if 0 <= (most := at.host.most_open_files()) < _OPEN_FILES:
        yield Finding(
            "open files",
            f"ulimit -Hn {most}",
            f"{_OPEN_FILES} or more",
            "vLLM cannot raise its limit: under load, connections and transfers may fail.",
            f"Raise the hard limit (--ulimit nofile={_OPEN_FILES}).",
            is_wrong=False,
        )


def multiprocessing(at: Situation) -> Iterator[Finding]:
    if at.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") in ("0", ""):
        yield Finding(
            "names",
            "VLLM_ENABLE_V1_MULTIPROCESSING=0",
            "1, vLLM's default",
            "A second engine in this process is refused, since its pages could be mapped in the first one's workers.",
            "Unset VLLM_ENABLE_V1_MULTIPROCESSING.",
            is_wrong=False,
        )


def transports(at: Situation) -> Iterator[Finding]:
    """Only where KV may be moved in device memory: in host memory every transport but XPMEM will do."""
    if not at.host.has(_GPU) or at.extra.get("memory_path") == MemoryPath.HOST.value:
        return
    given = at.environ.get("UCX_TLS", "")
    names = {one.strip() for one in given.split(",")}
    if given and not given.startswith("^") and not any(one == "all" or one.startswith("cuda") for one in names):
        yield Finding(
            "transports",
            f"UCX_TLS={given} on a host with an NVIDIA GPU",
            "cuda_copy among them",
            "UCX cannot read or write device memory, so KV goes through host memory.",
            f'Set UCX_TLS={given},cuda_copy; or "memory_path": "host", which says so and needs no proof at start.',
            is_wrong=False,
        )
    elif at.is_in_container and not only_networks(given):
        yield Finding(
            "transports",
            f"UCX_TLS={given}, in a container" if given else "UCX_TLS is not set, in a container",
            "one process namespace for all servers of a host; or KV in host memory; or networks only",
            "If a prefill of another container of this host stands still, decode cannot see whether its process has "
            "ended, and keeps the blocks in quarantine.",
            'Set "memory_path": "host", or share the process namespace.',
            is_wrong=False,
        )
