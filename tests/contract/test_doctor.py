# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcached_nixl doctor``: its report agrees with what a server does and with a running engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hostvmm import is_hostvmm_build
from support.nodes import PREFILL_FILLING, RESERVED, Node

from kvcached_nixl.cli.doctor import read_from
from kvcached_nixl.proof.result import AS_CONFIGURED, Question
from kvcached_nixl.transport.side_channel import SideChannel

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]
QUESTION = Question("cpu", 0, "DRAM", ("UCX",))


@pytest.fixture
def direction() -> str:
    return "pull"


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    one = SideChannel()
    yield one
    one.close()


@pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory")
@pytest.mark.parametrize("registration", ["follows", "pinned"])
def test_it_says_what_a_server_would_do(registration: str) -> None:
    """Its exit status, what is left of it for programs, and what to change."""
    found = subprocess.run(
        [sys.executable, "-m", "kvcached_nixl", "doctor", "--json"],
        env={**os.environ, "UCX_TLS": "tcp,cma", "NIXL_HOSTVMM_REGISTRATION": registration},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    said = json.loads(found.stdout)
    is_direct = registration == "follows"
    assert found.returncode == (0 if is_direct else 1)
    assert said["memory_path"] == ("direct" if is_direct else "host")
    assert bool(said["refused"]) is not is_direct and said["advice"][: len(said["refused"])] == said["refused"]
    assert {lane["name"] for lane in said["proof"]["lanes"]} >= {"tcp", AS_CONFIGURED}
    assert said["platform"]["page_bytes"] == 2 << 20 and said["limits"]["max_map_count"] > 0
    assert said["peer"] is None


def test_a_running_engine_is_read_from_and_left_as_it_is(node: Callable[..., Node], channel: SideChannel) -> None:
    """Reports its memory in attention's layout, and touches no byte of it."""
    engine = node(PREFILL_FILLING)
    where = engine.address()
    found = read_from(channel, where["remote_host"], where["remote_port"], 0, QUESTION)
    assert (found.engine_id, found.tp_size, found.compatibility) == (where["remote_engine_id"], 1, engine.tag)
    assert {planes.num_blocks for planes in found.memory} == {RESERVED.num_blocks}
    assert found.read > 0 and found.descriptors > 0
    assert engine.are_filled(list(range(RESERVED.num_blocks)), PREFILL_FILLING)
