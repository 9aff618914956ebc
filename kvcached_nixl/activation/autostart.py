# SPDX-License-Identifier: Apache-2.0
"""What the start of an interpreter calls when the gate is open: little, because most of them never import vLLM.

pip, compile workers and shells start with ENABLE_KVCACHED as well. Until vLLM or kvcached's part for it is looked for,
this module, `finders` and the names they need are all of this package that is imported.
"""

from __future__ import annotations

from kvcached_nixl.activation.import_hooks import raise_barrier, set_watch

__all__ = ["watch"]


def watch() -> None:
    """Have this package installed before vLLM, or kvcached's part for it, is imported."""
    set_watch(_install)


def _install() -> bool:
    """Returns: whether there is an installation now."""
    try:
        from kvcached_nixl.activation.bootstrap import install
    except Exception as error:  # noqa: BLE001 - turned into a refusal at the import of the connector
        from kvcached_nixl.errors import not_importable

        raise_barrier(not_importable("kvcached_nixl cannot be imported", error))
        return False
    return install() is not None
