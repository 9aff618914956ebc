# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector on kvcached's elastic KV memory.

Importing this package changes nothing and imports neither vLLM, torch nor NIXL. `install` does the work.
``kvcached_nixl.pth`` or the ``sitecustomize`` folder has it called when vLLM is imported with ENABLE_KVCACHED on, and
vLLM's plugin loader calls it again. Calling it more than once changes nothing more.
"""

from __future__ import annotations

from kvcached_nixl.version import __version__

# Like typing.TYPE_CHECKING. Importing typing would be most of what this package adds to an interpreter start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvcached_nixl.cli.report import Report
    from kvcached_nixl.patching import Registry

__all__ = ["__version__", "install", "status", "uninstall"]


def install() -> Registry | None:
    """Register the patches of this process, if the environment says so, and return them; None if the gate is closed.

    Idempotent and thread-safe, before or after ``import vllm``. Never raises: a failure is raised later, where vLLM
    constructs a NIXL connector.
    """
    from kvcached_nixl.activation import bootstrap

    return bootstrap.install()


def uninstall() -> tuple[str, ...]:
    """Remove all patches of this process, for tests and comparisons with the stock connector. Returns dotted names that
    other code has wrapped since: these stay in place, with our wrapper disabled."""
    from kvcached_nixl.activation import bootstrap

    return bootstrap.uninstall()


def status() -> Report:
    """The state of this package in this process. Imports no library that is not imported yet."""
    from kvcached_nixl.activation import bootstrap
    from kvcached_nixl.cli import report

    return report.make(bootstrap.current())
