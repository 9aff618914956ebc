# SPDX-License-Identifier: Apache-2.0
"""A patch described as data, instead of as the side effect of an import.

A module of patches has

    @Patch(target=WORKER, attribute="register_kv_caches", process="worker", ...).around
    def register_kv_caches(call: Call) -> None:
        call.proceed(kv_caches=narrow(call.argument("kv_caches")))

after which ``register_kv_caches`` is a `Seam`: the record together with its wrapper, ready for a `Registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching.call import Call

__all__ = ["ANY_PARAMETERS", "Kind", "PatchOutcome", "Patch", "Process", "Seam", "PatchState", "Target"]

Kind = Literal["method", "classmethod", "staticmethod", "property", "function"]
Process = Literal["scheduler", "worker", "frontend", "every"]

ANY_PARAMETERS: tuple[str, ...] = ("...",)
"""For a wrapper that neither reads nor overrides arguments by name: every parameter list is accepted."""


@dataclass(frozen=True)
class Target:
    """A class or module to patch.

    Args:
        name: our name for it in reports.
        module: defines it. A class that a module only re-exports is not found there.
        qualname: of the class; empty for the module itself.
        scope: the attribute must be defined in a module whose dotted name starts with this, so that a patch never
            changes a base class that other classes share. Empty: only ``module``.
    """

    name: str
    module: str
    qualname: str = ""
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}" if self.qualname else self.module

    def contains(self, module: str) -> bool:
        """Whether code defined in ``module`` may be patched under this target."""
        return module.startswith(self.scope) if self.scope else module == self.module


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of one target, and why it has to be wrapped.

    Args:
        target: see `Target`.
        attribute: name of the method or function.
        process: where in vLLM it runs: "scheduler" (engine core), "worker" (one per device), "frontend" (API server) or
            "every".
        parameters: the exact parameter names, ``self`` or ``cls`` included. Another list is refused before wrapping.
        why: what would go wrong without it.
        upstream: the issue, pull request or file that explains it.
        remove_when: the event after which this patch can be removed.
        kind: what the attribute is.
        also_accepts: further exact parameter lists, for other supported versions.
        versions: version specifier of the patched library; empty for every supported one. Read only by `Judge`.
        when_unsupported: apply even if the library's version is not supported. For the gate, which raises the refusal.
        when_absent: whether to refuse or to skip if the target does not exist.
        prepare: runs before the contract is checked; returns notes for the report, may raise `Refused`.
    """

    target: Target
    attribute: str
    process: Process
    parameters: tuple[str, ...]
    why: str
    upstream: str
    remove_when: str
    kind: Kind = "method"
    also_accepts: tuple[tuple[str, ...], ...] = ()
    versions: str = ""
    when_unsupported: bool = False
    when_absent: Literal["refuse", "skip"] = "refuse"
    prepare: Callable[[], tuple[str, ...]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("attribute", "why", "upstream", "remove_when"):
            if not getattr(self, name).strip():
                raise ValueError(f"patch {self.name!r} has an empty {name!r}")
        if not self.parameters and self.kind in ("method", "classmethod", "property"):
            raise ValueError(f"patch {self.name!r}: a {self.kind} has at least one parameter")

    @property
    def name(self) -> str:
        return f"{self.target.name}.{self.attribute}"

    def around(self, wrapper: Callable[[Call], Any]) -> Seam:
        """Decorator for the function that runs in place of the attribute. It decides whether to call the original."""
        return Seam(patch=self, wrapper=wrapper)


@dataclass(frozen=True)
class Seam:
    """A `Patch` and its wrapper function. Calling a seam calls that function, as tests do."""

    patch: Patch
    wrapper: Callable[[Call], Any]

    def __call__(self, call: Call) -> Any:
        return self.wrapper(call)


class PatchState(Enum):
    """The state of a patch. `PENDING` is only possible before `Registry.complete`."""

    PENDING = "pending"
    APPLIED = "applied"
    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass(frozen=True)
class PatchOutcome:
    """The state of one patch with its reason: where it was applied, why it was skipped, or what refused it.

    ``cause`` is set exactly when the state is `PatchState.REFUSED`.
    """

    name: str
    state: PatchState
    reason: str
    cause: Refused | None = None
    notes: tuple[str, ...] = ()
    process: str = ""
