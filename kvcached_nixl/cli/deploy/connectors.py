# SPDX-License-Identifier: Apache-2.0
"""Checks of the connectors that ``--kv-transfer-config`` names, and of a flag that replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcached_nixl.cli.deploy.serve_command import TRANSFER_FLAG
from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding
from kvcached_nixl.compat.locate import FACADE_CLASS_NAMES
from kvcached_nixl.compat.neighbours import JUDGED, TRUSTED, reason_against
from kvcached_nixl.compat.nested_connectors import with_children

__all__ = ["Named", "neighbours", "offloading", "within"]

_MULTI = "MultiConnector"


class Named(NamedTuple):
    """A connector in the configuration: its name, and its ``kv_connector_extra_config``, whatever that is.

    ``is_own``: its class is from a module of the operator's choice.
    """

    name: str
    extra: Any
    is_own: bool

    @property
    def is_nixl(self) -> bool:
        return self.name in FACADE_CLASS_NAMES and not self.is_own


def within(config: Mapping[str, Any]) -> Iterator[Named]:
    """The connector of a configuration and those inside it, however deep."""
    for one in with_children(config):
        if "kv_connector" in one:
            extra = one.get("kv_connector_extra_config") or {}
            yield Named(str(one["kv_connector"]), extra, one.get("kv_connector_module_path") is not None)


def neighbours(at: Situation) -> Iterator[Finding]:
    """Whether the connectors beside NIXL's can use kvcached's memory: a start refuses some of them."""
    named = [*within(at.transfer or {})]
    if not any(one.is_nixl for one in named):
        return
    trusted = at.extra.get(TRUSTED)
    for one in named:
        is_known = not one.is_own and one.name in JUDGED
        if one.is_nixl or (is_known and one.name == _MULTI):
            continue
        if is_known or not isinstance(trusted, list) or one.name not in trusted:
            yield _beside(one, is_known)


def _beside(one: Named, is_known: bool) -> Finding:
    why = reason_against(one.name) if is_known else None
    if why is not None:
        consequence = f"{one.name} {why} The server does not start."
    elif is_known:
        consequence = "The server starts with it only from vLLM 0.26 on, and without multi-latent attention."
    else:
        consequence = f"Unless it extends NIXL's, the server starts with it only if {TRUSTED} names its class."
    return Finding(
        "connector",
        f"{one.name} beside the NIXL connector",
        f"none, or another package's that follows kvcached's pages, and that {TRUSTED} names",
        consequence,
        f"Remove {one.name} from {TRANSFER_FLAG}, or unset ENABLE_KVCACHED"
        f"{'' if why is not None else ', unless you have checked it'}.",
        is_wrong=why is not None,
    )


def offloading(at: Situation) -> Iterator[Finding]:
    """vLLM's ``VllmConfig._post_init_kv_transfer_config`` replaces the connector and the role without a word."""
    size = at.value("--kv-offloading-size")
    if size in (None, "", "None"):
        return
    backend = at.value("--kv-offloading-backend") or "native"
    put = "a connector of LMCache" if backend == "lmcache" else "its own offloading connector"
    yield Finding(
        "offloading",
        f"--kv-offloading-size {size}",
        f"no such flag, beside {TRANSFER_FLAG}",
        f"vLLM replaces kv_connector by {put}, and kv_role by kv_both: nothing is handed over by NIXL.",
        "Remove --kv-offloading-size.",
    )
