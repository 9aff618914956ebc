# SPDX-License-Identifier: Apache-2.0
"""Checks for servers that Ray Serve or Dynamo starts, as far as their variables and command lines show it."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding

__all__ = ["dynamo", "ray"]

_ROLE_OF_MODE = MappingProxyType({"prefill": "kv_producer", "decode": "kv_consumer"})


def ray(at: Situation) -> Iterator[Finding]:
    """A replica gets the variables of its deployment, not those of the shell that starts it."""
    if not any(name.startswith("RAY_") for name in at.environ) or "RAY_JOB_ID" in at.environ:
        return
    yield Finding(
        "Ray",
        "variables of Ray in a process that is no worker of it",
        "ENABLE_KVCACHED and the other variables in LLMConfig's runtime_env.env_vars",
        "Replicas do not get the variables of this shell, so they would run vLLM alone.",
        "Put them into each LLMConfig's runtime_env, and run this command in a task with that runtime_env.",
        is_wrong=False,
    )


def dynamo(at: Situation) -> Iterator[Finding]:
    mode = at.value("--disaggregation-mode")
    expected = _ROLE_OF_MODE.get(mode or "")
    if expected is not None and at.role not in (expected, None):
        yield Finding(
            "Dynamo",
            f"--disaggregation-mode {mode} with kv_role {at.role}",
            f"kv_role {expected}",
            "vLLM runs the role that Dynamo does not send it requests for.",
            f'Set "kv_role": "{expected}".',
            is_wrong=at.role != "kv_both",
        )
    if at.is_dynamo_worker and "DYN_SYSTEM_PORT" not in at.environ:
        yield Finding(
            "Dynamo",
            "DYN_SYSTEM_PORT is not set",
            "a port for this worker's /health and /metrics",
            "Nothing can be probed or scraped.",
            "Set DYN_SYSTEM_PORT.",
            is_wrong=False,
        )
