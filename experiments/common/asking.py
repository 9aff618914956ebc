# SPDX-License-Identifier: Apache-2.0
"""Real prefill servers, and a decode server that asks them: no router."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.common.servers import Running, Server, ServerSpec
from experiments.common.transfer_config import with_extra

__all__ = ["asking"]


@contextlib.contextmanager
def asking(prefills: Sequence[ServerSpec], decode: ServerSpec, logs: Path) -> Iterator[tuple[Running, Server]]:
    """Starts all of them together; they are ready."""
    assert decode.kv_transfer is not None
    with Running(list(prefills), logs) as asked:
        urls = {"prefill": [one.base_url for one in asked.servers]}
        spec = dataclasses.replace(decode, kv_transfer=with_extra(decode.kv_transfer, urls))
        with Running([spec], logs) as asks:
            asked.ready()
            yield asked, asks.ready()[0]
