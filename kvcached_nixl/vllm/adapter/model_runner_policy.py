# SPDX-License-Identifier: Apache-2.0
"""Which model runner vLLM uses, and whether kvcached accepts it.

Sources: kvcached 0.1.6, ``integration/vllm/patches.py`` (``EngineCorePatch``) and ``autopatch.py``; vLLM's ``envs.py``.
Nothing here imports either. ``tests/contract/test_runner.py`` checks this module against both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from kvcached_nixl.errors import Refused, SettingsError, UnsupportedVersion
from kvcached_nixl.vllm.adapter.series import ROWS, SUPPORTED

__all__ = [
    "KVCACHED",
    "SWITCH",
    "RunnerFound",
    "accepted",
    "beyond",
    "judged",
    "named",
    "outlook",
    "stated",
]

KVCACHED = "0.1.6"
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"

_BEYOND = Version(SUPPORTED.rpartition("<")[2])
"""From this version on kvcached accepts none."""

_OUTLOOK = (
    (Version("0.29"), "V2 on a GPU for nearly every model without experts, else V1"),
    (_BEYOND, "V2 wherever there is Triton, for nearly every model"),
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
    if version is None or not version < _BEYOND:
        return ()
    runners = ROWS[0].shape.runners
    for row in ROWS:
        if version >= Version(row.series):
            runners = row.shape.runners
    return runners


def beyond(vllm: str | None, supported: str) -> UnsupportedVersion | None:
    """The refusal of a vLLM that is too new for kvcached; None for an older one.

    Args:
        supported: the supported versions, as text.
    """
    if _version(vllm) is None or accepted(vllm):
        return None
    return UnsupportedVersion(
        found=f"vLLM {vllm}, for which kvcached {KVCACHED} has no adapter: it stops below 0.31, and this package opens "
        f"its windows below {_BEYOND} only",
        expected=f"vLLM {supported}",
        consequence="kvcached itself ends the engine at its start, with this package or without it.",
        remedy=f"Install a vLLM below {_BEYOND}; or unset ENABLE_KVCACHED to run vLLM alone; or wait for releases of "
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
        return (judged(vllm, "", "", f"kvcached stops below vLLM {_BEYOND}"),)
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
