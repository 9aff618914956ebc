# SPDX-License-Identifier: Apache-2.0
"""Host-memory emulation: runs the unmodified kvcached without a GPU.

kvcached is compiled over a small host-memory implementation of the runtime calls that it uses (`native/`). Reserved
addresses, mapping and unmapping of pages, the shared zero page and the limits are real. `build` compiles it. `hooks`
make vLLM's CPU worker accept it, and are not even imported with any other kvcached. `device` shows the memory in use.

KVCACHED_HOSTVMM_GIB is the size of the emulated device. Processes of one user share a device as they would share a GPU,
including the ranks of a data-parallel server; KVCACHED_HOSTVMM_DEVICE selects another device. They share its size, not
its memory: the device's file counts the memory of each process under its pid. So all of them must be in one pid
namespace; a process in another one is refused.
With NIXL_HOSTVMM_REGISTRATION=pinned, memory registered with NIXL does not follow its pages, as with a network card
(`pinning`).
"""

from __future__ import annotations

import functools
import os

BUILD_TAG = "1hostvmm"
"""The wheel build tag (PEP 427) that `build` gives kvcached. It is part of the installed metadata, so it disappears
when that kvcached is replaced or removed."""


def watch() -> None:
    """Prepares this process, at its start or as soon as vLLM is imported: until then a script may turn kvcached on.

    hostvmm.pth calls it, twice in a virtual environment.
    """
    if not _activate():
        import wrapt

        wrapt.when_imported("vllm")(lambda module: _activate())


def is_hostvmm_build() -> bool:
    """Whether the installed kvcached is the build on host memory. Reads one metadata file; does not import kvcached."""
    import importlib.metadata
    from email.parser import HeaderParser

    try:
        wheel = importlib.metadata.distribution("kvcached").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return False
    return wheel is not None and HeaderParser().parsestr(wheel).get("Build") == BUILD_TAG


def _activate() -> bool:
    is_on = os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true")
    if is_on:
        _install_once()
    return is_on


@functools.cache
def _install_once() -> None:
    if is_hostvmm_build():
        from hostvmm import hooks

        hooks.install()
