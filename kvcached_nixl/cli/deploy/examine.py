# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl doctor --deploy``: run every check, and report what it found.

It imports neither vLLM nor torch, needs no GPU and starts nothing.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvcached_nixl.cli.deploy import configuration, connectors, network, process, stacks
from kvcached_nixl.cli.deploy.serve_command import ServeCommand, transfer_config
from kvcached_nixl.cli.deploy.situation import Host, Situation
from kvcached_nixl.cli.finding import Finding, of_refusal
from kvcached_nixl.compat.versions import found_version
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.version import __version__

__all__ = ["CHECKS", "Examined", "examine", "render", "to_json"]

Check = Callable[[Situation], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    configuration.gate,
    configuration.versions,
    configuration.transfer_config,
    connectors.neighbours,
    connectors.offloading,
    configuration.role,
    configuration.settings,
    configuration.load_failure_policy,
    configuration.shutdown,
    network.side_channel,
    network.http_port,
    network.service_links,
    process.sockets,
    process.cache_folder,
    process.limits,
    process.open_files,
    process.multiprocessing,
    process.transports,
    stacks.ray,
    stacks.dynamo,
)
_LIBRARIES = ("vllm", "kvcached", "nixl")


@dataclasses.dataclass(frozen=True)
class Examined:
    """What was examined, and what was found."""

    facts: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def is_wrong(self) -> bool:
        return any(one.is_wrong for one in self.findings)


def examine(
    environ: Mapping[str, str], transfer: str | None = None, command: Sequence[str] = (), host: Host | None = None
) -> Examined:
    """Run every check.

    Args:
        transfer: value of ``--kv-transfer-config``; without it, that of ``command`` counts.
        command: the server's command line; empty if it is not known.
    """
    given = ServeCommand(tuple(command)) if command else None
    unreadable = []
    config = None
    try:
        config = transfer_config(transfer) if transfer is not None else given.transfer if given is not None else None
    except SettingsError as error:
        unreadable.append(of_refusal("connector", error))
    at = Situation(environ, given, config, found_version("vllm"), host or Host())
    found = [
        one for check in CHECKS if not (unreadable and check is configuration.transfer_config) for one in check(at)
    ]
    return Examined(_facts(at), tuple(unreadable + found))


def _facts(at: Situation) -> dict[str, str]:
    return {
        **{library: found_version(library) or "not installed" for library in _LIBRARIES},
        "command": "not given" if at.command is None else shlex.join(at.command.words),
        "role": at.role or "not known",
        "side channel": network.shown(at),
    }


def render(examined: Examined, *, colour: bool = False) -> str:
    """The findings as text of several lines, without a newline at the end."""
    lines = [f"kvcached_nixl {__version__} doctor --deploy", ""]
    lines += [f"  {name:<14} {value}" for name, value in examined.facts.items()]
    for title, is_wrong, paint in (("wrong", True, "31"), ("advice", False, "33")):
        for one in examined.findings:
            if one.is_wrong is is_wrong:
                head = f"{title}: {one.name}"
                lines += ["", f"\x1b[{paint}m{head}\x1b[0m" if colour else head]
                lines += [f"  {label + ':':<12} {getattr(one, label)}" for label in _SENTENCES]
    count = sum(one.is_wrong for one in examined.findings)
    return "\n".join(
        [*lines, "", f"{count} wrong" if count else "nothing that would stop this server or its hand-overs"]
    )


_SENTENCES = ("found", "expected", "consequence", "remedy")


def to_json(examined: Examined) -> dict[str, Any]:
    """The findings for programs."""
    return {
        "kvcached_nixl": __version__,
        "examined": dict(examined.facts),
        "findings": [dataclasses.asdict(one) for one in examined.findings],
    }
