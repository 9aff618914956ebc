# SPDX-License-Identifier: Apache-2.0
"""Which device a thread's calls go to: each thread has one of its own, and begins with device 0, without a context.

Each thread that calls NIXL or uses a device selects it first. UCX takes the context that is current in the thread that
meets a peer, and leaves cuda_ipc out where there is none; and what goes back to the device of before, as the end of a
stream's use and of an event do, would make a context on device 0, some hundred MiB of every rank's.

vLLM's thread for handshakes does the same. Sources: ``_nixl_handshake`` in ``v1/nixl/base_worker.py``, ``set_device``
in ``platforms/cuda.py``, pytorch#155668.
"""

from __future__ import annotations

__all__ = ["select"]


def select(kind: str, index: int) -> None:
    """Make a device the calling thread's, with its context; nothing of host memory.

    Args:
        kind: torch's name of an accelerator, or ``cpu``.
        index: which one.

    Raises:
        RuntimeError: torch's, of a device that cannot be used.
    """
    if kind == "cpu":
        return
    import torch

    torch.accelerator.set_device_index(index)
    # Selecting makes no context where the thread has that device already; its first use does.
    torch.zeros(1, device=f"{kind}:{index}")
