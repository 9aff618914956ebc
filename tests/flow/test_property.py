# SPDX-License-Identifier: Apache-2.0
"""Random schedules of events: no byte is wrong, every request ends, and no state is left.

``FLOW_SCHEDULES=100000 pytest tests/flow/test_property.py`` runs more of them. A seed that failed fails again::

    python -c "from support.flow_schedule import Schedule; Schedule(1234).run()"      (with tests/ on the path)
"""

from __future__ import annotations

import os

import pytest
from support.flow_schedule import Schedule

SCHEDULES = int(os.environ.get("FLOW_SCHEDULES", "2000"))
AT_ONCE = 50
BRIEF = 200
"""As many are run in brief, too."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(one, marks=[pytest.mark.long] if one >= BRIEF else []) for one in range(0, SCHEDULES, AT_ONCE)],
)
def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        try:
            Schedule(seed).run()
        except Exception as cause:
            raise AssertionError(f"seed {seed}: {cause}") from cause


@pytest.mark.long
def test_the_schedules_reach_what_they_are_meant_to_reach() -> None:
    """Else they would say nothing: both directions, KV that is used, each kind of end, blocks that are held."""
    seen = {"READ": 0, "WRITE": 0, "fetched": 0, "asked": 0, "preempted": 0, "restarted": 0, "causes": set[int]()}
    for seed in range(120):
        schedule = Schedule(seed)
        schedule.run()
        for engine in schedule.cluster.engines:
            for worker in engine.workers:
                for posted in worker.agent.posted:
                    seen[str(posted.operation)] += 1
            seen["causes"] |= set(engine.failures)
            seen["restarted"] += engine.incarnation
        requests = [one for task in schedule.tasks for one in (task.upstream, *task.children) if one is not None]
        seen["fetched"] += sum(one.num_external > 0 for one in requests)
        seen["asked"] += sum(one.num_external > 0 for task in schedule.tasks if task.asks for one in task.children)
        seen["preempted"] += sum(one.epoch for one in requests)
    assert all(seen[name] > 50 for name in ("READ", "WRITE", "fetched", "asked", "preempted")), seen
    assert seen["restarted"] > 10 and len(seen["causes"]) >= 9, seen
