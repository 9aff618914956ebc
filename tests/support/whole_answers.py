# SPDX-License-Identifier: Apache-2.0
"""What any endpoint of vLLM says, as a whole and without what differs between two servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["joined", "plain"]

VOLATILE = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "item_id", "call_id", "request_id", "sequence_number"),
        # A configuration's; what of a prompt was in a cache, decode's or prefill's.
        *("signature", "system_fingerprint", "cached_tokens", "cache_read_input_tokens", "cache_write_tokens"),
        "previous_response_id",
    }
)
PIECES = frozenset({"text", "content", "reasoning", "delta", "arguments", "partial_json", "thinking", "token_ids"})
"""What a stream may cut anywhere."""


def plain(found: Any) -> Any:
    """Leaves out what differs between two servers."""
    if isinstance(found, dict):
        return {name: plain(one) for name, one in found.items() if name not in VOLATILE}
    return [plain(one) for one in found] if isinstance(found, list | tuple) else found


def joined(stream: str) -> dict[str, Any]:
    """Of each field in the events of a stream the pieces together, or its different values."""
    whole: dict[str, list[Any]] = {}
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        for where, one in _leaves(plain(json.loads(data))) if data.startswith("{") else ():
            values = whole.setdefault(".".join(map(str, where)), [])
            # vLLM counts reasoning by its pieces.
            if one is None or "logprobs" in where or "reasoning_tokens" in where:
                continue
            if where[-1] in PIECES or one not in values:
                values.append(one)
    assert whole or "[DONE]" in stream, f"no event in {stream[:300]}"
    return {
        where: "".join(map(str, values)) if where.rpartition(".")[2] in PIECES else values
        for where, values in whole.items()
    }


def _leaves(found: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(found, dict):
        for name, one in found.items():
            yield from _leaves(one, (*where, name))
    elif isinstance(found, list):
        for one in found:
            yield from _leaves(one, (*where, one["index"]) if isinstance(one, dict) and "index" in one else where)
    else:
        yield where, found
