# SPDX-License-Identifier: Apache-2.0
"""Identity of weights in memory: by content, whatever their layout, and cheap for the largest."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcached_nixl.identity import memory  # noqa: E402
from kvcached_nixl.identity.memory import in_memory  # noqa: E402


def weights(**changed: Any) -> list[tuple[str, Any]]:
    made = {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "c.scale": torch.tensor(1.5),
        "d.packed": torch.arange(5, dtype=torch.uint8),
    }
    return list((made | changed).items())


@pytest.mark.parametrize("is_whole", [True, False])
def test_it_follows_from_what_they_hold(monkeypatch: pytest.MonkeyPatch, is_whole: bool) -> None:
    monkeypatch.setattr(memory, "WHOLE_BYTES", 1 << 30 if is_whole else 0)
    one = in_memory(weights(), place="0 of 1")
    assert len(one.layout) == len(one.content) == 32
    assert in_memory(reversed(weights()), place="0 of 1") == one
    lora = [(name.replace(".weight", ".base_layer.weight"), tensor) for name, tensor in weights()]
    assert in_memory(lora, place="0 of 1") == one, "an engine that may serve adapters names its layers otherwise"
    other = in_memory(weights(**{"c.scale": torch.tensor(1.25)}), place="0 of 1")
    assert other.layout == one.layout and other.content != one.content
    assert in_memory(weights(), place="1 of 2").layout != one.layout
    assert in_memory(weights(**{"c.scale": torch.tensor([1.5])}), place="0 of 1").layout != one.layout


def test_every_tensor_is_sampled_also_as_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WHOLE_BYTES", 0)
    monkeypatch.setattr(memory, "SAMPLED", 8)
    large = torch.zeros(1000, 40).t()
    before = in_memory([("w", large)], place="")
    assert in_memory([("w", large + 1)], place="").content != before.content
    large[-1, -1] = 1
    assert in_memory([("w", large)], place="").content != before.content, "the last element is always looked at"


def test_weights_that_are_kept_elsewhere_are_noticed() -> None:
    """vLLM's CPU kernels leave ``Parameter(torch.empty(0))`` behind (``dispatch_cpu_unquantized_gemm``)."""
    assert in_memory(weights(), place="").is_whole
    assert not in_memory(weights(**{"a.weight": torch.empty(0)}), place="").is_whole


def test_what_cannot_be_read_has_no_content() -> None:
    odd = torch.empty(3, device="meta")
    found = in_memory([("w", odd)], place="")
    assert found.content == "" and found.layout
