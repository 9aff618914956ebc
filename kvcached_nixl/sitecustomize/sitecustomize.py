# SPDX-License-Identifier: Apache-2.0
"""Activates kvcached_nixl without installing it: put this folder on PYTHONPATH.

Python imports the first module named ``sitecustomize`` it finds, and there may be another one further on (coverage
tools, tracers, distributions). It is run after this one and takes its place in ``sys.modules``.
"""

import importlib.machinery
import importlib.util
import os
import sys

_RAN = "_kvcached_nixl_sitecustomize"
"""Key in sys.modules: another chaining sitecustomize may find this one a second time, and must not start a circle."""


def _activate(here):
    # At the end of the path: an installed kvcached_nixl comes first.
    root = os.path.dirname(os.path.dirname(here))
    if root not in sys.path:
        sys.path.append(root)
    if os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true"):
        import kvcached_nixl.activation.autostart

        kvcached_nixl.activation.autostart.watch()


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
