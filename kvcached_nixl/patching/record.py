# SPDX-License-Identifier: Apache-2.0
"""What a patch is: data, not the side effect of an import.

A seam file reads

    REGISTER_KV_CACHES = Patch(target=WORKER, attribute="register_kv_caches", process="worker", ...)

    @REGISTER_KV_CACHES.around
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

__all__ = ["ANY_PARAMETERS", "Kind", "Outcome", "Patch", "Place", "Process", "Seam", "State", "Target"]

Kind = Literal["method", "classmethod", "staticmethod", "property", "function"]
Process = Literal["scheduler", "worker", "frontend", "every"]

ANY_PARAMETERS: tuple[str, ...] = ("...",)
"""For a wrapper that neither reads nor overrides arguments by name: no parameter list is refused."""


@dataclass(frozen=True)
class Place:
    """One place a target may live: a module, and a class in it (empty for the module itself)."""

    module: str
    qualname: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}" if self.qualname else self.module


@dataclass(frozen=True)
class Target:
    """A class or module by the name we give it, wherever the installed version keeps it.

    Args:
        name: our word for it, used in reports.
        places: where to look, best first. A class that a module merely re-exports does not count as found there.
        scope: the attribute must be defined in a module whose dotted name starts with this, so that a patch can never
            land on a base class shared with others. Empty: only the modules in ``places``.
    """

    name: str
    places: tuple[Place, ...]
    scope: str = ""

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError(f"target {self.name!r} has no place to look at")

    def contains(self, module: str) -> bool:
        """Whether code defined in ``module`` may be patched under this target."""
        if self.scope:
            return module.startswith(self.scope)
        return any(place.module == module for place in self.places)


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
        remove_when: the event after which this patch can go.
        kind: what the attribute is.
        also_accepts: further exact parameter lists, for other supported versions.
        versions: version specifier of the patched library; empty for every supported one. Compared only by `Judge`.
        needs: the capability this is part of; skipped where somebody else provides it. Compared only by `Judge`.
        when_unsupported: apply even if the library's version is not supported. For the gate, which must stand there.
        when_absent: what it means if the target is nowhere to be found.
        also_bound_in: modules that keep a binding of their own from ``from x import f``, as "module" or "module:name".
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
    needs: str = ""
    when_unsupported: bool = False
    when_absent: Literal["refuse", "skip"] = "refuse"
    also_bound_in: tuple[str, ...] = ()
    prepare: Callable[[], tuple[str, ...]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("attribute", "why", "upstream", "remove_when"):
            if not getattr(self, name).strip():
                raise ValueError(f"patch {self.name!r} says nothing in {name!r}")
        if not self.parameters and self.kind in ("method", "classmethod", "property"):
            raise ValueError(f"patch {self.name!r}: a {self.kind} has at least one parameter")

    @property
    def name(self) -> str:
        return f"{self.target.name}.{self.attribute}"

    def around(self, wrapper: Callable[[Call], Any]) -> Seam:
        """Decorator: bind the function that runs in place of the attribute. It decides whether and how to proceed."""
        return Seam(patch=self, wrapper=wrapper)


@dataclass(frozen=True)
class Seam:
    """A `Patch` and the function that runs around it. Calling a seam calls that function: so do tests."""

    patch: Patch
    wrapper: Callable[[Call], Any]

    def __call__(self, call: Call) -> Any:
        return self.wrapper(call)


class State(Enum):
    """How a patch ended. `PENDING` is only possible before the registry was completed."""

    PENDING = "pending"
    APPLIED = "applied"
    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass(frozen=True)
class Outcome:
    """The state of one patch with its reason: where it was applied, why it was skipped, or what refused it.

    ``cause`` is set exactly when the state is `State.REFUSED`.
    """

    name: str
    state: State
    reason: str
    cause: Refused | None = None
    notes: tuple[str, ...] = ()
    process: str = ""
