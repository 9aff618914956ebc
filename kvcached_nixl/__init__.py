# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector on kvcached's elastic KV memory.

Importing this package changes nothing and imports neither vLLM, torch nor NIXL. `install` does the work. When
ENABLE_KVCACHED is on, it is called at interpreter start by ``kvcached_nixl.pth`` or by the ``sitecustomize`` folder,
and again by vLLM's plugin loader. Calling it more than once changes nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_nixl.bootstrap import Installation
    from kvcached_nixl.report import Report

__all__ = ["__version__", "install", "status", "uninstall"]

__version__ = "0.1.0"


def install() -> Installation | None:
    """Register the patches of this process, if the environment says so.

    Safe to call any number of times, from any thread, before or after ``import vllm``. Never raises: whatever goes
    wrong is raised where vLLM constructs a NIXL connector.

    Returns: the installation of this process, or None if the gate is closed.
    """
    from kvcached_nixl import bootstrap

    return bootstrap.install()


def uninstall() -> tuple[str, ...]:
    """Put everything back as it was. For tests and for comparisons with the stock connector in one process.

    Returns: dotted names that somebody else has wrapped meanwhile and that were therefore left, disabled.
    """
    from kvcached_nixl import bootstrap

    return bootstrap.uninstall()


def status() -> Report:
    """What is in place in this process now. Imports nothing that is not imported."""
    from kvcached_nixl import bootstrap, report

    return report.make(bootstrap.current())
