# SPDX-License-Identifier: Apache-2.0
"""Real prefill servers, and decode servers that ask them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.common.servers import Running, Server, ServerSpec
from experiments.common.transfer_config import with_extra


def asks(decode: ServerSpec, prefills: Sequence[Server]) -> ServerSpec:
    """Return the configuration of a decode server that asks ``prefills``."""
    assert decode.kv_transfer is not None
    urls = {"prefill": [one.base_url for one in prefills]}
    return dataclasses.replace(decode, kv_transfer=with_extra(decode.kv_transfer, urls))


class Asking(Running):
    """Prefill servers, and after them decode servers that ask all of them; their names say their roles."""

    def configured(self, spec: ServerSpec) -> ServerSpec:
        prefills = [one for one in self.servers if "prefill" in one.spec.name]
        return asks(spec, prefills) if "decode" in spec.name else spec


@contextlib.contextmanager
def asking(prefills: Sequence[ServerSpec], decode: ServerSpec, logs: Path) -> Iterator[tuple[Running, Server]]:
    """Starts all of them together; they are ready."""
    with Running(list(prefills), logs) as asked, Running([asks(decode, asked.servers)], logs) as asking_:
        asked.ready()
        yield asked, asking_.ready()[0]
