# SPDX-License-Identifier: Apache-2.0
"""`tests/support/shapes/contacts.py`: what differs of a vLLM's contact points with kvcached is found without it."""

from __future__ import annotations

from typing import Any

import pytest
from support.shapes.contacts import differing

from kvcached_nixl.patching import parameter_lists
from kvcached_nixl.vllm.patches.windows import Contact

FILES = {
    "vllm/one.py": "from vllm.other import moved as renamed, gone\n"
    "class Owner:\n    def method(self, a, /, b, *rest, c=1, **more): ...\n    async def waits(self): ...\n"
    "def plain(a): ...\n",
    "vllm/other/__init__.py": "def moved(x, y): ...\n",
}


class Source:
    paths = frozenset(FILES)

    def read(self, path: str) -> str:
        return FILES[path]


@pytest.mark.parametrize(
    ("qualname", "parameters", "found"),
    [
        ("Owner.method", "self a b rest c more", None),
        ("Owner.waits", "self", None),
        ("plain", "a", None),
        ("plain", "a b", "parameters (a)"),
        ("Owner.gone", "self", "not there"),
        ("gone", "self", "not there"),
        ("nowhere", "self", "not there"),
        ("renamed", "x y", None),
    ],
)
def test_a_difference_is_found(qualname: str, parameters: str, found: str | None) -> None:
    source: Any = Source()
    said = differing(source, [Contact("vllm.one", qualname, parameter_lists(parameters))])
    assert said == ([] if found is None else [f"vllm.one.{qualname}: {found}"])
