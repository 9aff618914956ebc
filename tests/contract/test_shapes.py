# SPDX-License-Identifier: Apache-2.0
"""The fixture of the installed vLLM (``tests/shapes``) agrees with the imported vLLM."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from packaging.version import Version

from kvcached_nixl.vllm.adapter.versions import found_version

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from support.shapes.fixture import SERIES, VLLM_PATCHES, load
from support.shapes.judging import verdicts

from kvcached_nixl.patching import Patch
from kvcached_nixl.patching.seat import find_seat, locate


@pytest.fixture(scope="module")
def shape() -> dict[str, Any]:
    version = Version(str(found_version("vllm"))).public
    if not (SERIES / f"{version}.json").is_file():
        pytest.skip(f"there is no fixture of vLLM {version}")
    return load(version)


@pytest.mark.parametrize("patch", VLLM_PATCHES, ids=lambda patch: patch.name)
def test_a_patch_stands_where_the_fixture_says_with_its_parameters(shape: dict[str, Any], patch: Patch) -> None:
    """Text was read for the one, Python has made the other: decorators, aliases and bases are told alike."""
    (verdict,) = [one for one in verdicts(shape) if one.patch == patch.name]
    if verdict.word != "holds":
        pytest.skip(f"{verdict.word}: {verdict.detail}")
    found = locate(patch.target, importlib.import_module(patch.target.module))
    assert found is not None
    seat = find_seat(patch, found)
    assert seat.where == verdict.detail
    owner = seat.owner
    body = f"{owner.__name__}:" if inspect.ismodule(owner) else f"{owner.__module__}:{owner.__qualname__}"
    parameters = [
        one.replace(annotation=inspect.Parameter.empty, default=... if one.default is not one.empty else one.empty)
        for one in inspect.signature(seat.function).parameters.values()
    ]
    _, _, text = shape["bodies"][body]["methods"][patch.attribute].partition("(")
    made: dict[str, Any] = {}
    exec(f"def method({text}: ...", made)
    assert parameters == list(inspect.signature(made["method"]).parameters.values())
