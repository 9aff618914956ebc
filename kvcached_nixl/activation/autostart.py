# SPDX-License-Identifier: Apache-2.0
"""Called at the start of every Python interpreter. Does little: most of them never import vLLM.

A script may turn kvcached on before it imports vLLM, so the gate is read then. Until vLLM, or kvcached's patch of
vLLM's NIXL connector, is about to be imported, only this folder's finders, this module and the names they need are
imported.
"""

from __future__ import annotations

import os

from kvcached_nixl.activation import raise_barrier, set_watch
from kvcached_nixl.vllm import is_kvcached_on


def watch() -> None:
    """Install this package just before vLLM, or kvcached's patch of its NIXL connector, is imported."""
    set_watch(_install)


def _install() -> bool:
    """Returns whether this process has patches now. A later import asks again if not."""
    if not is_kvcached_on(os.environ):
        # With it kvcached patches vLLM now, and asks whether it is on when an engine is made: turned on in between, its
        # memory would be elastic under the stock connector. A child that is on from its start sets it itself.
        os.environ.pop("KVCACHED_AUTOPATCH", None)
        return False
    try:
        from kvcached_nixl.activation.bootstrap import install
    except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
        from kvcached_nixl.errors import not_importable

        raise_barrier(not_importable("kvcached_nixl cannot be imported", error))
        return False
    return install() is not None
