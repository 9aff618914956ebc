# SPDX-License-Identifier: Apache-2.0
"""What of ours rides on vLLM's objects, under names of its own: what runs beside a connector, and what a step carries.

It lives as long as what it is attached to.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.compat.connector import private

_PUSH = "_kvcached_nixl_push"
_PULL = "_kvcached_nixl_pull"
_STEP = "kvcached_nixl_push_step"
_BEATS = "kvcached_nixl_beats"


def attach_push(half: Any, push: Any) -> None:
    """Keep our half of a push on vLLM's: its NIXL scheduler or its NIXL worker, whose lifetime is the same."""
    setattr(half, _PUSH, push)


def attach_pull(half: Any, pull: Any) -> None:
    """The same for what runs beside a connector that pulls."""
    setattr(half, _PULL, pull)


def half_of(half: Any) -> Any | None:
    """What `attach_push` attached; None if nothing was."""
    return vars(half).get(_PUSH)


def push_of(connector: Any) -> Any | None:
    """Our half of the push that runs beside a NIXL connector; None if it pulls, or is another connector."""
    return _attached(connector, _PUSH)


def pull_of(connector: Any) -> Any:
    """What runs beside a NIXL connector that pulls; None if it pushes, or is another connector."""
    return _attached(connector, _PULL)


def ours_of(connector: Any) -> Any:
    """Whichever of the two runs beside a NIXL connector; None beside another one."""
    return push_of(connector) or pull_of(connector)


def _attached(connector: Any, name: str) -> Any | None:
    for side in ("connector_scheduler", "connector_worker"):
        half = vars(connector).get(side) if connector is not None else None
        if half is not None:
            return vars(half).get(name)
    return None


def attach_step(metadata: Any, step: Any) -> Any:
    """Let our step ride on the metadata that vLLM hands to every worker."""
    setattr(metadata, _STEP, step)
    return metadata


def step_of(connector: Any) -> Any:
    """The step that is bound to a worker's connector."""
    return private(private(connector, "_connector_metadata"), _STEP)


def attach_beats(metadata: Any, beats: Any) -> Any:
    """The same for the leases that a connector that pulls renews."""
    setattr(metadata, _BEATS, beats)
    return metadata


def beats_of(connector: Any) -> Any:
    """The leases to renew in the step that is bound to a worker's connector."""
    return private(private(connector, "_connector_metadata"), _BEATS)


def sent_in(connector: Any) -> list[str]:
    """Prefill's requests that the step bound to a worker's connector says have ended."""
    return list(private(private(connector, "_connector_metadata"), "reqs_to_send"))
