# SPDX-License-Identifier: Apache-2.0
"""Open kvcached's version windows for the vLLM series beyond its own that this package was tested with.

They stay open only if everything that kvcached touches is as it was read, and each of its patches reports success.
Otherwise kvcached refuses the engine, as without this package.
Sources: kvcached 0.1.6, ``integration/version_utils.py``, ``integration/patch_base.py``,
``integration/vllm/{patches,autopatch,model_runner_v2}.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvcached_nixl.errors import UnsupportedVersion
from kvcached_nixl.vllm.adapter.kvcached_contacts import PATCH_NAMES, differences
from kvcached_nixl.vllm.adapter.model_runner_policy import KVCACHED
from kvcached_nixl.vllm.adapter.versions import found_version

__all__ = ["WINDOWS", "Windows"]

_SPECIFIERS = frozenset({">=0.26.0,<0.31.0", ">=0.28.0,<0.31.0", ">=0.29.0,<0.31.0"})
"""kvcached's windows that end below 0.31. Its other ranges have no end, or end earlier."""


class Windows:
    """Whether they are open in this process."""

    def __init__(self) -> None:
        self.is_open = False
        self.refusal: UnsupportedVersion | None = None

    def contains(self, window: Any, version: str) -> bool:
        """Whether one of kvcached's windows that does not contain ``version`` does so while they are open.

        Args:
            window: kvcached's ``VersionRange``.
        """
        if not self.is_open or window.range_spec not in _SPECIFIERS:
            return False
        beginning = type(window)(window.range_spec.partition(",")[0])
        return bool(beginning.contains(version))

    def while_patched(
        self, library: str, apply: Callable[[], dict[str, bool]], logger: logging.Logger
    ) -> dict[str, bool]:
        """Have kvcached patch vLLM with its windows open, and shut them if anything is not as it must be.

        Args:
            library: what is patched; kvcached also patches SGLang.
            apply: applies all of kvcached's patches; returns its name for each -> whether it was applied.
        """
        if library != "vllm":
            return apply()
        kvcached = found_version("kvcached")
        found = differences() if kvcached == KVCACHED else [f"kvcached {kvcached}; expected {KVCACHED}"]
        results: dict[str, bool] = {}
        self.is_open = not found
        try:
            results = apply()
        finally:
            # Without results, too: what has raised has proved nothing.
            found = found or [
                f"kvcached's patch {name!r} was not applied" for name in PATCH_NAMES if not results.get(name)
            ]
            self.is_open = not found
        if found:
            self.refusal = UnsupportedVersion(
                found=f"vLLM {found_version('vllm')}, in which {'; '.join(found):.1000}",
                expected=f"everything that kvcached {KVCACHED} touches as in the release that was tested",
                consequence="kvcached has no adapter for this vLLM, and ends the engine at its start.",
                remedy="Install a release that `python -m kvcached_nixl` names as tested, or unset ENABLE_KVCACHED.",
            )
            logger.error("kvcached's version windows stay shut:%s", self.refusal)
        return results


WINDOWS = Windows()
"""Of this process: kvcached's patches are applied once."""
