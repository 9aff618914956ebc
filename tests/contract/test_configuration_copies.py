# SPDX-License-Identifier: Apache-2.0
"""vLLM copies a worker's configuration for models with images and for draft models.

Its ``replace`` fails on attributes that are no fields, so a worker has none of this package on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from vllm.config import VllmConfig
from vllm.config.utils import replace

from kvcached_nixl.vllm.patches import naming


class Executor:
    """Stands for vLLM's, which lives as long as its engine."""


@pytest.fixture
def executor() -> Iterator[Any]:
    yield Executor()
    naming.give_up_name()


def test_an_attribute_that_is_no_field_cannot_be_copied() -> None:
    config = VllmConfig()
    config.kvcached_nixl_name = "any"
    with pytest.raises(ValueError, match="kvcached_nixl_name"):
        replace(config)


def test_a_workers_configuration_can_be_copied(executor: Any) -> None:
    """As vLLM does it for the language model of a model with images, and for a draft model."""
    config = VllmConfig()
    naming.own_engine(executor, config)
    naming.join_engine(config)
    # `replace` passes each of them to the constructor.
    assert vars(config).keys() <= {field.name for field in fields(VllmConfig)}
