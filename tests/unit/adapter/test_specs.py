# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.specs`, with stand-ins for vLLM's specs. ``tests/contract`` compares with its loaders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.specs import parts_of_state

CONV, SSM = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4)


def spec(kind: Any, *shapes: tuple[int, ...]) -> SimpleNamespace:
    dtypes = [CONV if len(shape) == 2 else SSM for shape in shapes]
    return SimpleNamespace(mamba_type=kind, shapes=shapes, dtypes=dtypes)


def test_a_state_that_all_ranks_have_is_not_shared_out() -> None:
    """vLLM 0.30: ``tp_replicated``."""
    one = spec("SHORT_CONV", (3, 8))
    one.tp_replicated = True
    assert parts_of_state(one, 3, 4, set(), dim_first=False) == ((0, 3, 16, 2, 8, 0, 4, 3),)


@pytest.mark.parametrize(
    ("kind", "shapes", "groups"),
    [
        ("MAMBA2", ((3, 22), (4, 3, 5)), {4}),
        ("MAMBA2", ((3, 22), (4, 3, 5)), {1, 2}),
        ("MAMBA2", ((3, 12), (4, 3, 5)), {2}),
        ("MAMBA2", ((3, 21), (4, 3, 5)), {2}),
        ("MAMBA2", ((3, 22), (4, 3, 5), (4, 8, 3)), {2}),
        ("MAMBA1", ((3, 22), (4, 3, 5)), set()),
        ("LINEAR", ((3, 22),), set()),
        ("new", ((3, 22), (4, 3, 5)), {2}),
    ],
    ids=str,
)
def test_what_is_not_known_is_not_cut(kind: str, shapes: tuple[tuple[int, ...], ...], groups: set[int]) -> None:
    assert parts_of_state(spec(kind, *shapes), 0, 2, groups, dim_first=False) == ()
