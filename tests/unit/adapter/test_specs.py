# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.specs`, with stand-ins for vLLM's specs. ``tests/contract`` compares with its loaders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.specs import groups_of_states, parts_of_state

CONV, SSM = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4)


def spec(kind: Any, *shapes: tuple[int, ...]) -> SimpleNamespace:
    dtypes = [CONV if len(shape) == 2 else SSM for shape in shapes]
    return SimpleNamespace(mamba_type=kind, shapes=shapes, dtypes=dtypes)


def test_each_projection_of_a_convolution_is_shared_out_by_itself() -> None:
    """Rank 1 of 2: 12 channels of x, and one of two groups of B and C with 5 each. Channels are 2 bytes in each of
    three rows, and heads of 3 times 5 elements lie behind them."""
    found = parts_of_state(spec("MAMBA2", (3, 22), (4, 3, 5)), 1, 2, {2}, dim_first=False)
    assert found == (
        (0, 3, 44, 2, 12, 12, 1, 0),
        (24, 3, 44, 2, 5, 5, 1, 0),
        (34, 3, 44, 2, 5, 5, 1, 0),
        (132, 1, 0, 60, 4, 4, 1, 0),
    )


def test_with_channels_first_a_channel_has_all_its_positions() -> None:
    found = parts_of_state(spec(SimpleNamespace(name="GDN_ATTN"), (20, 3), (4, 3, 2)), 1, 2, set(), dim_first=True)
    places = ((0, 1, 0, 6, 4, 4), (24, 1, 0, 6, 4, 4), (48, 1, 0, 6, 12, 12), (120, 1, 0, 24, 4, 4))
    assert found == tuple((*place, 1, 0) for place in places)


def test_the_only_group_is_a_copy_on_each_rank() -> None:
    shared = spec("MAMBA2", (3, 22), (4, 3, 5))
    x, b, c, _ = parts_of_state(shared, 1, 2, {1}, dim_first=False)
    assert (x[-2:], b, c) == ((1, 0), (24, 3, 44, 2, 5, 0, 2, 1), (34, 3, 44, 2, 5, 0, 2, 1))
    assert parts_of_state(shared, 0, 1, {1}, dim_first=False)[1] == (24, 3, 44, 2, 5, 0, 1, 0)


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


def test_groups_have_several_names() -> None:
    config = SimpleNamespace(to_dict=lambda: {"n_groups": 8, "mamba_n_groups": 1, "n_group": 3, "mamba_ngroups": None})
    assert groups_of_states(config) == {1, 8}
