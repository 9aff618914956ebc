# SPDX-License-Identifier: Apache-2.0
"""The exception of the host-memory emulation."""

from __future__ import annotations

from kvcached_nixl.errors import Refused


class HostvmmError(Refused, RuntimeError):
    """kvcached on host memory cannot be built, or cannot run here.

    It is also a RuntimeError, because kvcached lets only those pass while it sets up its block pool. It would log any
    other exception, and the engine would continue with vLLM's own block pool over memory without pages.
    """
