# SPDX-License-Identifier: Apache-2.0
"""`vllm/patches/windows.py` with stand-ins for kvcached: its windows open by proof only."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass

import pytest

from kvcached_nixl.patching import parameter_lists
from kvcached_nixl.vllm.patches import windows
from kvcached_nixl.vllm.patches.windows import PATCH_NAMES, Contact, Windows, differences

OF_RUNNER = ">=0.29.0,<0.31.0"


@dataclass
class VersionRange:
    """kvcached's, for two numbers."""

    range_spec: str

    def contains(self, version: str) -> bool:
        least, _, end = self.range_spec.partition(",")
        number = float(version[:4])
        return number >= float(least[2:6]) and (not end or number < float(end[1:5]))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"kvcached": "0.1.6", "vllm": "0.31.0"}
    monkeypatch.setattr(windows, "found_version", found.get)
    monkeypatch.setattr(windows, "differences", list)
    return found


def applied(made: Windows, **results: bool) -> list[bool]:
    """Whether kvcached's window contained 0.31.0 while it patched vLLM."""
    seen: list[bool] = []

    def apply() -> dict[str, bool]:
        seen.append(made.contains(VersionRange(OF_RUNNER), "0.31.0"))
        return {
            name: results.get(name, True) for name in PATCH_NAMES if name not in results or results[name] is not None
        }

    made.while_patched("vllm", apply)
    return seen


def test_they_are_open_while_kvcached_patches_and_stay_so(installed: dict[str, str]) -> None:
    made = Windows()
    assert not made.contains(VersionRange(OF_RUNNER), "0.31.0"), "before, nothing is known"
    assert applied(made) == [True]
    assert made.is_open and made.refusal is None
    for specifier in (OF_RUNNER, ">=0.28.0,<0.31.0", ">=0.26.0,<0.31.0"):
        assert made.contains(VersionRange(specifier), "0.31.0")
    # An earlier version than the window's first is still outside, and so are all other ranges.
    assert not made.contains(VersionRange(OF_RUNNER), "0.28.0")
    for specifier in (">=0.9.0,<0.29.0", ">=0.28.0,<0.29.0", "<0.28.0", ">=0.29.0,<0.32.0"):
        assert not made.contains(VersionRange(specifier), "0.31.0")


@pytest.mark.parametrize("name", PATCH_NAMES)
@pytest.mark.parametrize("result", [False, None], ids=["failed", "missing"])
def test_a_patch_that_was_not_applied_shuts_them(installed: dict[str, str], name: str, result: bool | None) -> None:
    """kvcached itself only warns."""
    made = Windows()
    assert applied(made, **{name: result}) == [True]  # type: ignore[arg-type]
    assert not made.is_open and not made.contains(VersionRange(OF_RUNNER), "0.31.0")
    assert made.refusal is not None and f"kvcached's patch {name!r} was not applied" in made.refusal.found


def test_what_differs_keeps_them_shut(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said before kvcached refuses the engine, in four lines."""
    monkeypatch.setattr(windows, "differences", lambda: ["vllm.v1.engine.core.EngineCore.shutdown: parameters ()"])
    made = Windows()
    assert applied(made) == [False] and not made.is_open
    (line,) = [record.getMessage() for record in caplog.records]
    assert "vLLM 0.31.0, in which vllm.v1.engine.core.EngineCore.shutdown: parameters ()" in line
    assert line.startswith("kvcached's version windows stay shut:") and len(line.splitlines()) == 1 + 4
    assert "ends the engine at its start" in line


def test_another_kvcached_keeps_them_shut(installed: dict[str, str]) -> None:
    installed["kvcached"] = "0.1.7"
    made = Windows()
    assert applied(made) == [False] and not made.is_open
    assert made.refusal is not None and "kvcached 0.1.7; expected 0.1.6" in made.refusal.found


def test_patches_that_raise_shut_them(installed: dict[str, str]) -> None:
    made = Windows()

    def apply() -> dict[str, bool]:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        made.while_patched("vllm", apply)
    assert not made.is_open and not made.contains(VersionRange(OF_RUNNER), "0.31.0")


def test_another_library_is_patched_as_without_this_package() -> None:
    made = Windows()
    assert made.while_patched("sglang", lambda: {"a": False}) == {"a": False}
    assert not made.is_open and made.refusal is None


# ------------------------------------------------------------------------------------------------------------- contacts


def given(self: object, one: int, *, two: int = 2) -> None:
    """A contact."""


class Owner:
    method = given
    of_class = classmethod(given)
    described = property(given)


@pytest.mark.parametrize(
    ("qualname", "parameters", "found"),
    [
        ("Owner.method", "self one two", ""),
        ("Owner.of_class", "self one two", ""),
        ("function", "self one two", ""),
        ("function", "self one two?", ""),
        ("function", "self one", r"parameters \(self, one, two\); expected \(self, one\)"),
        ("function", "self two one", "parameters"),
        ("Owner.gone", "self", "AttributeError"),
        ("gone", "self", "AttributeError"),
        ("number", "self", "TypeError"),
        ("Owner.described", "self", "TypeError"),
    ],
)
def test_a_contact_that_differs_is_found(
    qualname: str,
    parameters: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("contacted")
    vars(module).update(Owner=Owner, function=given, number=1)
    monkeypatch.setitem(__import__("sys").modules, "contacted", module)
    monkeypatch.setattr(windows, "CONTACTS", (Contact("contacted", qualname, parameter_lists(parameters)),))
    said = differences()
    assert bool(said) is bool(found)
    assert not found or re.match(rf"contacted\.{qualname}: .*{found}", said[0])


def test_a_module_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CONTACTS", (Contact("no_such_module_here", "a", ()),))
    assert differences() == ["no_such_module_here.a: ModuleNotFoundError: No module named 'no_such_module_here'"]
