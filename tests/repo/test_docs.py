# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/ name everything that an operator can meet, agree with code and results, and links resolve."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from support import markdown_pages as pages
from support import matrix

from experiments.__main__ import QUESTIONS
from kvcached_nixl.errors import Refused
from kvcached_nixl.settings import Settings
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.vllm.adapter.versions import KVCACHED_SUPPORTED, ROWS, Evidence
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.timeline import State

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
EXPERIMENTS = REPOSITORY / "experiments"
PAGES = [README, EXPERIMENTS / "README.md", EXPERIMENTS / "hostvmm/README.md", *sorted(DOCS.rglob("*.md"))]
MOST_README_LINES = 150
STATE_WITHIN_LINES = 10
_STATE = re.compile(r"hardly run on GPUs", re.IGNORECASE)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def sources() -> Iterator[ast.AST]:
    """Every node of the package's code."""
    for path in sorted((REPOSITORY / "kvcached_nixl").rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def texts_of(nodes: Iterator[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


# ------------------------------------------------------------------------------------------------ causes and refusals
HAND_OVER, REFUSALS = "Hand-over causes", "Start-time refusals"
HAND_OVER_LABELS = [cause.label for cause in FailureCause]


def kinds_of(kind: type[Refused]) -> Iterator[type[Refused]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("kvcached_nixl."):
            yield one
            yield from kinds_of(one)


REFUSAL_NAMES = sorted({one.__name__ for one in kinds_of(Refused)})


def titles(text: str) -> list[str]:
    return [title for _, title in pages.headings(text)]


def test_every_cause_has_a_heading_of_its_own_and_no_other_one_is_there() -> None:
    """Exactly its label, so that a label from a dashboard or a log is found; once, so that a link to it leads there."""
    text = page("troubleshooting.md")
    assert sorted(titles(pages.section(text, HAND_OVER))) == sorted(HAND_OVER_LABELS)
    assert [label for label in HAND_OVER_LABELS if titles(text).count(label) != 1] == []
    assert [label for label in HAND_OVER_LABELS if "**Means.**" not in pages.section(text, label)] == []


def test_every_refusal_has_a_heading_of_its_own() -> None:
    """The classes of errors.py; the only other heading there is the model runner's."""
    found = titles(pages.section(page("troubleshooting.md"), REFUSALS))
    assert sorted(found) == sorted([*REFUSAL_NAMES, "Model runner"])


# ------------------------------------------------------------------------------------------------------------ settings


class Asked(Mapping[str, Any]):
    """An empty configuration that remembers for which keys it was asked."""

    def __init__(self) -> None:
        self.keys_asked: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.append(key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def settings_keys() -> list[str]:
    asked = Asked()
    Settings.from_extra_config(asked)
    return [*dict.fromkeys(asked.keys_asked)]


def test_every_settings_key_and_every_environment_variable_has_a_row() -> None:
    text = page("configuration.md")
    assert [
        one for one in settings_keys() if one not in pages.rows(pages.section(text, "kv_connector_extra_config"))
    ] == []
    assert [one for one in variables() if one not in pages.rows(text)] == []


def test_the_defaults_of_settings_are_the_documented_ones() -> None:
    """Every key whose default is a value; those that depend on the engine say so in their row."""
    rows = pages.rows(page("configuration.md"))
    keys = {one.name.removesuffix("_seconds"): getattr(Settings(), one.name) for one in dataclasses.fields(Settings)}
    shown = {key: shown_default(value) for key, value in keys.items() if value is not None}
    assert len(shown) >= 4
    assert {key: rows[key][1].strip("`") for key in shown} == shown


def shown_default(value: object) -> str:
    """A default as a table shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value not in (None, []) else "none"


_VARIABLE = re.compile(r"ENABLE_KVCACHED|NO_COLOR|(KVCACHED|VLLM|UCX|XDG)(_[A-Z0-9]+)+|KVCACHED_NIXL")


def variables() -> list[str]:
    """Environment variables that the package names; what is assigned to such a name is one of its own constants."""
    nodes = list(sources())
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return sorted(name for name in (texts_of(iter(nodes)) | read) - assigned if _VARIABLE.fullmatch(name))


# ------------------------------------------------------------------------------------------------------------- metrics


def test_every_metric_of_an_engine_has_a_row() -> None:
    documented = {name.removesuffix("_total") for name in pages.rows(pages.section(page("metrics.md"), "Engines"))}
    named = {f"kvcached_nixl:{name}" for name in (*metrics.GAUGES, *metrics.COUNTERS, "handover_state_seconds")}
    assert {name for name in documented if name.startswith("kvcached_nixl")} == named


def test_every_state_of_a_hand_over_is_defined() -> None:
    """And no other one is."""
    documented = pages.rows(pages.section(page("metrics.md"), "States of a hand-over"))
    assert [name for name in documented if name in {state.label for state in State}] == [state.label for state in State]


# -------------------------------------------------------------------------------------------------------------- README


def test_the_readme_is_short_and_says_at_once_how_little_was_run_on_gpus() -> None:
    """The first ten lines say what state the project is in."""
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_README_LINES and _STATE.search("\n".join(lines[:STATE_WITHIN_LINES]))


# --------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    """Of the site none leads out of its folder, since only that is built."""
    assert pages.broken_links(path, DOCS if path.is_relative_to(DOCS) else REPOSITORY) == []


PLANTED_LINKS = {
    "[a](other.md)": [],
    "[a](other.md#a-heading)": [],
    "[a](#this)": [],
    "[a](https://example.org/x#y) and `[a](not-a-link.md)`": [],
    "    [a](in-code.md)": [],
    "[a](missing.md)": ["missing.md: no such file"],
    "![a](missing.png)": ["missing.png: no such file"],
    "[a](other.md#gone)": ["other.md#gone: no such heading"],
    "[a](other.md#not--on-the-site)": ["other.md#not--on-the-site: no such heading"],
    "| [a](#gone) |": ["#gone: no such heading"],
    "[a](../outside.md)": ["../outside.md: leads out of docs"],
}


@pytest.mark.parametrize("text", PLANTED_LINKS)
def test_the_check_of_links_sees_planted_ones(text: str, tmp_path: Path) -> None:
    """Files, anchors, images, cells; what a repository's page and the site name in another way is broken, too."""
    root = tmp_path / "docs"
    root.mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (root / "other.md").write_text("# A heading\n\n## Not & on the site\n")
    (root / "page.md").write_text(f"# This\n\n{text}\n")
    assert pages.broken_links(root / "page.md", root) == PLANTED_LINKS[text]


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r":\s(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link or an anchor that leads nowhere ends it."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed in this environment: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------------------- prose


def test_a_section_ends_where_the_next_one_begins() -> None:
    """Headings are read by level, not in code, and a row by each of its names."""
    text = "# A\n\n## B\n\n### c_d\n\none\n\n```\n## no heading\n```\n\n## `E`\n\n| `x`, `y` | 1 |\n"
    assert titles(text) == ["A", "B", "c_d", "E"]
    assert "one" in pages.section(text, "B") and "`x`" not in pages.section(text, "B")
    assert {*pages.rows(pages.section(text, "E"))} == {"x", "y"}
    assert pages.section(text, "F") == ""


def test_every_alert_names_causes_that_there_are() -> None:
    """An alert on a label that was renamed never fires."""
    named = re.findall(r'cause=~?"([a-z_|]+)"', page("metrics.md") + README.read_text())
    assert named
    assert {label for one in named for label in one.split("|")} <= set(HAND_OVER_LABELS)


SUPPORT = (REPOSITORY / "docs/support.md").read_text()
MEASUREMENTS = (REPOSITORY / "docs/measurements.md").read_text()


def row_of(text: str, first_cell: str) -> str:
    """The only row of a table that begins with this cell."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first_cell} |")]
    return row


def test_the_support_matrix_is_what_the_code_says() -> None:
    """python tests/support/matrix.py prints what has to be there."""
    assert [one for one in matrix.tables() if f"\n\n{one}\n\n" not in SUPPORT] == []


def test_the_summary_of_support_names_the_same_versions() -> None:
    """README.md has one table for all: the first and the last series, and kvcached's."""
    assert f"{ROWS[0].series} to {ROWS[-1].series}, " in row_of(README.read_text(), "vLLM")
    assert f"kvcached {KVCACHED_SUPPORTED.removeprefix('==')}," in row_of(README.read_text(), "kvcached, NIXL")


def test_no_page_says_that_a_gpu_was_used_before_the_table_does() -> None:
    """When a series has that evidence, the first lines of README.md and the table in docs/support.md change."""
    has_run = any(Evidence.GPU in row.evidence for row in ROWS)
    assert ("nothing yet" in row_of(SUPPORT, Evidence.GPU.value)) is not has_run


RESULTS = REPOSITORY / "experiments/byte_equivalence/results"
COMPARED = [row.tested for row in ROWS if Evidence.EQUIVALENCE in row.evidence]


def lacking(result: dict[str, Any]) -> list[str]:
    """The arms that are missing; of more servers or ranks a whole run is not on record for each version."""
    return [arm for arm in result["missing"] if "2P/2D" not in arm and "tensor parallel" not in arm]


@pytest.mark.parametrize("version", COMPARED)
def test_byte_equivalence_of_the_matrix_has_a_committed_result(version: str) -> None:
    """One of every arm of a quick run at least; and no run on record found a difference."""
    paths = [RESULTS / f"last-{version}.json", RESULTS / f"last-{version}-quick.json"]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    assert {one["verdict"] for one in found} == {"equal"}
    assert not all(map(lacking, found))


CLAIMS = {
    "README.md": row_of(README.read_text(), "Are bytes and tokens right?"),
    "docs/measurements.md": row_of(MEASUREMENTS, "Is the output identical to one stock instance?"),
}


@pytest.mark.parametrize("page", CLAIMS)
def test_the_byte_equivalence_claim_has_whole_runs(page: str) -> None:
    """Both tables of results name versions; each has the summary of a run of all arms."""
    named = re.findall(r"0\.\d+\.\d+", CLAIMS[page])
    assert named and set(named) <= set(COMPARED)
    for version in named:
        assert not lacking(json.loads((RESULTS / f"last-{version}.json").read_text()))


def test_readme_quotes_the_result_that_it_names() -> None:
    text = README.read_text()
    (name,) = re.findall(r"`(experiments/byte_equivalence/results/[^`]*-quick.json)`", text)
    checks = json.loads((REPOSITORY / name).read_text())["checks"]
    assert re.search(r"of its (\d+)\srows", text)[1] == str(len(checks))
    quoted = re.findall(r"  ok  (.+)", text)
    said = [one["outcome"] for one in checks if one["arm"] == "kvcached P/D, contiguous, pull"]
    assert len(quoted) == 4 and all(any(line in one for one in said) for line in quoted)


SCRIPTS = sorted((REPOSITORY / "experiments").glob("*/run.sh"))
COMMANDS = [
    *(f"bash experiments/{script.parent.name}/run.sh" for script in SCRIPTS if script.parent.name != "bench"),
    *(f"bash experiments/bench/run.sh {question}" for question in QUESTIONS),
]
MOST_CELL_CHARACTERS = 90


@pytest.mark.parametrize("command", COMMANDS)
def test_every_experiment_has_a_row(command: str) -> None:
    """experiments/README.md: question, command, last result, versions; docs/measurements.md has the figures."""
    table = (REPOSITORY / "experiments/README.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("|") and f"`{command}`" in line]
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    assert len(cells) == 4
    assert all(len(cell) <= MOST_CELL_CHARACTERS for cell in cells), "a row is for reading: details go below the table"
    assert f"`{command}" in MEASUREMENTS


def test_all_experiments_are_found() -> None:
    assert len(COMMANDS) >= 12
