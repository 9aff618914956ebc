# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.versions`: the table of versions, and what is refused outside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached_nixl.patching import Patch
from kvcached_nixl.vllm.adapter import versions
from kvcached_nixl.vllm.adapter.locate import FACADE
from kvcached_nixl.vllm.adapter.versions import (
    CHANGES,
    HITS_DIVERGE,
    ROWS,
    SUPPORTED,
    Evidence,
    Row,
    installed_has,
    reason_to_skip,
    row_of,
)


def patch(**changes: Any) -> Patch:
    fields: dict[str, Any] = {
        "target": FACADE,
        "attribute": "load",
        "process": "every",
        "parameters": "self",
        "why": "w",
    }
    return Patch(**{**fields, **changes})


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the versions that are found: found(vllm="0.26.0", kvcached=None)."""

    def set_versions(**given: str | None) -> None:
        table = {"vllm": "0.26.0", "kvcached": "0.1.6", "nixl": "1.0", **given}
        monkeypatch.setattr(versions, "found_version", table.__getitem__)

    return set_versions


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.tested)
def test_a_row_contains_its_tested_release(row: Row) -> None:
    assert row_of(row.tested) is row


@pytest.mark.parametrize(("vllm", "has"), [("0.27.1", False), ("0.28.0", True), ("0.30.0", True)])
def test_a_series_has_what_changed_up_to_it(found: Callable[..., None], vllm: str, has: bool) -> None:
    found(vllm=vllm)
    assert installed_has(HITS_DIVERGE) is has


def test_series_and_changes_are_in_order() -> None:
    """A later change would else be undone by an earlier one, and newest would not be the last."""
    numbers = [int(row.series[2:]) for row in ROWS]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    since = [int(change.since[2:]) for change in CHANGES]
    assert since == sorted(since) and set(since) <= set(numbers)


def test_what_is_said_to_be_supported_is_what_the_rows_are() -> None:
    """From the first to the last, without a gap; and nothing is a row of which nothing was run."""
    assert SUPPORTED == ">=0.26,<0.34"
    assert all(Evidence.CONTRACT in row.evidence for row in ROWS)


@pytest.mark.parametrize("version", ["0.26.1", "0.26.0+cpu", "0.28.0", "0.28.1", "0.30.0"])
def test_releases_of_a_tested_series_are_supported(version: str) -> None:
    """Local build tags do not matter."""
    assert row_of(version) is not None


# Whatever version of packaging compares them.
PRERELEASES = ("0.26.0rc1", "0.28.0rc1", "0.34.0rc1", "0.28.1.dev3+g123", "0.28.1rc1")


@pytest.mark.parametrize("version", [*("0.25.1", "0.34.0"), *PRERELEASES, "dev", "unknown", "", None])
def test_everything_else_is_not(version: str | None) -> None:
    """No guessing from a neighbour, a development build or a missing version."""
    assert row_of(version) is None


def test_a_patch_is_skipped_outside_its_versions(found: Callable[..., None]) -> None:
    """The reason names both."""
    found(vllm="0.28.0")
    assert reason_to_skip(patch(versions="<0.28")) == "for vLLM <0.28, this is 0.28.0"
    assert reason_to_skip(patch(versions=">=0.28")) is None


def test_the_imported_module_states_its_version_itself(make_module: Callable[..., Any]) -> None:
    """Third-party builds carry another distribution name; vllm.__version__ is there all the same."""
    make_module("vllm", "__version__ = '0.28.7'")
    assert versions.found_version("vllm") == "0.28.7"


def test_a_library_that_cannot_be_imported_has_no_version() -> None:
    """Distribution leftovers do not count."""
    assert versions.found_version("a_library_nobody_has") is None
