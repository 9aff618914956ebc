# SPDX-License-Identifier: Apache-2.0
"""The import graph is the one in the design."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.layering import MAY_IMPORT, PACKAGE, circles, violations

REPOSITORY = Path(__file__).resolve().parents[2]


def test_nobody_imports_what_they_must_not() -> None:
    """Processes stay apart, the patch engine knows no vLLM, NIXL has one door."""
    assert violations(REPOSITORY / PACKAGE) == []


def test_every_module_and_folder_has_a_row() -> None:
    """A new folder has to say what it may import."""
    present = {p.name.removesuffix(".py") for p in (REPOSITORY / PACKAGE).iterdir() if p.suffix == ".py" or p.is_dir()}
    assert present - {"__pycache__"} <= set(MAY_IMPORT)


PLANTED = {
    "worker/geometry/layout.py": "from kvcached_nixl.scheduler import lease",
    "scheduler/lease.py": "def f():\n    import kvcached_nixl.worker.geometry.layout",
    "patching/registry.py": "import importlib\nimportlib.import_module('vllm.config')",
    "patching/record.py": "from ..vllm.adapter import locate",
    "transport/side_channel.py": "import nixl",
    "wire/push.py": "if TYPE_CHECKING:\n    from kvcached_nixl.worker.push import Offer",
    "worker/transfer/peers.py": "def f():\n    from kvcached_nixl.worker.decode import fencing",
}


@pytest.mark.parametrize("file", PLANTED)
def test_the_check_sees_a_planted_violation(tmp_path: Path, file: str) -> None:
    """Absolute, relative, inside a function, under TYPE_CHECKING and by name: none escapes."""
    planted = tmp_path / PACKAGE / file
    planted.parent.mkdir(parents=True)
    planted.write_text(PLANTED[file])
    (line,) = violations(tmp_path / PACKAGE)
    assert line.startswith(file)


def test_no_import_goes_in_a_circle() -> None:
    """Each module can be read, and tested, after those it builds on. Type-only and late imports count."""
    assert circles(REPOSITORY / PACKAGE) == []


def plant(package: Path, files: Mapping[str, str]) -> None:
    for name, source in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)


CIRCLES = {
    "two": {
        "report.py": "if TYPE_CHECKING:\n    from kvcached_nixl.bootstrap import Installation",
        "bootstrap.py": "def announce():\n    from . import report",
    },
    "three, relative": {
        "patching/record.py": "from .call import Call",
        "patching/call.py": "from . import registry",
        "patching/registry.py": "import kvcached_nixl.patching.record",
    },
    "through a package": {
        "patching/__init__.py": "from kvcached_nixl.patching.call import Call",
        "patching/call.py": "from kvcached_nixl.patching import Registry",
    },
    "by name": {
        "errors.py": "import importlib\nimportlib.import_module('kvcached_nixl.ids')",
        "ids.py": "from kvcached_nixl.errors import Refused",
    },
    "itself": {"errors.py": "def f():\n    from kvcached_nixl.errors import Refused"},
}


@pytest.mark.parametrize("name", CIRCLES)
def test_the_check_sees_a_planted_circle(tmp_path: Path, name: str) -> None:
    """Of two, of three, through a package's __init__, by name, of one: each is found once, with all its modules."""
    plant(tmp_path / PACKAGE, CIRCLES[name])
    (circle,) = circles(tmp_path / PACKAGE)
    assert len(set(circle.split(" -> "))) == len(CIRCLES[name])


def test_the_check_lets_a_tree_through(tmp_path: Path) -> None:
    """Two that share a third, a package that collects its modules, and a name that two modules have are no circle."""
    sources = {
        "__init__.py": "from kvcached_nixl import report",
        "report.py": "from kvcached_nixl.patching import Call\nfrom kvcached_nixl.errors import Refused",
        "errors.py": "import report",
        "patching/__init__.py": "from kvcached_nixl.patching.call import Call",
        "patching/call.py": "from kvcached_nixl.errors import Refused",
        "patching/report.py": "from kvcached_nixl.patching.call import Call",
    }
    plant(tmp_path / PACKAGE, sources)
    assert circles(tmp_path / PACKAGE) == []
