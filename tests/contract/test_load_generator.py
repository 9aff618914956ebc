# SPDX-License-Identifier: Apache-2.0
"""vLLM's load generator measures the first token of a stream that the router has kept alive."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from vllm.benchmarks.lib.endpoint_request_func import StreamedResponseHandler

from kvcached_nixl.proxy.client import STILL_WAITING

FIRST = b'data: {"choices": [{"text": "x"}]}\n\n'


def messages(*pieces: bytes) -> list[str]:
    """Returns what the load generator counts, if it receives each piece by itself; it drops empty ones."""
    handler = StreamedResponseHandler()
    stripped = [bare for one in pieces if (bare := one.strip())]
    said = [message for one in stripped for message in handler.add_chunk(one)]
    return [one for one in said if not one.startswith(":")]


def test_the_first_event_behind_the_wait_is_counted() -> None:
    assert messages(STILL_WAITING, STILL_WAITING, FIRST) == [FIRST.strip().decode()]


def test_behind_a_comment_it_would_be_missed() -> None:
    """Why `STILL_WAITING` is none. Once this fails, comments would do with every supported vLLM that passes."""
    assert messages(b": waiting\n\n", FIRST) == []
