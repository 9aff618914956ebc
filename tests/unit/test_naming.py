# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.naming`: an engine's name, its owner, and what is cleared when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached_nixl.errors import NameRefused
from kvcached_nixl.naming import LONGEST, Claim, Places, clear_abandoned, is_name, join, own_name, take

OWNER = """
import sys
from pathlib import Path
from kvcached_nixl.naming import Places, join, take
root = Path(sys.argv[1])
places = Places(lambda name: root / f"kvcached-tp-{name}-x", "kvcached-tp-*", root / "shm")
claim = (join if sys.argv[2] == "join" else lambda wish, places: take(wish, None, places))(sys.argv[3], places)
print(claim.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "shm").mkdir()
    return Places(lambda name: tmp_path / f"kvcached-tp-{name}-x", "kvcached-tp-*", tmp_path / "shm")


Started = Callable[[str, str], tuple[subprocess.Popen[str], str]]


@pytest.fixture
def started(tmp_path: Path, places: Places) -> Iterator[Started]:
    """Starts another process that takes or joins a name; its name."""
    processes: list[subprocess.Popen[str]] = []

    def start(what: str, name: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path), what, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def left(places: Places) -> list[str]:
    root = places.segments.parent
    return sorted(str(path.relative_to(root)) for path in (*root.glob("kvcached-tp-*"), *places.segments.iterdir()))


def write_segments(claim: Claim) -> None:
    for path in (claim.name, f"{claim.name}_g1"):
        (claim.places.segments / path).write_bytes(b"\0" * 24)


@pytest.mark.parametrize(
    ("wish", "rank", "name"),
    [
        ("decode", None, "decode-0a0a0a0a"),
        ("decode", 1, "decode-dp1-0a0a0a0a"),
        ("a b/../ü", None, "a-b------0a0a0a0a"),
        ("x" * 90, 10, "x" * (LONGEST - 14) + "-dp10-0a0a0a0a"),
    ],
)
def test_an_own_name_begins_with_the_wish_and_fits(wish: str, rank: int | None, name: str) -> None:
    """It begins with the requested name; the suffix that makes it unique is never cut off."""
    assert own_name(wish, rank, "0a0a0a0a") == name
    assert is_name(name)
    assert not is_name("../" + name[:8])


def test_two_owners_with_one_wish_have_two_names(places: Places) -> None:
    """And two folders, which nobody else may enter."""
    first, second = take("decode", None, places), take("decode", None, places)
    assert first.name != second.name
    assert all(one.folder.stat().st_mode & 0o777 == 0o700 for one in (first, second))


@pytest.mark.parametrize("taken", ["folder", "segment"])
def test_a_name_that_is_in_use_is_drawn_again(places: Places, taken: str) -> None:
    """Also where only its account is there, of an engine whose sockets are in another container."""
    if taken == "folder":
        places.sockets("decode-1").mkdir()
    else:
        (places.segments / "decode-1").touch()
    draws = iter(["1", "2"])
    assert take("decode", None, places, lambda: next(draws)).name == "decode-2"
    assert places.sockets("decode-1").exists() is (taken == "folder")


def test_names_that_are_all_in_use_are_refused(places: Places) -> None:
    """The refusal names what is in the way."""
    places.sockets("decode-1").mkdir()
    with pytest.raises(NameRefused, match=r"kvcached-tp-decode-1-x cannot be created: every name .* is in use"):
        take("decode", None, places, lambda: "1")


def test_a_host_without_a_place_for_sockets_is_refused(tmp_path: Path) -> None:
    """Not a stack trace out of an engine core."""
    nowhere = Places(lambda name: tmp_path / "no" / name, "*", tmp_path)
    with pytest.raises(NameRefused, match="Let this user create folders in"):
        take("decode", None, nowhere)


def test_a_worker_joins_the_engine_that_lives(places: Places, started: Started) -> None:
    """In any process group. The name stays in use while a worker lives, even after its owner has ended."""
    owner, name = started("take", "decode")
    worker = join(name, places)
    assert not worker.owns and worker.name == name
    owner.kill()
    owner.wait()
    assert clear_abandoned(places) == ()
    worker.release()
    assert places.sockets(name).exists()
    assert clear_abandoned(places) == (name,)


@pytest.mark.parametrize("gone", ["never there", "killed", "cleared"])
def test_a_worker_without_its_engine_is_refused(places: Places, started: Started, gone: str) -> None:
    """On another host, in another container, or too late."""
    owner, name = started("take", "decode")
    owner.kill()
    owner.wait()
    if gone == "cleared":
        clear_abandoned(places)
    with pytest.raises(NameRefused, match="(?s)no engine that owns the kvcached name .*on one host"):
        join("decode-other" if gone == "never there" else name, places)


def test_another_users_folder_is_neither_joined_nor_cleared(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user's processes could answer there."""
    claim = take("decode", None, places)
    os.close(claim._descriptor)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NameRefused, match="another user's"):
        join(claim.name, places)
    assert clear_abandoned(places) == ()


def test_an_owner_that_ends_removes_all_of_its_own(places: Places) -> None:
    """Its folder with whatever is in it, the account of every group; nothing of another's."""
    other, claim = take("decode", None, places), take("decode", None, places)
    for one in (other, claim):
        write_segments(one)
    (claim.folder / "pp1").mkdir()
    (claim.folder / "pp1" / "w0.sock").touch()
    claim.release()
    claim.release()
    assert all(other.name in one for one in left(places)) and len(left(places)) == 3


def test_a_forked_child_removes_nothing(places: Places) -> None:
    """It has its parent's part, and may end first."""
    claim = take("decode", None, places)
    pid = os.fork()
    if pid == 0:
        claim.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert claim.folder.exists()


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"name": "../shm"}', b'{"name": "other"}', json.dumps({"name": 7}).encode(), b"\xff"]
)
def test_a_record_that_does_not_say_whose_it_is_removes_nothing(places: Places, record: bytes) -> None:
    """Nor does a folder without one: kvcached's own, of an engine without this package."""
    (folder := places.sockets("decode")).mkdir()
    (folder / "owner").write_bytes(record)
    places.sockets("plain").mkdir()
    (places.segments / "other").touch()
    assert clear_abandoned(places) == ()
    assert len(left(places)) == 3


def test_the_last_look_waits_for_workers_whose_engine_core_was_killed(places: Places, started: Started) -> None:
    """They end by themselves a moment later; those of an engine core that lives are not waited for."""
    owner, name = started("take", "decode")
    worker, _ = started("join", name)
    assert clear_abandoned(places, 60.0) == ()
    owner.kill()
    owner.wait()
    assert clear_abandoned(places, 0.05) == ()
    assert worker.stdin is not None
    worker.stdin.close()
    assert clear_abandoned(places, 60.0) == (name,)
