# SPDX-License-Identifier: Apache-2.0
"""A lease between the transfer threads of decode, which sends heartbeats, and prefill: how long may each stall?

Each has a separate clock, as on two hosts.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ManualClock

from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.messages import EXTENSION, INTERVAL, heartbeats, read_heartbeat
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import LeaseRenewal
from kvcached_nixl.worker.decode.receiver import Renewals
from kvcached_nixl.worker.prefill.registry import Leases

LEASE_SECONDS = 30.0
LONGEST_STEP_SECONDS = (EXTENSION - INTERVAL) * LEASE_SECONDS
THEIRS = PrefillRequestId("cmpl-1-0-aaaaaaaa")
PREFILL = RemotePrefill("prefill", "10.0.0.1", 5600, 1)


class Lease:
    """One request: prefill has ended it, and decode waits with it."""

    def __init__(self) -> None:
        self._clocks = ManualClock(-5e6), ManualClock(7e3)
        self._leases = Leases(self._clocks[0], lease_seconds=LEASE_SECONDS)
        self._renewals = Renewals(self._clocks[1], LEASE_SECONDS)
        self._under_way: list[bytes] = []
        self._leases.grant(THEIRS)
        self._renewals.want(LeaseRenewal(DecodeRequestId("d"), PREFILL, THEIRS, LEASE_SECONDS))

    def pass_time(self, seconds: float) -> None:
        for clock in self._clocks:
            clock.advance(seconds)

    def decode_steps(self) -> None:
        for names in self._renewals.take_due().values():
            self._under_way += heartbeats(names)

    def prefill_steps(self) -> bool:
        """Whether it still holds the request's blocks afterwards."""
        for heartbeat in self._under_way:
            self._leases.renew(map(PrefillRequestId, read_heartbeat(heartbeat)))
        self._under_way.clear()
        self._leases.take_due(self._clocks[0].now_seconds())
        return THEIRS in self._leases

    def prefill_looks_on(self, seconds: float) -> bool:
        """As `prefill_steps`, several times a second while this time passes."""
        for _ in range(100):
            self.pass_time(seconds / 100)
            is_held = self.prefill_steps()
        return is_held


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, LONGEST_STEP_SECONDS, exclude_max=True),
            st.lists(st.floats(0.0, 1.0), max_size=3, unique=True).map(sorted),
        ),
        max_size=30,
    )
)
def test_it_outlives_every_step_of_decode_of_less_than_half_of_it(steps: list[tuple[float, list[float]]]) -> None:
    """And prefill's of any length: each of decode's steps comes with the moments in it at which prefill's end."""
    lease = Lease()
    for seconds, ends_of_prefills in steps:
        lease.decode_steps()
        passed = 0.0
        for end in ends_of_prefills:
            lease.pass_time(seconds * end - passed)
            passed = seconds * end
            assert lease.prefill_steps()
        lease.pass_time(seconds - passed)


@pytest.mark.parametrize(("step_seconds", "holds"), [(LONGEST_STEP_SECONDS - 0.1, True), (20.1, False)])
def test_when_it_ends_while_decode_computes(step_seconds: float, holds: bool) -> None:
    lease = Lease()
    lease.pass_time(LEASE_SECONDS - 1.0)
    lease.decode_steps()
    assert lease.prefill_steps()
    assert lease.prefill_looks_on(step_seconds) is holds


def test_what_prefill_reads_late_counts_from_then() -> None:
    """Only prefill's clock decides: it cannot know how long a heartbeat was in flight."""
    lease = Lease()
    lease.decode_steps()
    lease.pass_time(2 * LEASE_SECONDS)
    assert lease.prefill_steps()
    assert lease.prefill_looks_on(EXTENSION * LEASE_SECONDS - 0.1)
    lease.pass_time(0.2)
    assert not lease.prefill_steps()
