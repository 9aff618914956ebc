# SPDX-License-Identifier: Apache-2.0
"""How fixtures are made: a wheel that is not installed is read as text (``tests/shapes``)."""

from __future__ import annotations

import contextlib
import textwrap
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker's patches need torch")

from support.script_loading import load_script
from support.shapes import fixture as shape_fixture
from support.shapes.fixture import load, make
from support.shapes.judging import verdicts
from support.shapes.reading import Reader

from experiments.common import vllm_source as shape_source
from experiments.common.vllm_source import Source, open_source
from kvcached_nixl.vllm.adapter.versions import ROWS

SHAPES = Path(__file__).resolve().parents[2] / "shapes"
command = load_script("make_shapes", SHAPES / "make.py")

KV = "vllm/distributed/kv_transfer/kv_connector"


def wheel(folder: Path, files: dict[str, str], name: str = "vllm-0.28.0+cpu-py3-none-any.whl") -> Path:
    with zipfile.ZipFile(folder / name, "w") as made:
        for path, text in files.items():
            made.writestr(path, textwrap.dedent(text))
    return folder / name


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A base class and one derived from it, by way of every kind of import."""
    files = {
        "vllm/base.py": """
            class Base(ABC):
                size: int = 1
                def __init__(self, role):
                    self._role, self.kept = role, {}
                def load(self, *, now=True, **rest): ...
            class Other: ...
        """,
        "vllm/pack/__init__.py": "from ..base import Base as Root\nfrom . import inner",
        "vllm/pack/inner.py": """
            from typing import TYPE_CHECKING
            import vllm.base
            from vllm import pack
            from vllm.pack import Root
            if TYPE_CHECKING:
                BOUND: int
            try:
                class Inner(Root[int], pack.Root, SomethingElse):
                    @classmethod
                    def make(cls, data: dict[str, int] | None = None, /) -> "Inner": ...
                    @property
                    def role(self): ...
                    @role.setter
                    def role(self, value): ...
                    @staticmethod
                    @traced(1)
                    def ask(): ...
                    load = None
            except ImportError:
                pass
            Alias = Inner
        """,
    }
    return Reader(open_source(str(wheel(tmp_path, files))))


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("vllm.pack.inner", "Inner", "vllm.pack.inner:Inner"),
        ("vllm.pack.inner", "Alias", "vllm.pack.inner:Inner"),
        ("vllm.pack", "Root", "vllm.base:Base"),
        ("vllm.pack", "inner.Alias", "vllm.pack.inner:Inner"),
        ("vllm.pack.inner", "SomethingElse", None),
        ("vllm.nowhere", "Inner", None),
    ],
)
def test_a_name_leads_to_its_class(reader: Reader, module: str, name: str, found: str | None) -> None:
    """Through aliases, renamed and relative imports, and modules that are imported."""
    assert reader.resolve(module, name) == found


def test_a_body_is_read_with_kinds_and_parameters(reader: Reader) -> None:
    """Annotations and defaults are left out, that there is a default is not."""
    body = reader.body("vllm.pack.inner:Inner")
    assert body.bases == ("vllm.base:Base", "vllm.base:Base")
    assert body.methods == {
        "make": "classmethod(cls, data=..., /)",
        "role": "property(self)",
        "ask": "staticmethod()",
        "load": "object()",
    }
    assert reader.body("vllm.base:Base").methods["load"] == "method(self, *, now=..., **rest)"


def test_names_are_what_is_stored_defined_or_bound(reader: Reader) -> None:
    """By a class, and by a module even if only a type checker sees it."""
    assert reader.body("vllm.base:Base").names == {"size", "__init__", "load", "_role", "kept"}
    assert reader.lineage("vllm.pack.inner:Inner") == ("vllm.pack.inner:Inner", "vllm.base:Base")
    assert {"BOUND", "Inner", "Root", "Alias"} <= reader.body("vllm.pack.inner:").names


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


def test_what_is_no_wheel_is_refused_in_words(tmp_path: Path) -> None:
    """A path that is not there is not looked up as a version."""
    with pytest.raises(ValueError, match="there is no file"):
        open_source(str(tmp_path / "vllm-0.28.0-py3-none-any.whl"))


def test_of_a_wheel_elsewhere_only_parts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parts' size, what is read is whole; and what is not read is not fetched."""
    path = wheel(tmp_path, {"vllm/large.bin": "x" * 5000, "vllm/a.py": "A = 1", "vllm/b.py": "B = 2"})
    content, fetched = path.read_bytes(), 0

    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        nonlocal fetched
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        fetched += len(part)
        headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return contextlib.nullcontext(SimpleNamespace(status=206, headers=headers, read=lambda: part))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(shape_source, "_CHUNK_BYTES", 7)
    monkeypatch.setattr(shape_source, "_address_of", lambda version: "https://example.org/vllm.whl")
    source = open_source("0.28.0")
    assert isinstance(source, Source) and source.version == "0.28.0"
    assert [source.read(name) for name in sorted(source.paths)] == ["A = 1", "B = 2"]
    assert fetched < 1000


# --------------------------------------------------------------------------------------------------------- the command


def test_a_check_names_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patch by patch, then the names; the exit status says it, too."""
    assert command.check(str(wheel(tmp_path, CONNECTOR))) == 1
    said = capsys.readouterr().out
    assert "vLLM 0.28.0 (supported)" in said
    assert "no caller    connector.get_finished: vllm." in said
    assert "gone         engine core._process_input_queue: no vllm.v1.engine.core.EngineCoreProc" in said
    assert "not there    vllm.v1.request.Request: the class itself" in said


def test_a_check_of_what_is_supported_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0."""
    monkeypatch.setattr(command, "make", lambda source: load(ROWS[-1].tested))
    assert command.check(str(wheel(tmp_path, {}))) == 0
    assert (
        f"0 of {len(shape_fixture.VLLM_PATCHES)} patches broken, names missing in 0 places" in capsys.readouterr().out
    )


def test_a_fixture_that_is_written_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each class, patch and target."""
    path = str(wheel(tmp_path, CONNECTOR))
    monkeypatch.setattr(shape_fixture, "SERIES", tmp_path)
    assert command.write([path]) == 0
    assert load("0.28.0") == make(open_source(path))
