# SPDX-License-Identifier: Apache-2.0
"""This package's patches, applied to the installed vLLM for a while."""

from __future__ import annotations

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
