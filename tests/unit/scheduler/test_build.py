# SPDX-License-Identifier: Apache-2.0
"""scheduler/facade.py: the scheduler's half is built from what vLLM's connector knows, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.clocks import ManualClock
from support.engine_fakes import BLOCK_SIZE, Pool, of_decode, of_prefill, reports, stock

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade, build_scheduler
from kvcached_nixl.side_channel_address import Endpoint, SideChannelAddress
from kvcached_nixl.wire.manifest import Keeps, KVGroup, KVGroups
from kvcached_nixl.wire.step import OfferUpdate

BLOCKS = ([7, 3, 9],)
ADDRESS = SideChannelAddress(Endpoint("0.0.0.0", 5601), ("0.0.0.0",), Endpoint("10.0.0.1", 5600), "a test")


def started(extra_config: Mapping[str, Any], clock: ManualClock | None = None, **changed: Any) -> SchedulerFacade:
    taken = stock(extra_config=extra_config, **changed)
    made = build_scheduler(taken, ADDRESS, ManualClock() if clock is None else clock)
    made.engine.bind(Pool())
    return made


def test_an_engine_knows_itself() -> None:
    made = started({"kv_lease_duration": 12})
    made.arrived(of_prefill())
    (offered,) = made.take_step([Progress("p1", BLOCKS, True, 10)]).of(OfferUpdate)
    _, params = made.finished(of_prefill(), True, BLOCKS)
    assert params is not None
    expected = {"remote_engine_id": "own", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2}
    assert params.items() >= (expected | {"transfer_mode": "pull"}).items()
    assert offered.manifest is not None
    assert (offered.manifest.lease_seconds, offered.manifest.block_sizes) == (12.0, (BLOCK_SIZE,))
    assert offered.manifest.incarnation == made.engine.incarnation


def test_every_start_is_another_one() -> None:
    """A restarted engine is another one even under the same id; and nobody guesses its workers' key."""
    steps = [started({}).take_step([]) for _ in range(3)]
    assert len({step.incarnation for step in steps}) == len({step.wake_address for step in steps}) == 3
    assert all(len(step.incarnation) == 16 and len(step.wake_address.key) == 32 for step in steps)
    assert (steps[0].host, steps[0].port) == ("10.0.0.1", 5600)
    wake_address = steps[0].wake_address
    assert (wake_address.host, wake_address.port) == ("127.0.0.1", 5601), "workers go no way round"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_model_that_drops_blocks_computes_the_last_token_here(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """B5: told by what its groups are, however many."""
    windows = KVGroups((KVGroup(BLOCK_SIZE, Keeps.WINDOW),))
    made = started({"transfer_mode": mode}, window_kinds=["SlidingWindowSpec"] * 2, groups=windows)
    assert ("SlidingWindowSpec" in caplog.text) is (mode == "push"), "that it is not streamed is said"
    request = of_decode()
    made.arrived(request)
    assert made.matched(request, 0) == (9, True), "the last token is computed here"


def test_the_deadline_is_a_setting() -> None:
    clock = ManualClock()
    made = started({"handover_timeout": 3}, clock)
    request = of_decode()
    made.arrived(request)
    made.allocated(request, BLOCKS, made.matched(request, 0)[0])
    clock.advance(2.9)
    told = reports()
    made.collect(told)
    assert told.received == set()
    clock.advance(0.1)
    made.collect(told)
    assert told.received == {"d1"}


def test_settings_that_cannot_be_used_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="bidirectional_kv_xfer"):
        build_scheduler(stock(extra_config={"bidirectional_kv_xfer": True}), ADDRESS, ManualClock())


def test_a_timeout_of_vllms_that_decides_nothing_here_is_said_to_do_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Finding D3."""
    started({})
    assert not caplog.records
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "480")
    started({"kv_lease_duration": 12})
    (record,) = caplog.records
    assert "VLLM_NIXL_ABORT_REQUEST_TIMEOUT has no effect" in record.message and "12 s" in record.message
