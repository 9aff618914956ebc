# SPDX-License-Identifier: Apache-2.0
"""Selects the device that a thread uses. Each thread has its own, and starts with device 0 and without a context.

Each thread that calls NIXL or uses a device must select it first, for two reasons. UCX takes the context that is
current in the thread that connects a peer, and does not use cuda_ipc if there is none. And code that restores the
previous device, as leaving a stream or an event does, would make a context on device 0: some hundred MiB for every
rank.

vLLM's handshake thread does the same. Sources: ``_nixl_handshake`` in ``v1/nixl/base_worker.py``, ``set_device`` in
``platforms/cuda.py``, pytorch#155668.
"""

from __future__ import annotations


def select(kind: str, index: int) -> None:
    """Makes a device current in the calling thread, with its context: ``kind`` is torch's name of the accelerator, or
    ``cpu``, for which this does nothing. Raises RuntimeError, from torch: the device cannot be used."""
    if kind == "cpu":
        return
    import torch

    torch.accelerator.set_device_index(index)
    # Selecting the device that is already current makes no context; the first use of the device does.
    torch.zeros(1, device=f"{kind}:{index}")
