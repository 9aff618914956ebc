# SPDX-License-Identifier: Apache-2.0
"""Where vLLM calls this package: one module a subject, in which a patch and what it does stand together.

A function below ``@Patch(...)`` runs in place of what the record names, and decides whether to call the original.
"""

from __future__ import annotations

from types import ModuleType

from kvcached_nixl.patching import Patch
from kvcached_nixl.vllm.patches import (
    admission,
    answering,
    arrival,
    connector,
    engine_loop,
    factory,
    frontend,
    kvcached_quirks,
    leaving,
    naming,
    step_output,
    weights,
    windows,
)

_SUBJECTS = (
    factory,
    kvcached_quirks,
    windows,
    connector,
    arrival,
    step_output,
    engine_loop,
    weights,
    leaving,
    admission,
    frontend,
    answering,
    naming,
)


def patches_in(subject: ModuleType) -> tuple[Patch, ...]:
    """The patches of one of these modules, in the order of its text."""
    return tuple(one for one in vars(subject).values() if isinstance(one, Patch))


PATCHES = tuple(patch for subject in _SUBJECTS for patch in patches_in(subject))
"""Everything that is patched, in the order in which it is decided: the gate, kvcached's own patch, then the others."""
