# SPDX-License-Identifier: Apache-2.0
"""The proof runs once per boot, versions and settings; what a prover cannot find out is explained."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvcached_nixl.errors import Unproved
from kvcached_nixl.proof import find as finding
from kvcached_nixl.proof.find import find
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Rates, Ucx

QUESTION = Question("cpu", 0, "DRAM", ("UCX",))
RATES = Rates(1e9, 1e9, 1e5)
LANE = LaneFound("tcp", "tcp", rates={"elastic": RATES, "ordinary": RATES})
UCX = Ucx("1.19.0", ("self/memory", "tcp/lo"))
SAYS = msgspec.json.encode(Proof(QUESTION, {}, (LANE,), UCX)).decode()


class Prover:
    """Stands in for ``python -m kvcached_nixl.proof``: notes each question, and says what a test has it say."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.asked = folder / "asked"
        self.program = folder / "python"
        self.environ = {"XDG_CACHE_HOME": str(folder / "cache"), "PATH": "/usr/bin:/bin"}
        self.says(f"echo NIXL INFO; echo '{SAYS}'")
        patch.setattr(sys, "executable", str(self.program))

    def says(self, script: str) -> None:
        self.program.write_text(f'#!/bin/sh\ncat >>"{self.asked}"; echo >>"{self.asked}"\n{script}\n')
        self.program.chmod(0o755)

    @property
    def questions(self) -> list[Question]:
        return [msgspec.json.decode(line, type=Question) for line in self.asked.read_text().splitlines()]


@pytest.fixture
def prover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prover:
    return Prover(tmp_path, monkeypatch)


def test_a_prover_is_asked_once(prover: Prover) -> None:
    first = find(QUESTION, prover.environ)
    assert first.lanes == (LANE,) and first.question == QUESTION and first.seconds > 0
    assert find(QUESTION, prover.environ) == first
    assert prover.questions == [QUESTION]


def test_several_workers_that_start_at_once_ask_one_prover(prover: Prover) -> None:
    prover.says(f"sleep 0.2; echo '{SAYS}'")
    with ThreadPoolExecutor(4) as at_once:
        found = set(at_once.map(lambda _: find(QUESTION, prover.environ).seconds, range(4)))
    assert len(found) == 1 and prover.questions == [QUESTION]


def test_it_is_asked_again_when_something_has_changed(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, versions, the host's start, the device: each is a question of its own."""
    find(QUESTION, prover.environ)
    names = ("UCX_TLS", "NIXL_PLUGIN_DIR", "FI_PROVIDER", "LD_PRELOAD", "LD_LIBRARY_PATH", "KVCACHED_SHAREABLE_PAGES")
    for name in names:
        find(QUESTION, {**prover.environ, name: "other"})
    # Of another engine on the host.
    for name in ("KVCACHED_IPC_NAME", "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE_HOST"):
        find(QUESTION, {**prover.environ, name: "other"})
    (prover.program.parent / "ucx.conf").write_text("UCX_TLS=tcp")
    find(QUESTION, {**prover.environ, "HOME": str(prover.program.parent)})
    find(msgspec.structs.replace(QUESTION, device_index=1), prover.environ)
    monkeypatch.setattr(finding, "_version", lambda package: "9.9")
    find(QUESTION, prover.environ)
    boot = prover.program.with_name("boot_id")
    boot.write_text("another")
    monkeypatch.setattr(finding, "_BOOT", boot)
    find(QUESTION, prover.environ)
    monkeypatch.setattr(finding.sysconfig, "get_path", lambda name: str(prover.program.parent))
    beside = prover.program.parent / "etc/ucx"
    beside.mkdir(parents=True)
    find(QUESTION, prover.environ)
    (beside / "ucx.conf").write_text("UCX_TLS=tcp")
    find(QUESTION, prover.environ)
    assert len(prover.questions) == 12
    find(QUESTION, {**prover.environ, "HOME": "/elsewhere"})
    assert len(prover.questions) == 12


def test_what_ucx_could_choose_from_here_is_what_was_proved(prover: Prover) -> None:
    """A card that has come up since, shared memory that another container does not have, another build of UCX."""
    assert find(QUESTION, prover.environ, here=UCX).why_not == ()
    assert find(QUESTION, prover.environ, here=UCX).why_not == ()
    assert len(prover.questions) == 1
    for other in (Ucx("1.20.0", UCX.resources), Ucx("1.19.0", ("tcp/eth0",))):
        assert find(QUESTION, prover.environ, here=other).why_not == ()
    assert len(prover.questions) == 3
    found = find(QUESTION, prover.environ, here=Ucx("1.19.0", ("tcp/lo", "rc_mlx5/mlx5_0:1")))
    assert found.why_not == ("rc_mlx5 could not be tested: the prover could not choose it",)


@pytest.fixture
def with_one_unusable(prover: Prover) -> Prover:
    """As each start with kvcached 0.1.6 on a GPU finds: UCX does not carry its pages by cuda_ipc."""
    never = LaneFound("cuda_ipc", "cuda_ipc,cuda_copy,tcp", unusable="UCX moves bytes over tcp")
    prover.says(f"echo '{msgspec.json.encode(Proof(QUESTION, {}, (LANE, never), UCX)).decode()}'")
    return prover


def test_an_answer_with_a_lane_that_cannot_be_used_is_kept(with_one_unusable: Prover) -> None:
    """Each start, and each rank, would else have two processes a lane."""
    prover = with_one_unusable
    first = find(QUESTION, prover.environ, here=UCX)
    assert first.unusable == ("cuda_ipc",) and len(first.why_not) == 1
    assert find(QUESTION, prover.environ, here=UCX) == first
    assert len(prover.questions) == 1


@pytest.mark.parametrize("age_hours", [23, 25])
def test_what_could_not_be_used_may_be_some_other_time(with_one_unusable: Prover, age_hours: int) -> None:
    """On a busy host a member does not answer in time; that does not hold until the host is started again."""
    prover = with_one_unusable
    find(QUESTION, prover.environ)
    prover.says(f"echo '{SAYS}'")
    (kept,) = Path(prover.environ["XDG_CACHE_HOME"]).rglob("proof-*.json")
    then = time.time() - age_hours * 3600
    os.utime(kept, (then, then))
    assert find(QUESTION, prover.environ).unusable == (("cuda_ipc",) if age_hours == 23 else ())


def test_a_start_does_not_end_for_what_could_not_be_used_before(with_one_unusable: Prover) -> None:
    """Where kvcached's pages are asked for, a container that is started again and again has a chance."""
    prover = with_one_unusable
    find(QUESTION, prover.environ)
    prover.says(f"echo '{SAYS}'")
    assert find(QUESTION, prover.environ, is_needed=True).why_not == ()
    assert find(QUESTION, prover.environ, is_needed=True).why_not == ()
    assert len(prover.questions) == 2


def test_what_is_known_and_usable_is_kept_for_as_long_as_the_host_runs(prover: Prover) -> None:
    find(QUESTION, prover.environ)
    (kept,) = Path(prover.environ["XDG_CACHE_HOME"]).rglob("proof-*.json")
    os.utime(kept, (0, 0))
    assert find(QUESTION, prover.environ).lanes == (LANE,)
    assert len(prover.questions) == 1


def test_what_another_backend_could_choose_from_is_not_known(prover: Prover) -> None:
    """So each start finds out."""
    other = msgspec.structs.replace(QUESTION, backends=("LIBFABRIC",))
    find(other, prover.environ)
    find(other, prover.environ)
    assert len(prover.questions) == 2


def test_somebody_who_holds_the_lock_and_stands_still_holds_up_nobody_for_ever(
    prover: Prover, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(QUESTION, prover.environ)
    (kept,) = Path(prover.environ["XDG_CACHE_HOME"]).rglob("proof-*.json")
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        find(QUESTION, prover.environ)
        assert len(prover.questions) == 1, "what is kept is read without it"
        monkeypatch.setattr(finding, "PROVER_SECONDS", 0.5)
        find(QUESTION, prover.environ, is_fresh=True)
    assert len(prover.questions) == 2


def test_what_a_prover_has_started_ends_with_it(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "PROVER_SECONDS", 1.0)
    child = prover.program.with_name("child")
    prover.says(f'sleep 60 & echo $! >"{child}"; wait')
    with pytest.raises(Unproved, match="timed out"):
        find(QUESTION, prover.environ)
    status = Path(f"/proc/{int(child.read_text())}/stat")
    until = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.02)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"lanes": []}'])
def test_what_was_kept_and_cannot_be_read_is_asked_again(prover: Prover, content: bytes) -> None:
    find(QUESTION, prover.environ)
    (kept,) = Path(prover.environ["XDG_CACHE_HOME"]).rglob("proof-*.json")
    kept.write_bytes(content)
    assert find(QUESTION, prover.environ).lanes == (LANE,)
    assert len(prover.questions) == 2


def test_nobody_has_to_have_a_home(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is in no list of users."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    del prover.environ["XDG_CACHE_HOME"]
    assert find(QUESTION, prover.environ).lanes == (LANE,)


def test_nothing_has_to_be_kept(prover: Prover, tmp_path: Path) -> None:
    """A file where the folder should be: a container may have no home that can be written."""
    (tmp_path / "cache").write_text("")
    assert find(QUESTION, prover.environ).lanes == (LANE,)
    assert find(QUESTION, prover.environ).lanes == (LANE,)
    assert len(prover.questions) == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no device >&2; exit 1", "status 1: no device"),
        ("exit 0", "status 0"),
        ("echo nonsense", "the prover printed nonsense"),
        (f"echo '{msgspec.json.encode(Proof(QUESTION, {}, (), None)).decode()}'", "no lane"),
        ("exec sleep 60", "timed out"),
    ],
)
def test_a_prover_that_cannot_tell_says_so(
    prover: Prover, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(finding, "PROVER_SECONDS", 0.5)
    prover.says(script)
    with pytest.raises(Unproved, match=words):
        find(QUESTION, prover.environ)
    assert not list(Path(prover.environ["XDG_CACHE_HOME"]).rglob("proof-*.json")), "it is asked again next time"
