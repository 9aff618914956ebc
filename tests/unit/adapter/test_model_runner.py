# SPDX-License-Identifier: Apache-2.0
"""`versions` and `platform`: which model runners kvcached accepts, and vLLM's own answer, without vLLM."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvcached_nixl.cli import report
from kvcached_nixl.errors import Refused, SettingsError, UnsupportedVersion
from kvcached_nixl.vllm.adapter import versions
from kvcached_nixl.vllm.adapter.platform import ask
from kvcached_nixl.vllm.adapter.series import SUPPORTED
from kvcached_nixl.vllm.adapter.versions import (
    SWITCH,
    accepted,
    environment_refusals,
    outlook,
)

FIRST_BEYOND = SUPPORTED.rpartition("<")[2]


@pytest.mark.parametrize(
    ("vllm", "runners"),
    [
        ("0.26.0+cpu", ("V1",)),
        ("0.27.1", ("V1",)),
        ("0.28.0rc1", ("V1",)),
        ("0.28.0", ("V1", "V2")),
        ("0.29.0", ("V2",)),
        ("0.30.9", ("V2",)),
        ("0.31.0", ("V2",)),
        ("0.34.0", ()),
        ("dev", ()),
        (None, ()),
    ],
)
def test_what_kvcached_accepts(vllm: str | None, runners: tuple[str, ...]) -> None:
    assert accepted(vllm) == runners


# ------------------------------------------------------------------------------------------------------ without a model


@pytest.mark.parametrize(
    ("vllm", "environ", "runner", "words"),
    [
        ("0.27.1", {}, "", ["nearly every model", "V1 only", f"{SWITCH}=0"]),
        ("0.28.0", {}, "", ["nearly every model", "--model", "accepts both"]),
        ("0.28.0", {SWITCH: "1"}, "V2", [f"{SWITCH}=1", "accepts it"]),
        ("0.29.0", {}, "", ["V2 only", f"{SWITCH}=1"]),
        ("0.30.0", {SWITCH: "1"}, "V2", [f"{SWITCH}=1", "accepts it"]),
        ("0.34.0", {}, "", [f"below vLLM {FIRST_BEYOND}", "accepts none"]),
    ],
)
def test_what_is_said_without_a_model(vllm: str, environ: dict[str, str], runner: str, words: list[str]) -> None:
    """One line; nothing is refused for it."""
    (one,) = outlook(vllm, environ)
    assert (one.runner, one.refusal) == (runner, None)
    assert [word for word in words if word not in f"{one.why}; {one.verdict}"] == []
    # Where kvcached takes both, most tests run V1.
    assert (f"{SWITCH}=0" in one.verdict) == (
        "V1" in one.accepted and (runner == "V2" or one.accepted == ("V1",) and not runner)
    )


@pytest.mark.parametrize(
    ("vllm", "switch", "remedy"),
    [("0.27.1", "1", f"Set {SWITCH}=0"), ("0.30.0", "0", f"Set {SWITCH}=1")],
)
def test_a_switch_that_kvcached_refuses_is_a_refusal(vllm: str, switch: str, remedy: str) -> None:
    """With what to set."""
    (one,) = outlook(vllm, {SWITCH: switch})
    assert isinstance(one.refusal, UnsupportedVersion)
    assert remedy in one.refusal.remedy and remedy in one.verdict and f"{SWITCH}={switch}" in one.refusal.found


@pytest.mark.parametrize("vllm", [None, "dev", "unknown"])
def test_of_no_version_nothing_is_said(vllm: str | None) -> None:
    assert outlook(vllm, {}) == ()


# ------------------------------------------------------------------------------------------------- newer than kvcached


@pytest.mark.parametrize(
    ("vllm", "words", "others"),
    [
        ("0.34.0", ["kvcached 0.1.6 has no adapter", "stops below 0.31", "kvcached itself", "wait for"], ["runner V2"]),
        ("0.40.1", ["kvcached itself", "tests/shapes/make.py check 0.40.1"], ["runner V2"]),
    ],
)
def test_a_start_says_who_stops_and_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, vllm: str, words: list[str], others: list[str]
) -> None:
    """kvcached itself stops, and its error is this package's refusal with the same message."""
    found: dict[str, str] = {"vllm": vllm, "kvcached": "0.1.6", "nixl": "1.0"}
    monkeypatch.setattr(versions, "found_version", found.__getitem__)
    ((name, cause),) = environment_refusals()
    assert (name, type(cause)) == ("vLLM version", UnsupportedVersion)
    said = str(cause)
    assert [
        word for word in (*words, f"vLLM {vllm}", f"below {FIRST_BEYOND}", "unset ENABLE_KVCACHED") if word not in said
    ] == []
    assert [word for word in others if word in said] == []


# --------------------------------------------------------------------------------------------------- asking it

CONFIG = """
import logging, types
HAS_TRITON = False
class Old:
    model_config = types.SimpleNamespace(architectures=["ModelForCausalLM"])
class New(Old):
    @property
    def use_v2_model_runner(self):
        from vllm import envs
        if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
            return envs.VLLM_USE_V2_MODEL_RUNNER
        if not HAS_TRITON:
            logging.getLogger("vllm.config.vllm").warning("No Triton; using the %s model runner instead.", "V1")
        return HAS_TRITON
"""
ARGUMENTS = """
class EngineArgs:
    def __init__(self, model): self.model = model
    def create_engine_config(self):
        from vllm.config import vllm
        if self.model == "nothing":
            raise OSError("no config.json,\\n  nowhere")
        if self.model == "strange":
            raise Exception("of a class that nobody has heard of")
        return (vllm.Old if self.model == "old" else vllm.New)()
"""

Vllm = Callable[..., None]


@pytest.fixture
def vllm(make_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """vllm(device, switch): a vLLM that decides by whether there is Triton, on one kind of device."""

    def make(device: str = "cpu", switch: bool | None = None, source: str = CONFIG) -> None:
        monkeypatch.delenv(SWITCH, raising=False)
        if switch is not None:
            monkeypatch.setenv(SWITCH, str(int(switch)))
        for name in ("vllm", "vllm.engine", "vllm.config"):
            make_module(name)
        make_module("vllm.envs", f"{SWITCH} = {switch}")
        make_module("vllm.platforms", f"import types\ncurrent_platform = types.SimpleNamespace(device_type={device!r})")
        make_module("vllm.config.vllm", source)
        make_module("vllm.engine.arg_utils", ARGUMENTS)

    return make


def test_on_a_cpu_it_is_asked_for_a_gpu_as_well(vllm: Vllm) -> None:
    """Each answer names its device; vLLM's own message is the reason."""
    vllm()
    here, there = ask("a model", "0.28.0")
    assert (here.device, here.is_here, here.runner, here.refusal) == ("cpu", True, "V1", None)
    assert here.why == "vLLM's choice for ModelForCausalLM: No Triton; using the V1 model runner instead"
    assert (there.device, there.is_here, there.runner, there.refusal) == ("cuda", False, "V2", None)
    assert there.why == "vLLM's choice for ModelForCausalLM"


def test_vllm_is_left_as_it_was(vllm: Vllm) -> None:
    """Neither does it think that there is Triton, nor does anybody listen to its log."""
    vllm()
    listeners = list(logging.getLogger("vllm.config.vllm").handlers)
    assert ask("a model", "0.28.0") == ask("a model", "0.28.0")
    assert logging.getLogger("vllm.config.vllm").handlers == listeners


def test_on_a_gpu_it_is_asked_once(vllm: Vllm) -> None:
    """And refused where a start would be."""
    vllm("cuda", source=CONFIG.replace("HAS_TRITON = False", "HAS_TRITON = True"))
    (one,) = ask("a model", "0.27.1")
    assert (one.device, one.is_here, one.runner) == ("cuda", True, "V2")
    assert one.refusal is not None and one.refusal.remedy == f"Set {SWITCH}=0."
    (one,) = ask("a model", "0.28.0")
    assert one.refusal is None


def test_the_switch_decides_for_every_device(vllm: Vllm) -> None:
    vllm(switch=True)
    (one,) = ask("a model", "0.27.1")
    assert (one.device, one.runner, one.why) == ("", "V2", f"{SWITCH}=1")
    assert one.refusal is not None


# ---------------------------------------------------------------------------------------------------------- the report


def of(version: str) -> report.Report:
    return report.Report("on", {"vllm": version}, (), ())


def test_the_report_has_a_line_for_each_device_and_refuses_what_stops_here(vllm: Vllm) -> None:
    """What a GPU elsewhere would get stops nothing here."""
    vllm()
    found = report.asked(of("0.27.1"), "a model")
    assert not found.refused
    shown = report.render(found)
    assert "\n  cpu, here: V1: vLLM's choice" in shown
    assert (
        f"\n  cuda, not here: V2: vLLM's choice for ModelForCausalLM; kvcached 0.1.6 refuses it: Set {SWITCH}=0."
        in shown
    )
    vllm("cuda", source=CONFIG.replace("HAS_TRITON = False", "HAS_TRITON = True"))
    found = report.asked(of("0.27.1"), "a model")
    assert [name for name, _ in found.refusals] == ["runner"]
    (said,) = report.to_json(found)["runner"]
    assert said == {
        "device": "cuda",
        "is_here": True,
        "runner": "V2",
        "why": "vLLM's choice for ModelForCausalLM",
        "kvcached_accepts": ["V1"],
        "remedy": f"Set {SWITCH}=0.",
    }


def test_the_report_keeps_its_outlook_where_a_model_cannot_be_read(vllm: Vllm) -> None:
    """And its other refusals."""
    vllm()
    other = ("other", Refused(found="f", expected="e", consequence="c", remedy="r"))
    before = dataclasses.replace(of("0.28.0"), runners=outlook("0.28.0", {}), refusals=(other,))
    found = report.asked(before, "nothing")
    assert [name for name, _ in found.refusals] == ["other", "model"]
    assert found.runners == before.runners


def test_a_switch_that_cannot_be_read_is_refused_once(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the report, and again with a model."""
    vllm()
    monkeypatch.setenv(SWITCH, "yes")
    found = report.asked(report.asked(of("0.28.0"), "a model"), "a model")
    assert [(name, type(cause)) for name, cause in found.refusals] == [("runner", SettingsError)]
