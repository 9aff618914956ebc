# SPDX-License-Identifier: Apache-2.0
"""This package's patches, applied to the installed vLLM for a while."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.adapter.versions import reason_to_skip


@contextmanager
def applied(patches: Iterable[Any]) -> Iterator[Registry]:
    """Applies these patches, all of them, and takes them back at the end."""
    registry = Registry(reason_to_skip)
    registry.add(patches)
    registry.complete()
    assert not registry.refusals()
    yield registry
    registry.uninstall()


def first_bound(modules: Iterable[str], name: str) -> Any:
    """The attribute of the first of these modules that has it: vLLM moves such functions."""
    for module in modules:
        try:
            found = vars(importlib.import_module(module)).get(name)
        except ModuleNotFoundError:
            continue
        if found is not None:
            return found
    raise AssertionError(f"no {name} in {modules}")
