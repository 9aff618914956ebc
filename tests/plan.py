# SPDX-License-Identifier: Apache-2.0
"""Decide which tests tests/run.sh runs with which vLLM, and print one job per line.

A job is a tier, or one file of the slowest tiers (e2e, stacks), with one vLLM. Its size is "brief" (without
the tests marked ``long``) or "whole".

    newcomer   the tiers of `NEWCOMER` with one vLLM and one Python, brief where a brief form exists: within 12 minutes.
               Real servers are those of equivalence
    all        every job
    turn       what CI runs. Each turn has lint, coverage (which runs unit and the fast subset of flow), repo, install,
               gpu and vllm-router; and contract and equivalence in brief with the newest vLLM that servers are tested
               with and one of the others. Then it adds one of the other jobs, one of the other stacks if it fits, and
               as many of the other jobs as fit; the number of the commit chooses all of them.

A line is "JOB VLLM brief|whole MINUTES". The jobs that a turn leaves out follow, one per line, each after a "#".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, LOADS_BEHIND, ROWS, Evidence

TIERS = (
    "lint", "unit", "coverage", "flow", "repo", "install", "gpu", "pythons", "contract", "e2e", "stacks", "equivalence",
)  # fmt: skip
ONCE = ("lint", "unit", "flow", "repo")
"""Tiers that do not depend on the vLLM, and so run once."""
NEWCOMER = (*ONCE, "gpu", "contract", "equivalence")
EACH_TURN = ("lint", "coverage", "repo", "install", "gpu")
"""Run by every turn, beside the fast subsets. ``coverage`` runs all of ``unit`` and the fast subset of ``flow``."""
SERVED = tuple(row.tested for row in ROWS if Evidence.E2E in row.evidence)
NEWEST = SERVED[-1]
"""The vLLM of every run that uses only one."""


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


RUNNERS = {
    row.tested: (
        *(("V1",) if _number(row.tested) < _number(LOADS_BEHIND.since) else ()),
        *(("V2",) if _number(row.tested) >= _number(HITS_DIVERGE.since) else ()),
    )
    for row in ROWS
}
"""The model runners that kvcached accepts. Without `packaging`: this runs before there is an environment."""
ROUTER = "stacks/test_vllm_router.py"
"""Run by every turn, too."""
BUDGET_MINUTES = 64.0
"""What a turn may take by the estimates. tests/run.sh stops beginning jobs by the clock: machines differ."""

# Minutes of a job on two cores: (brief, whole). None if the job has no brief form.
MINUTES: dict[str, tuple[float | None, float]] = {
    "lint": (None, 1.0),
    "unit": (None, 2.2),
    "coverage": (None, 7.5),
    "flow": (1.3, 6.0),
    "repo": (None, 0.3),
    "install": (None, 3.0),
    "gpu": (None, 0.2),
    "pythons": (None, 14.0),
    "contract": (2.5, 16.0),
    "e2e/test_asking.py": (None, 9.5),
    "e2e/test_conversations.py": (None, 4.0),
    "e2e/test_drafts.py": (None, 10.0),
    "e2e/test_endpoints.py": (None, 3.5),
    "e2e/test_features.py": (None, 1.7),
    "e2e/test_fuzzed_parameters.py": (None, 2.5),
    "e2e/test_identity.py": (None, 7.5),
    "e2e/test_images.py": (None, 1.3),
    "e2e/test_kv_events.py": (None, 1.2),
    "e2e/test_leases.py": (None, 3.5),
    "e2e/test_memory_pressure.py": (None, 2.0),
    "e2e/test_models.py": (None, 16.0),
    "e2e/test_names.py": (None, 8.0),
    "e2e/test_offloading.py": (None, 4.0),
    "e2e/test_push.py": (None, 5.0),
    "e2e/test_refusals.py": (None, 2.5),
    "e2e/test_roles.py": (None, 1.2),
    "e2e/test_traces.py": (None, 4.5),
    "e2e/test_waits.py": (None, 2.6),
    "stacks/test_balancers.py": (None, 1.9),
    "stacks/test_containerfile.py": (None, 1.0),
    "stacks/test_dynamo.py": (None, 3.0),
    "stacks/test_kubernetes.py": (None, 1.2),
    "stacks/test_ray_serve.py": (None, 6.0),
    "stacks/test_toy_proxies.py": (None, 3.0),
    "stacks/test_vllm_router.py": (None, 1.6),
    "equivalence": (4.5, 13.5),
    "equivalence/V2": (None, 14.0),
}
STACKS = tuple(what for what in MINUTES if what.startswith("stacks/") and what != ROUTER)
"""A turn runs one of them, if it fits."""
ENVIRONMENT_MINUTES = 2.0
ONLY_WITH = {what: "0.28.0" for what in STACKS}
"""The vLLM that Dynamo and Ray pin, whose proxies are run, and that docs/deploy has."""


@dataclass(frozen=True)
class Job:
    what: str
    vllm: str
    size: str = "whole"

    @property
    def minutes(self) -> float:
        brief, whole = MINUTES[self.what]
        return whole if self.size == "whole" or brief is None else brief

    @property
    def tier(self) -> str:
        return self.what.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.what} {self.vllm} {self.size}"


def jobs(tier: str, vllm: str, size: str = "whole") -> list[Job]:
    """Returns the jobs of a tier. Jobs that have no brief form are whole."""
    if tier == "equivalence" and RUNNERS[vllm] == ("V2",):
        # Without a GPU the kernels of model runner V2 are interpreted: a whole comparison takes twice as long.
        return [Job("equivalence/V2", vllm, "brief")]
    return [
        Job(what, vllm, "whole" if brief is None else size)
        for what, (brief, _) in MINUTES.items()
        if what.partition("/")[0] == tier
        and (what != "equivalence/V2" or "V2" in RUNNERS[vllm])
        and ONLY_WITH.get(what, vllm) == vllm
    ]


def newcomer(vllm: str) -> list[Job]:
    """Tiers with one vLLM, in brief. Equivalence covers both directions, with real servers."""
    chosen = [job for tier in NEWCOMER for job in jobs(tier, vllm, "brief")]
    return [job for job in chosen if job.what != "equivalence/V2" or "V1" not in RUNNERS[vllm]]


def _with_servers(vllm: str) -> list[str]:
    """Returns the tiers with real servers that are run with this vLLM."""
    return ["e2e", "stacks", "equivalence"] if vllm in SERVED else ["equivalence"]


def everything() -> list[Job]:
    """Every tier with every vLLM whose result can differ."""
    found = [job for tier in (*ONCE, "coverage") for job in jobs(tier, NEWEST)]
    for row in ROWS:
        tiers = ("install", "contract", *_with_servers(row.tested))
        found += [job for tier in tiers for job in jobs(tier, row.tested)]
    return [*found, *jobs("gpu", NEWEST), *jobs("pythons", NEWEST)]


def turn(number: int) -> list[Job]:
    """The jobs of every turn, then those of the rest that fit into `BUDGET_MINUTES`; ``number`` says which is first."""
    found = [job for tier in EACH_TURN for job in jobs(tier, NEWEST)] + [Job(ROUTER, NEWEST)]
    *others, newest = SERVED
    for vllm in (others[number % len(others)], newest):
        found += [Job("contract", vllm, "brief"), Job("equivalence", vllm, "brief")]
    what = STACKS[number % len(STACKS)]
    stack = Job(what, ONLY_WITH.get(what, NEWEST))
    rest = [job for job in everything() if job not in found]
    start = number % len(rest)
    for job in [rest[start], stack, *rest[start + 1 :], *rest[:start]]:
        if job in found:
            continue
        brief = Job(job.what, job.vllm, "brief")
        instead = [one for one in found if one != brief] + [job]
        if minutes(instead) <= BUDGET_MINUTES:
            found = instead
    return sorted(found, key=lambda job: TIERS.index(job.tier))


def minutes(chosen: Iterable[Job]) -> float:
    """Minutes that all of ``chosen`` take on two cores, including the set-up of their environments."""
    chosen = list(chosen)
    environments = ENVIRONMENT_MINUTES * len({job.vllm for job in chosen})
    return round(sum(job.minutes for job in chosen) + environments, 3)


def named(tiers: Sequence[str], versions: Sequence[str]) -> list[Job]:
    """Returns these tiers in full with each of ``versions``. Tiers that need no vLLM run once.

    Raises:
        ValueError: a tier does not exist.
    """
    if unknown := [tier for tier in tiers if tier not in TIERS]:
        raise ValueError(f"found the tier {unknown[0]!r}; expected one of: {', '.join(TIERS)}. Nothing was run.")
    found = []
    for tier in tiers:
        chosen = versions[-1:] if tier in (*ONCE, "coverage", "gpu", "pythons") else versions
        found += [job for vllm in chosen for job in jobs(tier, vllm)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="+", metavar="newcomer|all|turn|TIER", help="see above; TIER...: these in full")
    parser.add_argument("--vllm", metavar="VERSION", action="append", help=f"vLLM of newcomer or TIER ({NEWEST})")
    parser.add_argument("--number", type=int, default=0, help="number of the commit, for turn (%(default)s)")
    options = parser.parse_args(arguments)
    versions = options.vllm or [NEWEST]
    plans: dict[str, Callable[[], list[Job]]] = {
        "newcomer": lambda: newcomer(versions[-1]),
        "all": everything,
        "turn": lambda: turn(options.number),
    }
    if len(options.plan) > 1 and (misplaced := [word for word in options.plan if word in plans]):
        print(f"tests/run.sh: found {misplaced[0]!r} among tiers; expected it alone. Nothing was run.", file=sys.stderr)
        return 2
    try:
        chosen = plans.get(options.plan[0], lambda: named(options.plan, versions))()
    except ValueError as error:
        print(f"tests/run.sh: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"{job} {job.minutes:.0f}" for job in chosen))
    if options.plan[0] == "turn":
        print("\n".join(f"# {job}" for job in everything() if job not in chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
