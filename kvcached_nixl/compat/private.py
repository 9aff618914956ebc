# SPDX-License-Identifier: Apache-2.0
"""Reading what vLLM keeps to itself: a name that is gone is a refusal, not a default."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from kvcached_nixl.errors import ContractChanged

__all__ = ["first_module", "private"]


def first_module(names: Sequence[str]) -> Any:
    """The first of these modules that there is.

    Raises:
        ImportError: there is none.
    """
    for name in names:
        parent = name.rpartition(".")[0]
        if importlib.util.find_spec(parent) is not None and importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError(f"found none of {', '.join(names)}")


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of vLLM's, or refuse by its name."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ContractChanged(
            found=f"{type(owner).__module__}.{type(owner).__qualname__} without {name!r}",
            expected=f"the attribute {name!r} that this package reads",
            consequence="its geometry cannot be known; the engine stops before any transfer",
            remedy="use a vLLM version that `python -m kvcached_nixl` lists as supported",
        ) from error
