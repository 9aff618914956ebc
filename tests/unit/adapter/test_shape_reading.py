# SPDX-License-Identifier: Apache-2.0
"""How fixtures are made: a wheel that is not installed is read as text (``tests/shapes``)."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the worker's patches need torch")

from support.script_loading import load_script
from support.shapes.fixture import make
from support.shapes.judging import verdicts

from experiments.common.vllm_source import open_source

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
