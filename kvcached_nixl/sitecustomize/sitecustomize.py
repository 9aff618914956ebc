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


def _activate(here):
    # Appended, so that an installed kvcached_nixl takes precedence.
    root = os.path.dirname(os.path.dirname(here))
    if root not in sys.path:
        sys.path.append(root)
    try:
        import kvcached_nixl.activation.autostart

        kvcached_nixl.activation.autostart.watch()
    except Exception:
        if os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true"):
            # kvcached patches vLLM all the same, and the stock connector would hand out wrong tokens.
            sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.nixl"] = None
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
