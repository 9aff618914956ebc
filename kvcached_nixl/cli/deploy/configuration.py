# SPDX-License-Identifier: Apache-2.0
"""Checks of the gate, the versions and ``--kv-transfer-config``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from kvcached_nixl.cli import report
from kvcached_nixl.cli.deploy.connectors import within
from kvcached_nixl.cli.deploy.serve_command import TRANSFER_FLAG
from kvcached_nixl.cli.deploy.situation import Situation
from kvcached_nixl.cli.finding import Finding, of_refusal
from kvcached_nixl.compat.actions.push_class import as_push_mode
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.extra_config import misspelled
from kvcached_nixl.settings import (
    SERVER_LOGGER,
    ActivationGate,
    Server,
    Settings,
    read_gate,
    rust_frontend_in,
)

__all__ = ["gate", "load_failure_policy", "role", "settings", "shutdown", "transfer_config", "versions"]

_PRODUCER, _CONSUMER, _BOTH = "kv_producer", "kv_consumer", "kv_both"
_CONNECTOR = "NixlConnector"


def gate(at: Situation) -> Iterator[Finding]:
    try:
        found = read_gate(at.environ)
    except SettingsError as error:
        yield of_refusal("gate", error)
        return
    if found is ActivationGate.KVCACHED_OFF:
        shown = at.environ.get("ENABLE_KVCACHED")
        yield Finding(
            "gate",
            "ENABLE_KVCACHED is not set" if shown is None else f"ENABLE_KVCACHED={shown!r}",
            "true or 1, in the environment of every process of a server",
            "The server runs vLLM alone. Its peers that run this package refuse its KV.",
            "Set ENABLE_KVCACHED=true where the server is started.",
        )
    if found is ActivationGate.PACKAGE_OFF:
        shares = ", and engines of one host that share KVCACHED_IPC_NAME map pages in each other's workers"
        yield Finding(
            "gate",
            f"KVCACHED_NIXL={at.environ['KVCACHED_NIXL']} with kvcached on",
            "this package on wherever kvcached and a NIXL connector are used together",
            f"NIXL moves pages that kvcached has replaced{shares if 'KVCACHED_IPC_NAME' in at.environ else ''}.",
            "Unset KVCACHED_NIXL, or unset ENABLE_KVCACHED too.",
        )


def versions(at: Situation) -> Iterator[Finding]:
    """What a start would refuse of the installed versions, and of the model runner that the environment selects."""
    for name, refusal in report.make(None).refusals:
        yield of_refusal(name, refusal)


def transfer_config(at: Situation) -> Iterator[Finding]:
    """Whether there is one, and whether it names the NIXL connector."""
    if at.transfer is None:
        in_file = at.value("--config")
        if at.command is None or in_file is not None:
            yield Finding(
                "connector",
                f"{TRANSFER_FLAG} was not given" if in_file is None else f"--config {in_file}, which is not read here",
                f"the server's command line behind --, or {TRANSFER_FLAG} JSON",
                "Role, settings and policy are not examined.",
                f"Run doctor --deploy {TRANSFER_FLAG} JSON, or doctor --deploy -- vllm serve ...",
                is_wrong=False,
            )
            return
        yield Finding(
            "connector",
            f"a command line without {TRANSFER_FLAG}",
            f'{TRANSFER_FLAG} \'{{"kv_connector": "{_CONNECTOR}", "kv_role": ...}}\'',
            "The server hands nothing over.",
            f"Add {TRANSFER_FLAG} to the command line.",
        )
        return
    named = [*within(at.transfer)]
    if not any(one.is_nixl for one in named):
        yield Finding(
            "connector",
            f"kv_connector {', '.join(one.name for one in named) or 'missing'}",
            f"{_CONNECTOR}, alone or as a child of MultiConnector",
            "Nothing is handed over by NIXL.",
            f'Set "kv_connector": "{_CONNECTOR}".',
            # A class of the operator's own may extend NIXL's.
            is_wrong=not any(one.is_own for one in named),
        )


def role(at: Situation) -> Iterator[Finding]:
    if at.transfer is None:
        return
    given = at.transfer.get("kv_role")
    if given not in (_PRODUCER, _CONSUMER, _BOTH):
        yield Finding(
            "role",
            "no kv_role" if given is None else f"kv_role {given!r}",
            f"{_PRODUCER} on prefill, {_CONSUMER} on decode",
            "vLLM does not start.",
            f'Set "kv_role" in {TRANSFER_FLAG}.',
        )
    elif given == _BOTH:
        yield Finding(
            "role",
            f"kv_role {_BOTH}",
            f"{_PRODUCER} on prefill, {_CONSUMER} on decode, as vLLM asks for from 0.28 on",
            "A request that is sent to the wrong side is served instead of refused.",
            'Set "kv_role" by what the router sends this server.',
            is_wrong=False,
        )


def settings(at: Situation) -> Iterator[Finding]:
    """What a start would refuse of ``kv_connector_extra_config``, and of settings beside it."""
    if at.transfer is None:
        return
    extra = at.transfer.get("kv_connector_extra_config") or {}
    for one in within({"kv_connector": None, **at.transfer}):
        if not isinstance(one.extra, Mapping):
            yield Finding(
                "settings",
                f"kv_connector_extra_config {one.extra!r}",
                "a JSON object",
                "vLLM does not start.",
                f"Correct {TRANSFER_FLAG}.",
            )
            return
    config = SimpleNamespace(
        kv_connector=at.transfer.get("kv_connector"),
        kv_connector_module_path=at.transfer.get("kv_connector_module_path"),
        kv_connector_extra_config=extra,
    )
    logger = logging.getLogger(f"{SERVER_LOGGER}.doctor")
    logger.disabled = True
    try:
        as_push_mode(config, logger)
        for one in within(vars(config)):
            if one.is_nixl:
                yield from (of_refusal("settings", error) for error in misspelled(one.extra))
                Settings.from_extra_config(one.extra)
        _server(at).require_servable()
    except SettingsError as error:
        yield of_refusal("settings", error)


def _server(at: Situation) -> Server:
    return Server(
        connector=_CONNECTOR,
        is_stock_push=False,
        ids_may_repeat=at.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0"),
        rust_frontend=rust_frontend_in(at.environ),
        wished_device="",
        device="",
    )


def load_failure_policy(at: Situation) -> Iterator[Finding]:
    if at.transfer is not None and "kv_load_failure_policy" not in at.transfer:
        yield Finding(
            "policy",
            "no kv_load_failure_policy",
            '"fail" or "recompute"',
            "vLLM's default decides whether a client gets an error when its hand-over fails.",
            f'Set "kv_load_failure_policy" in {TRANSFER_FLAG}; on decode it counts.',
            is_wrong=False,
        )


def shutdown(at: Situation) -> Iterator[Finding]:
    """Whether SIGTERM leaves time for what the server has begun, and for what prefill keeps."""
    if at.command is None:
        return
    given = at.number("--shutdown-timeout", 0)
    lease = at.extra.get("kv_lease_duration", Settings().kv_lease_duration_seconds)
    if given == 0:
        yield Finding(
            "shutdown",
            "no --shutdown-timeout",
            "seconds that its longest requests take",
            "SIGTERM ends what runs with an error, and revokes what prefill keeps for decode.",
            "Add --shutdown-timeout, and give the process a longer grace period than that.",
            is_wrong=False,
        )
    elif at.role != _CONSUMER and isinstance(lease, (int, float)) and given < lease:
        yield Finding(
            "shutdown",
            f"--shutdown-timeout {given} and kv_lease_duration {lease:g}",
            "a timeout that is not shorter than a lease",
            "Prefill may end before decode has fetched what it keeps.",
            f"Set --shutdown-timeout to {lease:g} or more.",
            is_wrong=False,
        )
