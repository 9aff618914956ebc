# SPDX-License-Identifier: Apache-2.0
"""How the tests of features read streams, and tell answers apart (`support.feature_asks`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("safetensors.torch", reason="needs an environment: bash experiments/env.sh")
pytest.importorskip("tokenizers", reason="needs an environment: bash experiments/env.sh")

from support.feature_asks import Refused, check, differences, joined

CALL = {"index": 0, "id": "x", "type": "function", "function": {"name": "look_up", "arguments": ""}}
END = "data: [DONE]\n\n"


def arguments(text: str, index: int = 0) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": text}}


def event(*calls: dict[str, Any], reason: str | None = None, content: str | None = None) -> str:
    delta = {"content": content, "tool_calls": list(calls)}
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


def test_how_a_stream_is_cut_does_not_count() -> None:
    """Pieces of a call may share an event."""
    cut = event(CALL) + event(arguments("{")) + event(arguments("}"), reason="stop") + END
    merged = event(CALL, arguments("{"), arguments("}"), reason="stop") + END
    assert joined(cut) == joined(merged)
    (choice,) = joined(cut)["choices"]
    assert choice["delta"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": "{}"}


@pytest.mark.parametrize("text", ["", event(content="a"), 'data: {"error": {"message": "no"}}\n\n' + END])
def test_a_stream_with_an_error_or_without_an_end_is_none(text: str) -> None:
    with pytest.raises(Refused):
        joined(text)


@pytest.mark.parametrize(
    ("found", "expected", "count"),
    [
        ({"text": "a", "logprobs": [-1.0]}, {"text": "a", "logprobs": [-1.0004]}, 0),
        ({"text": "a", "logprobs": [-1.0]}, {"text": "b", "logprobs": [-1.1]}, 2),
        ({"token_ids": [1, 2]}, {"token_ids": [1, 2, 3]}, 1),
        ({"text": "a"}, {"text": "a", "finish_reason": "stop"}, 1),
        ({"tool_calls": [{"id": "a", "name": "f"}]}, {"tool_calls": [{"id": "b", "name": "f"}]}, 0),
        ({"tool_calls": [{"id": "a", "name": "f"}]}, {"tool_calls": [{"id": "b", "name": "g"}]}, 1),
    ],
)
def test_what_differs_is_found(found: Any, expected: Any, count: int) -> None:
    assert len(differences(found, expected)) == count
    if count:
        with pytest.raises(AssertionError):
            check({"ask": found}, {"ask": expected})
