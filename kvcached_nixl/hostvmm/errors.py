# SPDX-License-Identifier: Apache-2.0
"""The one exception of the host-memory emulation."""

from __future__ import annotations

from kvcached_nixl.errors import Refused


class HostvmmError(Refused, RuntimeError):
    """kvcached on host memory cannot be built, or cannot run here.

    A RuntimeError too: where kvcached sets up its block pool it lets only those pass. Any other exception it logs, and
    the engine goes on with vLLM's own block pool over memory that nobody backs.
    """
