# SPDX-License-Identifier: Apache-2.0
"""The status report: what is installed, and the state of each patch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import PatchOutcome, PatchState, Registry
from kvcached_nixl.settings import ActivationGate, read_gate
from kvcached_nixl.side_channel_address import look_up, own_addresses
from kvcached_nixl.version import __version__
from kvcached_nixl.vllm.adapter.attributes import side_channel_address
from kvcached_nixl.vllm.adapter.versions import environment_refusals, found_version

_COLOURS = MappingProxyType(
    {PatchState.APPLIED: "32", PatchState.SKIPPED: "33", PatchState.REFUSED: "31", PatchState.PENDING: "2"}
)

COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "weights": (
            "what is in memory, every byte of each tensor that a model holds, where both lie alike; else what was "
            "loaded, before kernels rewrote it; else the files, where those differ in place (tensor-parallel size, "
            "quantizing kernels): names, types, shapes and bytes of their tensors (beyond 256 MiB, 8,192 pieces of "
            "them); not file names, folders or the loader"
        ),
        "weights that have changed since they were loaded": (
            "what is in memory alone. If part of it is out of sight of PyTorch, KV is refused"
        ),
        "configuration": (
            "the model's, setting by setting, with overrides (rope, windows), its dtype, quantization (also by a "
            "file that `quantization_config_file` names, or by vLLM's environment variables), implementation, "
            "code that computes and is not vLLM's, vLLM's files with the classes of the model and its language model, "
            "rotary angles that follow from `--max-model-len`, and how media are processed (options, the "
            "model's own files and code for it, and versions of what decodes and prepares them on "
            "the worker's host: transformers, torchvision, Pillow, OpenCV, ...; not on API servers elsewhere)"
        ),
        "draft models": "as the model, where their KV is in the cache; drafts without a model (ngram) are not compared",
        "LoRA": (
            "the content of an adapter's files when the engine first saw them, and which modules it is applied to, not "
            "its name. If they are replaced without load_inplace, or it cannot be loaded, its KV is refused"
        ),
        "prompts": "token ids, cache salt, the content of media and their positions, embeddings",
    }
)
"""What is compared between two engines before one uses KV of the other."""


@dataclass(frozen=True)
class Report:
    """The state of this package in one process.

    Attributes:
        gate: "on", or the variable that turned the package off.
        versions: library -> version; None if it cannot be imported.
        outcomes: one per patch, in order; empty if nothing was installed or vLLM is not imported yet.
        refusals: everything that stops a start, by name.
        side_channel: lines on where the side channel of a server in this environment would be; empty if not asked.
    """

    gate: str
    versions: Mapping[str, str | None]
    outcomes: tuple[PatchOutcome, ...]
    refusals: tuple[tuple[str, Refused], ...]
    side_channel: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        return bool(self.refusals)


def gate() -> str:
    try:
        return read_gate(os.environ).value
    except Refused as error:
        return f"unclear: {error.found}"


def make(registry: Registry | None) -> Report:
    """Make the report; ``registry`` is None if nothing is installed. Imports none of the libraries it reports on."""
    versions = {library: found_version(library) for library in ("vllm", "kvcached", "nixl", "torch")}
    refusals = dict(registry.refusals() if registry is not None else ())
    return Report(
        gate=gate(),
        versions=versions,
        outcomes=registry.outcomes() if registry is not None else (),
        refusals=tuple({**dict(environment_refusals()), **refusals}.items()),
    )


def with_side_channel(report: Report) -> Report:
    """The report with the side channel's addresses, as this process's environment configures them, or with a refusal if
    they cannot be used. Imports vLLM."""
    try:
        address = side_channel_address()
        leads_to = look_up(address.advertised.host)
    except Refused as error:
        return replace(report, refusals=(*report.refusals, ("side channel", error)))
    except (OSError, UnicodeError) as error:
        return replace(report, side_channel=(str(address), f"this host finds no address of the latter: {error}"))
    doubts = (doubt.line for doubt in address.doubts(leads_to, own_addresses()))
    return replace(report, side_channel=(str(address), *doubts))


def with_activation(report: Report) -> Report:
    """The report, with a refusal if a server in this environment, with kvcached on, would run without this package.
    Starts an interpreter."""
    if report.gate == ActivationGate.PACKAGE_OFF.value:
        found, expected = "KVCACHED_NIXL is 0", "1, true or unset"
        remedy = "Unset KVCACHED_NIXL, or ENABLE_KVCACHED."
    elif said := _not_watched():
        found, expected = said, "one that waits for the import of vLLM"
        remedy = "Install kvcached-nixl here, or put its folder sitecustomize, as an absolute path, on PYTHONPATH."
    else:
        return report
    consequence = (
        "A server with ENABLE_KVCACHED=true would run the stock connector over kvcached's pages: wrong tokens."
    )
    refusal = Refused(found=found, expected=expected, consequence=consequence, remedy=remedy)
    return replace(report, refusals=(*report.refusals, ("activation", refusal)))


def _not_watched() -> str:
    """How an interpreter that starts in this environment is found to lack this package; "" if it does not. Its folder
    is not this one, where a clone may be."""
    code = "import sys; sys.exit('kvcached_nixl.activation' not in [type(one).__module__ for one in sys.meta_path])"
    environ = {**os.environ, "ENABLE_KVCACHED": "true"}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environ, capture_output=True, text=True)
    said = (done.stderr.splitlines() or [""])[-1]
    found = f"an interpreter that starts without this package{said and f' and says: {said}'}"
    return found if done.returncode else ""


def render(report: Report, *, colour: bool = False) -> str:
    """The report as text of several lines, without a newline at the end."""
    lines = [f"kvcached_nixl {__version__} ({report.gate})"]
    lines += ["", "versions"]
    lines += [f"  {library:<12} {version or 'not installed'}" for library, version in report.versions.items()]
    lines += ["", "patches"]
    width = max((len(outcome.name) for outcome in report.outcomes), default=0)
    for outcome in report.outcomes:
        state = f"{outcome.state.value:<8}"
        if colour:
            state = f"\x1b[{_COLOURS[outcome.state]}m{state}\x1b[0m"
        lines.append(f"  {state} {outcome.name:<{width}}  {outcome.reason}")
        lines += [f"  {'':<8} {'':<{width}}  - {note}" for note in outcome.notes]
    if not report.outcomes:
        lines.append("  none")
    lines += ["", "compared with every peer"]
    lines += [f"  {what}: {how}" for what, how in COMPARED.items()]
    if report.side_channel:
        lines += ["", "side channel", *(f"  {line}" for line in report.side_channel)]
    for name, cause in report.refusals:
        lines += ["", f"refused: {name}{cause}"]
    return "\n".join(lines)


def to_json(report: Report) -> dict[str, Any]:
    return {
        "kvcached_nixl": __version__,
        "gate": report.gate,
        "versions": dict(report.versions),
        "patches": [
            {
                "name": o.name,
                "process": o.patch.process,
                "state": o.state.value,
                "reason": o.reason,
                "notes": [*o.notes],
            }
            for o in report.outcomes
        ],
        "compared": dict(COMPARED),
        "side_channel": list(report.side_channel),
        "refusals": [
            {"name": n, "found": c.found, "expected": c.expected, "consequence": c.consequence, "remedy": c.remedy}
            for n, c in report.refusals
        ],
    }
