# SPDX-License-Identifier: Apache-2.0
"""Facts that are repeated in the repository agree with each other."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvcached_nixl
from kvcached_nixl.vllm import NIXL_PREFIX
from kvcached_nixl.vllm.adapter.versions import CHANGES, KVCACHED_SUPPORTED, ROWS, Evidence, row_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="reading pyproject.toml needs tomli before Python 3.11")

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "kvcached_nixl"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")])


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return loaded["project"]


def requirement(project: dict[str, Any], extra: str) -> Requirement:
    (text,) = project["optional-dependencies"][extra]
    return Requirement(text)


def test_the_vllm_extra_and_the_table_admit_the_same_releases(project: dict[str, Any]) -> None:
    """pip must not install what a start then refuses, nor the other way round."""
    extra = requirement(project, "vllm").specifier
    releases = [f"0.{minor}.{patch}" for minor in range(15, 36) for patch in range(4)]
    assert [v for v in releases if extra.contains(v)] == [v for v in releases if row_of(v) is not None]
    assert all(extra.contains(row.tested) for row in ROWS)


def test_the_kvcached_extra_is_the_supported_kvcached(project: dict[str, Any]) -> None:
    """One version, in two places that agree."""
    assert str(requirement(project, "kvcached").specifier) == KVCACHED_SUPPORTED


def test_the_runtime_needs_few_libraries(project: dict[str, Any]) -> None:
    """vLLM requires aiohttp and numpy, too."""
    assert sorted(Requirement(text).name for text in project["dependencies"]) == [
        "aiohttp",
        "msgspec",
        "numpy",
        "packaging",
        "wrapt",
        "xxhash",
    ]


def test_every_requirement_has_a_lower_bound_and_that_is_what_is_tested(project: dict[str, Any]) -> None:
    """In experiments/locks/lowest.txt; the vllm, nixl and kvcached extras have environments of their own."""
    lock = (REPOSITORY / "experiments/locks/lowest.txt").read_text()
    tested = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE))
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]:
        one = Requirement(text)
        bounds = [bound.version for bound in one.specifier if bound.operator in (">=", "==", "~=")]
        assert len(bounds) == 1, f"{text} has no lower bound"
        if text in [*project["dependencies"], *extras["dev"]]:
            found = Version(tested[canonicalize_name(one.name)])
            assert found == Version(bounds[0]), f"{text}: tested with {found}; run experiments/locks/pythons.sh"


def test_the_doors_in_the_metadata_can_be_opened(project: dict[str, Any]) -> None:
    """The entry point and the console script name what exists."""
    assert project["entry-points"]["vllm.general_plugins"] == {"kvcached_nixl": "kvcached_nixl:install"}
    assert callable(kvcached_nixl.install)
    assert project["scripts"] == {"kvcached-nixl": "kvcached_nixl.__main__:main"}


def test_the_installed_version_is_the_one_in_the_package() -> None:
    """The version is written once."""
    try:
        installed = metadata("kvcached-nixl")["Version"]
    except PackageNotFoundError:
        pytest.skip("kvcached-nixl is not installed in this environment")
    assert installed == kvcached_nixl.__version__


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_source_file_names_its_licence(path: Path) -> None:
    """First line, so that tools find it."""
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_importing_the_package_imports_nothing_heavy() -> None:
    """`import kvcached_nixl` is part of an interpreter start when the gate is open."""
    code = "import sys, kvcached_nixl; print([m for m in ('vllm', 'torch', 'nixl', 'wrapt') if m in sys.modules])"
    # -S: the start files of other packages import what they like.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def patches() -> list[Any]:
    pytest.importorskip("torch", reason="the worker's patches need torch")
    from kvcached_nixl.vllm.patches import PATCHES

    return list(PATCHES)


def test_experiments_take_the_newest_vllm_that_servers_were_tested_with() -> None:
    """In Python, and in the scripts that make the environment before Python is there; unless told otherwise."""
    newest = [row.tested for row in ROWS if Evidence.E2E in row.evidence][-1]
    assert f'"KVCACHED_NIXL_VLLM") or "{newest}"' in (REPOSITORY / "experiments/__main__.py").read_text()
    for script in ("run", "env"):
        assert f"${{KVCACHED_NIXL_VLLM:-{newest}}}" in (REPOSITORY / f"experiments/{script}.sh").read_text()


def test_no_patch_names_a_version_by_itself() -> None:
    """One table knows versions: what a patch depends on is a change in it."""
    known = {"", *(word for change in CHANGES for word in (change.earlier, change.later))}
    assert [patch.name for patch in patches() if patch.versions not in known] == []


def test_the_gate_is_decided_before_anything_else() -> None:
    """Then kvcached's own patch of the connector comes off, then ours go on."""
    names = [patch.name for patch in patches()]
    assert names[:2] == ["factory.create_connector", "connector.__init__"]
    of_connector = [one for one in names if one.startswith(("connector", "pull connector", "worker.", "kvcached."))]
    assert of_connector[1] == "kvcached.patch_connector"


def test_each_patch_says_what_it_prevents_and_until_when_it_is_needed() -> None:
    """In its function's docstring; until when, perhaps in its module for all of its patches."""
    for patch in patches():
        said, module = str(patch.wrapper.__doc__), Path(inspect.getfile(patch.wrapper)).read_text()
        assert said.startswith("Without it, ") and patch.why.endswith("."), patch.name
        assert "Until" in said or re.search("Needed until |^#.* [Uu]ntil ", module, re.MULTILINE), patch.name


def test_no_attribute_is_patched_twice() -> None:
    """Two wrappers around one method would depend on their order without saying so."""
    names = [patch.name for patch in patches()]
    assert len(names) == len(set(names))


def module_level_mutables(path: Path) -> list[str]:
    """Assignments of a dict, list or set at module level, by name; ``__all__`` and constants of tests aside."""
    found = []
    for node in ast.parse(path.read_text()).body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        mutable = isinstance(value, (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
        calls = isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("dict", "list", "set", "defaultdict")
        if mutable or calls:
            target = node.targets[0] if isinstance(node, ast.Assign) else vars(node)["target"]
            if getattr(target, "id", "") != "__all__":
                found.append(f"{path.name}: {ast.unparse(target)}")
    return found


def test_no_module_of_the_package_has_mutable_state() -> None:
    """Two patches that talk through a global are the fault this package is there to mend."""
    assert [found for path in PACKAGE.rglob("*.py") for found in module_level_mutables(path)] == []


def test_the_check_for_mutable_state_sees_planted_state(tmp_path: Path) -> None:
    """A dict, an annotated list and a set() are all found."""
    (tmp_path / "planted.py").write_text("A = {}\nB: list[int] = []\nC = set()\n__all__ = ['A']\nD = (1, 2)\n")
    assert module_level_mutables(tmp_path / "planted.py") == ["planted.py: A", "planted.py: B", "planted.py: C"]


def test_the_start_file_reads_the_gate_as_the_settings_do() -> None:
    """Where the package cannot be imported, its start files repeat the accepted values and the connector's name."""
    gate = 'environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true")'
    assert gate in (PACKAGE / "vllm" / "__init__.py").read_text()
    for file in ("kvcached_nixl.pth", "sitecustomize/sitecustomize.py"):
        line = (PACKAGE / file).read_text().replace("'", '"')
        assert gate in line and f'name == "{NIXL_PREFIX}"' in line


def test_the_containerfile_copies_what_is_there() -> None:
    text = (REPOSITORY / "docs/deploy/Containerfile").read_text().replace("\\\n", " ")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and [name for name in copied if not (REPOSITORY / name).exists()] == []
