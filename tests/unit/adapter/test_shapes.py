# SPDX-License-Identifier: Apache-2.0
"""Checks every patch, and every name that is read from vLLM, against the fixture of each series (``tests/shapes``)."""

from __future__ import annotations

import ast
import copy
import functools
import re
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker's patches need torch")

from packaging.version import Version
from support.script_loading import load_script
from support.shapes.fixture import SERIES, VLLM_PATCHES, load, make, missing, troubles, verdicts
from support.shapes.reads import READS

import kvcached_nixl
from experiments.common.vllm_python import open_source
from kvcached_nixl.vllm.adapter.versions import ROWS

PACKAGE = Path(kvcached_nixl.__file__).parent
VERSIONS = sorted((path.stem for path in SERIES.glob("*.json")), key=Version)
BEYOND: set[str] = set()
"""Of releases that were only read: kvcached 0.1.6 has no adapter for them."""


@functools.cache
def shape_of(version: str) -> dict[str, Any]:
    return load(version)


@pytest.fixture
def shape() -> dict[str, Any]:
    """One that may be changed: of the newest tested release."""
    return copy.deepcopy(shape_of(ROWS[-1].tested))


def test_every_series_in_the_table_has_a_fixture() -> None:
    """Of the release that the tests run against."""
    assert {row.tested for row in ROWS} == set(VERSIONS) - BEYOND


@pytest.mark.parametrize("version", VERSIONS)
def test_every_patch_holds_and_is_called(version: str) -> None:
    """As far as it is for that release."""
    assert troubles(shape_of(version)) == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_is_read_is_there(version: str) -> None:
    """Stored or defined by the class or one of its bases, or bound by the module."""
    assert missing(shape_of(version)) == {}


# ------------------------------------------------------------------------------------------------- what it has to find
FACADE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector:NixlBaseConnector"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("method(self)", "parameters (self)"),
        ("method(self, finished_req_ids, *, more=...)", "parameters (self, finished_req_ids, more)"),
        ("classmethod(cls, finished_req_ids)", "a classmethod"),
        ("object()", "an object of type object"),
    ],
)
def test_a_changed_signature_is_found(shape: dict[str, Any], changed: str, found: str) -> None:
    """The message is that of a refusal at start, and says what was expected."""
    shape["bodies"][FACADE]["methods"]["get_transfer_results"] = changed
    (verdict,) = [one for one in verdicts(shape) if one.is_trouble]
    assert (verdict.patch, verdict.word) == ("connector.get_transfer_results", "changed")
    assert found in verdict.detail and "expected get_transfer_results" in verdict.detail


def test_a_method_that_is_only_inherited_from_outside_is_found(shape: dict[str, Any]) -> None:
    """Wrapped there, it would be wrapped for every other connector."""
    del shape["bodies"][FACADE]["methods"]["wait_for_save"]
    assert troubles(shape) == {"connector.wait_for_save": "changed"}
    del shape["bodies"][BASE]["methods"]["wait_for_save"]
    assert troubles(shape) == {"connector.wait_for_save": "gone"}


def test_a_removed_caller_is_found(shape: dict[str, Any]) -> None:
    """A wrapper that is never called looks as if it held."""
    shape["callers"]["engine scheduler._preempt_request"] = []
    assert troubles(shape) == {"engine scheduler._preempt_request": "no caller"}


def test_a_class_that_has_gone_is_found(shape: dict[str, Any]) -> None:
    """All of its patches, by name."""
    del shape["places"][SCHEDULER]
    expected = {patch.name for patch in VLLM_PATCHES if patch.target.name == "engine scheduler"}
    assert len(expected) == 6
    assert troubles(shape) == dict.fromkeys(expected, "gone")


def test_a_missing_name_is_found(shape: dict[str, Any]) -> None:
    """One of a class, and a class with all of its names."""
    shape["reads"]["worker"] = shape["reads"]["worker"].replace("xfer_stats", "-xfer_stats")
    shape["reads"]["vllm.v1.outputs.KVConnectorOutput"] = None
    assert missing(shape) == {"worker": ["xfer_stats"], "vllm.v1.outputs.KVConnectorOutput": []}


def test_a_release_candidate_is_read_as_the_release(shape: dict[str, Any]) -> None:
    """A version specifier alone would leave out every patch that names versions."""
    before = verdicts(shape)
    shape["version"] += "rc1"
    assert verdicts(shape) == before


@pytest.mark.parametrize(("part", "asked"), [("callers", troubles), ("reads", missing)])
def test_a_fixture_that_is_older_than_a_patch_or_a_read_says_so(shape: dict[str, Any], part: str, asked: Any) -> None:
    """What was not looked for is not known, and neither there nor missing."""
    shape[part].popitem()
    with pytest.raises(ValueError, match=r"make all anew: python tests/shapes/make\.py make"):
        asked(shape)


# -------------------------------------------------------------------------------------------------- the table of names
OF_KVCACHED = {
    "page_allocator",
    "block_mem_size",
    "mem_size",
    "page_size",
    "num_layers",
    "num_kv_buffers",
    "_get_num_alloced_blocks",
    "_evict_blocks_from_pool",
    "_evictable_blocks",
    "_obtain_default_ipc_name",
    "get_tp_socket_dir",
    "SHM_DIR",
}
"""Of kvcached's modules, its manager and the block pool that it puts in the place of vLLM's; ``tests/contract`` runs
them."""
OF_OTHERS = {"model_type", "model", "data", "engine_client", "server"} | OF_KVCACHED
"""Of objects that are not vLLM's own: besides kvcached's, a model's configuration, a draft model of a user's class,
another connector's statistics, and the state of an HTTP application."""
WITHOUT_VLLM = {
    "getattr(owner, name, default)",  # `optional`
    # Of a string or an enumeration's member, by vLLM's version.
    "getattr(spec.mamba_type, 'name', spec.mamba_type)",
    # Of any object that a model holds, and what only CPU kernels put there.
    "getattr(value, '__dict__', {})",
    "getattr(value, '__module__', None)",
    "getattr(value, name, None)",
    # Names that tests/contract/test_identifying.py compares with each vLLM.
    "getattr(envs, name, None)",
    "vars(kind).get('__slots__', ())",
    "vars(module).get('cpu_linear')",
    # What kvcached has put there, and where a module or an engine may not be there yet.
    "vars(module).get(PULL_FACADE.qualname)",
    "vars(module).get('__version__')",
    "vars(core).get('scheduler')",
}


def trees(*folders: str) -> Iterator[ast.AST]:
    for path in (path for folder in folders for path in (PACKAGE / folder).rglob("*.py") if path.stem != "reads"):
        yield from ast.walk(ast.parse(path.read_text()))


def test_every_private_name_and_every_import_is_in_the_table() -> None:
    """A new one that nobody looks for in other releases would be refused there at a start, or worse in a step."""
    known = {name for reads in READS for name in reads.all_names}
    places = {f"{target.module}.{target.qualname}" for reads in READS for target in reads.targets}
    known |= {place.rpartition(".")[2] for place in places}
    modules = {target.module for reads in READS for target in reads.targets}
    for node in trees("vllm"):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("private", "optional"):
            is_known = not isinstance(node.args[1], ast.Constant) or node.args[1].value in known | OF_OTHERS
            assert is_known, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                assert {f"{node.module}.{alias.name}"} & (places | modules) or alias.name in known, ast.unparse(node)


def test_a_read_with_a_default_is_one_that_the_table_has() -> None:
    """A later vLLM that renames the attribute would otherwise get the default, and nobody would notice."""
    found = {
        ast.unparse(node)
        for node in trees("vllm")
        if isinstance(node, ast.Call)
        and (
            (getattr(node.func, "id", "") == "getattr" and len(node.args) == 3)
            or (getattr(node.func, "attr", "") == "get" and ast.unparse(node).startswith("vars("))
        )
        # What this package has put there itself, by a name of its own.
        and not re.search(r"\.get\(_?[A-Z_]+[,)]", ast.unparse(node))
    }
    assert found == WITHOUT_VLLM


def test_every_name_in_the_table_is_read() -> None:
    """As an attribute, as a string, or as a method that a class of this package overrides."""
    words: set[str] = set()
    for node in trees("vllm"):
        words |= {getattr(node, field, "") for field in ("attr", "arg", "name", "value") if _is_word(node, field)}
    # kvcached_nixl.vllm.adapter.nixl_worker makes these from the names of options.
    words |= {word.replace("-", "_") for word in words}
    assert [name for reads in READS for name in reads.all_names if name not in words] == []


def _is_word(node: ast.AST, field: str) -> bool:
    return isinstance(getattr(node, field, None), str)


SHAPES = Path(__file__).resolve().parents[2] / "shapes"
command = load_script("make_shapes", SHAPES / "make.py")
KV = "vllm/distributed/kv_transfer/kv_connector"


def wheel(folder: Path, files: dict[str, str], name: str = "vllm-0.28.0+cpu-py3-none-any.whl") -> Path:
    with zipfile.ZipFile(folder / name, "w") as made:
        for path, text in files.items():
            made.writestr(path, textwrap.dedent(text))
    return folder / name


CONNECTOR = {
    f"{KV}/v1/base.py": """
        class Base:
            def get_finished(self, finished_req_ids): ...
    """,
    f"{KV}/v1/nixl/connector.py": """
        from vllm.distributed.kv_transfer.kv_connector.v1.base import Base
        class NixlBaseConnector(Base):
            def get_finished(self, finished_req_ids):
                return self.connector_worker.get_finished()
    """,
    f"{KV}/v1/multi_connector.py": """
        class MultiConnector:
            def get_finished(self, finished_req_ids):
                return [connector.get_finished(finished_req_ids) for connector in self._connectors]
    """,
}
ASKS_ITSELF = """
            def get_transfer_results(self, finished_req_ids):
                return self.get_finished(finished_req_ids)
"""
HAS_ITS_OWN = """
            def get_transfer_results(self, finished_req_ids): ...
"""
MIXIN = "vllm/v1/worker/mixin.py"


def word_of(folder: Path, base: str = "", connector: str = "", runner: str = "") -> str:
    files = {**CONNECTOR, MIXIN: runner}
    files[f"{KV}/v1/base.py"] += base
    files[f"{KV}/v1/nixl/connector.py"] += connector
    shape = make(open_source(str(wheel(folder, files))))
    return {one.patch: one.word for one in verdicts(shape)}["connector.get_finished"]


@pytest.mark.parametrize(
    ("runner", "word"),
    [
        ("class Runner:\n def step(self):\n  self.kv_connector.get_finished(set())", "holds"),
        ("def step():\n get_kv_transfer_group().connector.get_finished(set())", "holds"),
        ("def step(ec_connector):\n ec_connector.get_finished(set())", "no caller"),
        ("def get_finished(kv_connector):\n kv_connector.get_finished(set())", "holds"),
        ("", "no caller"),
    ],
)
def test_a_caller_is_who_asks_a_connector(tmp_path: Path, runner: str, word: str) -> None:
    """Not who asks another kind of connector, and not a connector that hands the question on."""
    assert word_of(tmp_path, runner=runner) == word


def test_a_caller_may_be_inherited_unless_the_connector_has_its_own(tmp_path: Path) -> None:
    """vLLM 0.30: the base still asks ``get_finished``, and the NIXL connector has its own of what asks it."""
    assert word_of(tmp_path, base=ASKS_ITSELF) == "holds"
    assert word_of(tmp_path, base=ASKS_ITSELF, connector=HAS_ITS_OWN) == "no caller"


# --------------------------------------------------------------------------------------------------------- the command


def test_a_check_names_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patch by patch, then the names; the exit status says it, too."""
    assert command.check(str(wheel(tmp_path, CONNECTOR))) == 1
    said = capsys.readouterr().out
    assert "vLLM 0.28.0 (supported)" in said
    assert "no caller    connector.get_finished: vllm." in said
    assert "gone         engine core._process_input_queue: no vllm.v1.engine.core.EngineCoreProc" in said
    assert "not there    vllm.v1.request.Request: the class itself" in said
