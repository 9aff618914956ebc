# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector on kvcached's elastic KV memory.

Importing this package changes nothing and imports neither vLLM, torch nor NIXL. `install` does the work. When
ENABLE_KVCACHED is on, ``kvcached_nixl.pth`` or the ``sitecustomize`` folder has it called when vLLM is imported, and
vLLM's plugin loader calls it again. Calling it more than once changes nothing more.
"""

from __future__ import annotations

from kvcached_nixl.version import __version__

# As typing has it; importing typing would be most of what an interpreter start with the gate open costs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvcached_nixl.activation.bootstrap import Installation
    from kvcached_nixl.cli.report import Report

__all__ = ["__version__", "install", "status", "uninstall"]


def install() -> Installation | None:
    """Register the patches of this process, if the environment says so.

    Safe to call any number of times, from any thread, before or after ``import vllm``. Never raises: whatever goes
    wrong is raised where vLLM constructs a NIXL connector.

    Returns: the installation of this process, or None if the gate is closed.
    """
    from kvcached_nixl.activation import bootstrap

    return bootstrap.install()


def uninstall() -> tuple[str, ...]:
    """Put everything back as it was. For tests and for comparisons with the stock connector in one process.

    Returns: dotted names that somebody else has wrapped meanwhile and that were therefore left, disabled.
    """
    from kvcached_nixl.activation import bootstrap

    return bootstrap.uninstall()


def status() -> Report:
    """What is in place in this process now. Imports nothing that is not imported."""
    from kvcached_nixl.activation import bootstrap
    from kvcached_nixl.cli import report

    installation = bootstrap.current()
    return report.make(installation.registry if installation is not None else None)
