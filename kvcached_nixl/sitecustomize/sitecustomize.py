# SPDX-License-Identifier: Apache-2.0
"""Activates kvcached_nixl without installing it: put this folder on PYTHONPATH.

Python imports only the first module named ``sitecustomize`` on the path. If there is another one further on (coverage
tools, tracers, distributions), this module runs it afterwards, and leaves it in ``sys.modules`` in its own place.
"""

import importlib.machinery
import importlib.util
import os
import sys

_RAN = "_kvcached_nixl_sitecustomize"
"""Key in sys.modules. Prevents endless recursion if another sitecustomize runs the next one in the same way."""


class _Barrier:
    """kvcached patches vLLM also without this package, and the stock connector would hand out wrong tokens."""

    def __init__(self, error):
        self._error = error

    def is_on(self):
        return os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true")

    def find_spec(self, name, path, target=None):
        if name == "vllm" and not self.is_on():
            # As in kvcached_nixl.activation.autostart.
            os.environ.pop("KVCACHED_AUTOPATCH", None)
        if name == "vllm.distributed.kv_transfer.kv_connector.v1.nixl" and self.is_on():
            raise ImportError(f"NixlConnector is not patched: {self._error}") from self._error


def _activate(here):
    # Appended, so that an installed kvcached_nixl takes precedence.
    root = os.path.dirname(os.path.dirname(here))
    if root not in sys.path:
        sys.path.append(root)
    try:
        import kvcached_nixl.activation.autostart

        kvcached_nixl.activation.autostart.watch()
    except Exception as error:
        barrier = _Barrier(error)
        sys.meta_path.insert(0, barrier)
        if barrier.is_on():
            raise


def _run_next(here):
    elsewhere = [path for path in sys.path if os.path.realpath(path or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if _RAN not in sys.modules:
    sys.modules[_RAN] = sys.modules[__name__]
    _here = os.path.dirname(os.path.realpath(__file__))
    try:
        _activate(_here)
    finally:
        _run_next(_here)
